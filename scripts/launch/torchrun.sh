#!/usr/bin/env bash
# Starts a training program on this machine, as one node of a job. Run it on every node with the same HEAD and NODES:
#
#   NODES=2 HEAD=10.0.0.1:29500 scripts/launch/torchrun.sh train.py --config model.pbtxt
#
# Without NODES, this machine is the whole job. One process per GPU, or PROCESSES of them (default on CPUs: 1 a socket).
# A job that loses a process starts again up to RESTARTS times; let the program load its last checkpoint.
set -euo pipefail

gpus="$(nvidia-smi -L 2>/dev/null | wc -l || true)"
sockets="$(lscpu -p=socket 2>/dev/null | grep -v '^#' | sort -u | wc -l || echo 1)"
processes="${PROCESSES:-$([ "$gpus" -gt 0 ] && echo "$gpus" || echo "$sockets")}"
cores="$(nproc)"
# Ranks that share a machine share its cores: more threads than that only wait for each other.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores / processes > 0 ? cores / processes : 1))}"

# Without this, processes that start again may find the addresses of those that died (torch 2.13).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

if [ "${NODES:-1}" -eq 1 ]; then
    rendezvous=(--standalone)
else
    rendezvous=(--rdzv-backend=c10d --rdzv-endpoint="${HEAD:?the address of the first node, host:port}" --rdzv-id="${JOB:-tpuemb}")
fi
exec "${PYTHON:-python}" -m torch.distributed.run --nnodes="${NODES:-1}" --nproc-per-node="$processes" \
    --max-restarts="${RESTARTS:-0}" "${rendezvous[@]}" "$@"
