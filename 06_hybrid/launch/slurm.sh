#!/bin/bash
# sbatch 06_hybrid/launch/slurm.sh 06_hybrid/train.py --device cuda --preset llama3-8b --pp 2 --tp 8 \
#     --shard optimizer --dtype bfloat16 --save runs/8b --resume runs/8b --save-every 100
#
# One torchrun per node, a rank for each of its GPUs. Before its time limit the job saves, goes back to the queue, and
# goes on from there: --save and --resume name one folder, which all nodes share. README.md explains every line.
#SBATCH --job-name=hybrid
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=0
#SBATCH --time=12:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
#SBATCH --propagate=NONE
set -u
ulimit -c 0

# ---- who meets where ----
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
port=$((10000 + SLURM_JOB_ID % 20000))
ranks=${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}

# ---- what torchrun and the ranks inherit ----
address=$(getent ahosts "${nodes[-1]}" | awk '{print $1; exit}')
interface=$(ip -o route get "$address" | sed -n 's/.* dev \([^ ]*\).*/\1/p')
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$interface}
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-$interface}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(((SLURM_CPUS_PER_TASK + ranks - 1) / ranks))}
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-270}

# ---- train, save, go on in another job ----
limit=
trap 'echo "time limit: saving"; limit=near; scancel --signal=TERM "$SLURM_JOB_ID"' USR1  # to torchrun, not to srun
trap : TERM  # scancel sends it to all: the ranks save, and this shell waits for them

srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=0 --wait=300 torchrun \
    --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "$ranks" --max-restarts "${MAX_RESTARTS:-3}" \
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "${nodes[0]}:$port" "$@" &
while kill -0 $! 2>/dev/null; do wait $!; done  # a signal ends a `wait` early
wait $!
code=$?

job=$(scontrol show job "$SLURM_JOB_ID")
if [[ $code != 0 && $job == *JobState=RUNNING* && ($limit || $job == *PreemptTime=[0-9]*) ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
