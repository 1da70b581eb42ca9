"""Runs a function on several ranks: gloo on the loopback, a time-out, and each rank's traceback."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from queue import Empty
from time import monotonic
from typing import Any

import pytest

_TIMEOUT_S = 50


def _context() -> multiprocessing.context.ForkServerContext:
    # The fork server imports torch once; each rank is a fork of it and starts in milliseconds.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    return context


def _rank_main(
    function: Callable[..., Any], rank: int, world: int, store: str, args: tuple[Any, ...], results: Any
) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world),
        GLOO_SOCKET_IFNAME="lo",
        OMP_NUM_THREADS="1",
    )
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=_TIMEOUT_S)
        )
        results.put((rank, None, function(rank, world, *args)))
    except BaseException:  # a rank reports whatever stops it
        results.put((rank, traceback.format_exc(), None))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def run_ranks(world: int, function: Callable[..., Any], *args: Any, timeout: float = _TIMEOUT_S) -> list[Any]:
    """Calls `function(rank, world, *args)` on every rank and returns the results by rank.

    Fails the test, with the tracebacks of all ranks that raised, if any raises or does not finish in time.
    The function must be importable, and results picklable (tensors: as NumPy arrays).
    """
    context = _context()
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        processes = [
            context.Process(target=_rank_main, args=(function, rank, world, store, args, results), daemon=True)
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        values: dict[int, Any] = {}
        errors: dict[int, str] = {}
        deadline = monotonic() + timeout
        while len(values) + len(errors) < world and monotonic() < deadline:
            # After a failure, the other ranks may wait for the failed one: give them a moment to report as well.
            if errors:
                deadline = min(deadline, monotonic() + 3)
            try:
                rank, error, value = results.get(timeout=max(0.1, min(1.0, deadline - monotonic())))
            except Empty:
                continue
            if error is None:
                values[rank] = value
            else:
                errors[rank] = error
        for process in processes:
            process.join(timeout=0 if len(values) < world else 5)
            if process.is_alive():
                process.kill()
    for rank in sorted(set(range(world)) - set(values) - set(errors)):
        errors[rank] = "did not finish in time"
    if errors:
        pytest.fail("\n".join(f"--- rank {rank} of {world}:\n{text}" for rank, text in sorted(errors.items())))
    return [values[rank] for rank in range(world)]
