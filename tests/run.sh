#!/usr/bin/env bash
# All checks: format, lint, types, import order, tests; arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. .ci/env.sh
install_env dev -e ".[test,dev]"
ruff format --check .
ruff check .
mypy
lint-imports
exec python -m pytest -n 2 "$@"
