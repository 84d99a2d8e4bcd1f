"""`python -m autopar3d`: the command line, also installed as `autopar3d`."""

import sys

from autopar3d.cli import main

if __name__ == "__main__":
    sys.exit(main())
