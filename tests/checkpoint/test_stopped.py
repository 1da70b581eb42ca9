"""A save that is killed, at any moment, leaves the checkpoint before it, and nothing that stays."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.cases import layer
from tests.ranks import _context
from tpuemb_torch import TPUEmbedding
from tpuemb_torch.checkpoint import load, save, steps


def fill(embedding: TPUEmbedding, value: float) -> None:
    for stored in embedding.collection.stored():
        for tensor in stored.tensors.values():
            tensor.fill_(value)


def loaded(path: Path, rows: int) -> int:
    """Loads the last checkpoint: every number of it must be that of the save."""
    embedding = layer(rows)
    extra = load(path, embedding)
    for slots in embedding.retrieve_parameters().values():
        for value in slots.values():
            assert value.min() == value.max() == extra
    assert isinstance(extra, int)
    return extra


def killed_at(path: str, call: int) -> None:
    """Saves; the process ends at the n-th call that changes something on disk."""
    calls = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return run

    for module, name in ((os, "fsync"), (os, "rename"), (os, "replace"), (os, "mkdir"), (shutil, "rmtree")):
        setattr(module, name, counted(getattr(module, name)))
    embedding = layer()
    fill(embedding, 2.0)
    save(path, embedding, step=2, extra=2)


def test_killed_before_each_change_on_disk(tmp_path: Path) -> None:
    embedding = layer()
    fill(embedding, 1.0)
    seen = []
    for call in range(1, 40):
        path = tmp_path / str(call)
        save(path, embedding, step=1, extra=1)
        process = _context().Process(target=killed_at, args=(str(path), call))
        process.start()
        process.join()
        seen.append(loaded(path, rows=9))
        # The next save removes what the stopped one left.
        save(path, embedding, step=3, extra=1)
        assert len(list(path.iterdir())) == 2
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
    assert process.exitcode == 0
    assert seen == sorted(seen) and seen[0] == 1 and seen[-1] == 2 and seen.count(1) > 5


def save_for_ever(path: str, first: int, done: Connection) -> None:
    embedding = layer(rows=20_000)
    for step in range(first, first + 10_000):
        fill(embedding, float(step))
        save(path, embedding, step=step, extra=step, keep=1 + step % 3)
        done.send(step)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_killed_twenty_times_at_random_moments(tmp_path: Path) -> None:
    rng = random.Random(0)
    last = 0
    for _ in range(20):
        receiver, sender = _context().Pipe(duplex=False)
        process = _context().Process(target=save_for_ever, args=(str(tmp_path), last + 1, sender))
        process.start()
        assert receiver.poll(60)
        time.sleep(rng.uniform(0, 0.4))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        while receiver.poll():
            try:
                last = receiver.recv()
            except EOFError:
                break
        found = loaded(tmp_path, rows=20_000)
        # A save that returned is there; one more may have been.
        assert found in (last, last + 1)
        assert steps(tmp_path)[0] == found
        last = found
