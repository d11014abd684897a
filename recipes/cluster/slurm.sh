#!/bin/bash
# Train on four Slurm nodes with eight GPUs each: torchrun on every node, rendezvous on the first.
#   sbatch recipes/cluster/slurm.sh recipes/openwebtext/tokenformer-354m.yaml
# A preempted or failed job is requeued and resumes from its last checkpoint.
#SBATCH --job-name=tokenformer
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --requeue
#SBATCH --signal=TERM@120
set -euo pipefail
recipe=${1:?usage: sbatch recipes/cluster/slurm.sh RECIPE}
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # otherwise a restarted node cannot rejoin
srun torchrun \
  --nnodes "$SLURM_NNODES" --nproc-per-node 8 --max-restarts 3 \
  --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$first:29500" \
  -m tokenformer train "$recipe" --out "runs/$(basename "$recipe" .yaml)"
