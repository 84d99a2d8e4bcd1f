#!/usr/bin/env bash
# Several nodes without a scheduler: run this on each, with the first node's address.
#
#     NODES=2 HEAD=10.0.0.1 bash examples/recipes/multi_node.sh --grid 4,2,2
#
# A node that fails is started again with the others (--max-restarts), and training goes on from the last checkpoint.
set -euo pipefail
exec torchrun \
    --nnodes "${NODES:-1}" \
    --nproc-per-node "${PER_NODE:-8}" \
    --max-restarts "${RESTARTS:-3}" \
    --rdzv-backend c10d \
    --rdzv-endpoint "${HEAD:-localhost}:${PORT:-29500}" \
    "$(dirname "${BASH_SOURCE[0]}")/training_loop.py" "$@"
