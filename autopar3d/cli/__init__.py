"""The command line: `autopar3d plan | check | simulate | calibrate | train | doctor`.

Exit codes: 0, done; 1, the request failed, or (of `check`, `simulate` and `doctor`) something is wrong; 2, the command
line itself. Mistakes are told in a line or a few; `--debug` shows the traceback.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from autopar3d.errors import AutoPar3DError

from .arguments import parse
from .source import MakeError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    options = parse(argv)
    try:
        return int(options.run(options))
    except KeyboardInterrupt:
        print("autopar3d: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # as of `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (AutoPar3DError, OSError) as error:
        return _failed(error, debug=options.debug)
    except Exception as error:  # noqa: BLE001  (whatever it is, a user of a command line is told in a line)
        return _failed(error, debug=options.debug, bug=True)


def _failed(error: BaseException, *, debug: bool, bug: bool = False) -> int:
    if debug:
        traceback.print_exception(error)
        return 1
    kind = "" if isinstance(error, MakeError) else f"{type(error).__name__}: "
    message = f"{kind}{error}"
    if isinstance(error, OSError) and error.filename is not None:
        message = f"{error.filename}: {error.strerror}"
    print(f"autopar3d: {message}", file=sys.stderr)
    if bug:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        print(
            f"autopar3d: this error is not one that autopar3d raises on purpose ({Path(frame.filename).name}:"
            f"{frame.lineno}); --debug shows its traceback",
            file=sys.stderr,
        )
    return 1
