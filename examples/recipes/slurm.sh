#!/usr/bin/env bash
# Slurm: 4 nodes of 8 GPUs as a (4, 2, 4) grid. y * z = 8, so the axes y and z lie inside a node.
#
#     sbatch examples/recipes/slurm.sh
#
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
set -euo pipefail
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun \
    --nnodes "$SLURM_NNODES" \
    --nproc-per-node 8 \
    --rdzv-backend c10d \
    --rdzv-endpoint "$head:29500" \
    --rdzv-id "$SLURM_JOB_ID" \
    examples/recipes/training_loop.py --grid 4,2,4 --folder "checkpoints/$SLURM_JOB_ID"
