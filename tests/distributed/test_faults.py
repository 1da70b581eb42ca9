"""A rank that dies in the middle of a step: the others fail within seconds, and none of them hangs."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import _context

RANKS = 3
#: A rank whose peer died must have failed by then.
BOUND_S = 20


def train_until_killed(rank: int, store: str, delay: float, results: Any) -> None:
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1", LOCAL_WORLD_SIZE=str(RANKS))
    import torch
    import torch.distributed as dist

    import tpuemb_torch as tpuemb
    from tests.distributed.cases import COMBINERS, config_text, make_batch

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=timedelta(seconds=BOUND_S)
    )
    embedding = tpuemb.shard(tpuemb.TPUEmbedding(config_text("adagrad"), COMBINERS), "row_wise")
    embedding.set_learning_rates([0.1, 0.1])
    if rank == RANKS - 1:
        threading.Timer(delay, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    steps = 0
    try:
        while True:
            sum(a.square().sum() for a in embedding(make_batch(4, steps)).values()).backward()
            steps += 1
    except RuntimeError as error:
        results.put((rank, steps, str(error), time.time()))
        results.close()
        results.join_thread()
    # Without the destructors of a process group that has lost a rank.
    os._exit(0)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(55)
@pytest.mark.parametrize("attempt", range(10))
def test_survivors_of_a_killed_rank_fail_soon(attempt: int, tmp_path: Path) -> None:
    context = _context()
    results = context.Queue()
    delay = 0.5 + random.Random(attempt).random()
    ranks = [
        context.Process(target=train_until_killed, args=(rank, str(tmp_path / "store"), delay, results), daemon=True)
        for rank in range(RANKS)
    ]
    for process in ranks:
        process.start()
    ranks[-1].join(timeout=40)
    died = time.time()
    assert ranks[-1].exitcode == -signal.SIGKILL
    found = [results.get(timeout=BOUND_S + 5) for _ in range(RANKS - 1)]
    assert sorted(rank for rank, *_ in found) == list(range(RANKS - 1))
    for _, _, message, failed in found:
        assert failed - died < BOUND_S
        assert "peer" in message or "timed out" in message.lower() or "timeout" in message.lower(), message
    # All were in the same step, or next to each other.
    steps = [count for _, count, *_ in found]
    assert max(steps) - min(steps) <= 1
    for process in ranks:
        process.join(timeout=5)
