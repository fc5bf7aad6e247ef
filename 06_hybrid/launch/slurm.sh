#!/bin/bash
# sbatch 06_hybrid/launch/slurm.sh 06_hybrid/train.py --preset llama3-8b --pp 2 --tp 8 --save runs/8b --resume runs/8b
#
# One torchrun per node; it starts a rank for each GPU. The job ends itself before its time limit, goes back to the
# queue, and goes on from its checkpoint: --save and --resume name the same folder, on a file system of all nodes.
#SBATCH --job-name=hybrid
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=12:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -u

# The first node of the list is where the ranks meet. A port of the job's own: two jobs may share a node.
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 20000))
ranks=${SLURM_GPUS_ON_NODE:-${RANKS_PER_NODE:-1}}

# Only the interface that the nodes share. Without it gloo takes the one of its host name, which may be loopback.
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$(ip route get "$(getent hosts "$head" | awk '{print $1; exit}')" |
    sed -n 's/.* dev \([^ ]*\).*/\1/p')}
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-$GLOO_SOCKET_IFNAME}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((${SLURM_CPUS_PER_TASK:-$ranks} / ranks))}

# 300 s before the limit the shell gets USR1 (B: the shell alone). It has the ranks save, then queues the job again.
requeue() {
    echo "time limit: saving, then back to the queue"
    requeued=1
    scancel --signal=TERM "$SLURM_JOB_ID"  # all steps: torchrun passes it on, and waits for its ranks
}
requeued=
trap requeue USR1

srun --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "$ranks" --max-restarts "${MAX_RESTARTS:-0}" \
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$head:$port" "$@" &
wait $!
code=$?
if [ -n "$requeued" ]; then
    wait  # the first wait ended with the signal
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
