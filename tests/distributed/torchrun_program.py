"""A training job as torchrun starts it: trains, saves after each step, resumes from the last checkpoint.

    torchrun ... -m tests.distributed.torchrun_program FOLDER [--kill-rank R --kill-step S]

Each rank writes its losses by step, and rank 0 the tables at the end, to FOLDER.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tpuemb_torch as tpuemb
from tests.distributed.cases import COMBINERS, config_text, make_batch

STEPS = 5
RATES = [0.2, 0.1]
SIZES = [4, 3, 2, 5]


def batch(step: int, rank: int) -> dict[str, Any]:
    return make_batch(SIZES[rank], 100 * step + rank)


def layer() -> tpuemb.TPUEmbedding:
    return tpuemb.TPUEmbedding(config_text("adam", "MOD"), COMBINERS)


def step(embedding: tpuemb.TPUEmbedding, features: dict[str, Any]) -> float:
    """One step with loss sum((tanh(a) - 1)^2); returns it."""
    embedding.set_learning_rates(RATES)
    loss = sum((a.tanh() - 1).square().sum() for a in embedding(features).values())
    loss.backward()  # type: ignore[union-attr]
    return float(loss)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kill-rank", type=int, default=-1)
    parser.add_argument("--kill-step", type=int, default=-1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    embedding = tpuemb.shard(layer(), {"user": "row_wise", "item": "row_wise", "tiny": "table_wise"})
    first = 0
    losses: list[float] = []
    if (arguments.folder / "checkpoint").exists():
        extra = tpuemb.checkpoint.load(arguments.folder / "checkpoint", embedding)
        first = extra["step"]
        losses = json.loads((arguments.folder / f"losses-{rank}.json").read_text())[:first]
    for number in range(first, STEPS):
        if (rank, number) == (arguments.kill_rank, arguments.kill_step) and os.environ[
            "TORCHELASTIC_RESTART_COUNT"
        ] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        losses.append(step(embedding, batch(number, rank)))
        (arguments.folder / f"losses-{rank}.json").write_text(json.dumps(losses))
        tpuemb.checkpoint.save(arguments.folder / "checkpoint", embedding, step=number + 1, extra={"step": number + 1})
    parameters = embedding.retrieve_parameters()
    if rank == 0:
        where = {
            "local_world_size": os.environ["LOCAL_WORLD_SIZE"],
            "restarts": os.environ["TORCHELASTIC_RESTART_COUNT"],
        }
        torch.save({"parameters": parameters, **where}, arguments.folder / "result.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
