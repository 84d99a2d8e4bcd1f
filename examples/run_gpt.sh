#!/usr/bin/env bash
# Train the example GPT on 8 local ranks as a (2,2,2) grid; arguments go to examples/train_gpt.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. .ci/env.sh
install_env test -e ".[test]"
exec python examples/train_gpt.py "$@"
