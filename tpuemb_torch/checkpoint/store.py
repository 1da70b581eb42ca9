"""Save and load with torch.distributed.checkpoint; see `folder` for what lies where."""

from __future__ import annotations

import operator
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from tpuemb_torch.checkpoint.contents import Contents, group_of
from tpuemb_torch.checkpoint.errors import CheckpointError
from tpuemb_torch.checkpoint.folder import CheckpointFolder
from tpuemb_torch.checkpoint.groups import background_group
from tpuemb_torch.checkpoint.reading import Reading
from tpuemb_torch.checkpoint.tables import Collection, collections
from tpuemb_torch.checkpoint.writing import begin, write

__all__ = ["CheckpointError", "async_save", "load", "save", "steps"]

#: Saves that may not be complete, by folder.
_pending: dict[Path, Future[None]] = {}


def save(path: str | os.PathLike[str], model: nn.Module, step: int = 0, extra: Any = None, *, keep: int = 1) -> None:
    """Writes a checkpoint (collective).

    The checkpoint becomes visible whole or not at all: what is stopped at any time leaves the earlier ones as they
    are.  Besides the tables, a process holds about `CHUNK_BYTES` of them in memory.

    Args:
        path: folder; made if missing.  One job at a time may save to it.
        model: a `TPUEmbedding`, or a model that contains one (or a `TPUEmbeddingBagCollection`), also wrapped in
            DistributedDataParallel or DistributedModelParallel.
        step: number of training steps so far; kept with the checkpoint.  An earlier checkpoint of this step goes.
        extra: what else to keep (optimizer state, epoch, ...): tensors, numbers, strings, dicts and lists.  Rank 0's
            is written.
        keep: how many checkpoints stay in the folder, this one included.

    Raises:
        CheckpointError: if the model has no embedding, or the folder cannot be written.
        ValueError: for a negative step, or `keep` below 1.
    """
    folder, name, contents, group = _begun(path, model, step, extra, keep, copy=False)
    write(folder, name, contents, keep, group)


def async_save(
    path: str | os.PathLike[str], model: nn.Module, step: int = 0, extra: Any = None, *, keep: int = 1
) -> Future[None]:
    """Copies what a checkpoint needs to host memory and writes it while training goes on (collective).

    The copy is as large as this rank's part of the tables.  The next `save`, `async_save` or `load` of the folder
    waits until this one is complete.  Wait before `torch.distributed.destroy_process_group()`.

    Args:
        path: as for `save`.
        model: as for `save`.
        step: as for `save`.
        extra: as for `save`.
        keep: as for `save`.

    Returns:
        A future: `result()` waits, and raises CheckpointError if the checkpoint could not be written.

    Raises:
        CheckpointError, ValueError: as `save`, for what is found before the copy is made.
    """
    folder, name, contents, group = _begun(path, model, step, extra, keep, copy=True)
    # Training goes on in the model's group meanwhile.
    own_group = background_group(group)
    executor = ThreadPoolExecutor(1, thread_name_prefix="tpuemb-checkpoint")
    _pending[folder.path] = future = executor.submit(write, folder, name, contents, keep, own_group)
    executor.shutdown(wait=False)
    return future


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    step: int | None = None,
    tables: Sequence[str] | None = None,
    rules: str | os.PathLike[str] | None = None,
) -> Any:
    """Reads a checkpoint into a model (collective), whatever sharding and number of ranks it was saved under.

    Every file is compared with its digest before anything changes.  Besides the tables, a rank holds one chunk of a
    table in memory, and a copy of the rest of the model.  A config in INFERENCE mode takes the weights of tables
    whose optimizer is another one.

    Args:
        path: the folder given to `save`.
        model: a model of the same tables, optimizers and dense parameters.
        step: which checkpoint; None is the last save.
        tables: names of the tables to load; all other tables, the learning rates and the rest of the model keep their
            values.  None is everything.
        rules: a rule file for tables whose number of rows has changed; see `vocabulary`.

    Returns:
        What was given to `save` as `extra`, tensors on CPU.

    Raises:
        CheckpointError: if there is no checkpoint, or it is damaged or of another model; the model is unchanged then,
            unless the message says otherwise.
    """
    found, folder = _collections(model), CheckpointFolder(path)
    _wait(folder)
    return Reading(folder, found, group_of(found)).into(model, step, tables, rules)


def steps(path: str | os.PathLike[str]) -> list[int]:
    """Steps of the checkpoints in a folder, the last save first.

    Raises:
        CheckpointError: if there is none.
    """
    return CheckpointFolder(path).steps()


def _begun(
    path: str | os.PathLike[str], model: nn.Module, step: int, extra: Any, keep: int, *, copy: bool
) -> tuple[CheckpointFolder, str, Contents, dist.ProcessGroup | None]:
    """The place of a checkpoint and what goes into it (collective)."""
    found, folder = _collections(model), CheckpointFolder(path)
    _wait(folder)
    group = group_of(found)
    step = operator.index(step)
    name = begin(folder, step, keep, group)
    try:
        contents = Contents.of(model, found, step, extra, group, copy=copy, scratch=folder.partial(name))
    except BaseException:
        folder.remove_partials()
        raise
    return folder, name, contents, group


def _collections(model: nn.Module) -> dict[str, Collection]:
    found = collections(model)
    if not found:
        raise CheckpointError(f"{type(model).__name__} contains no TPUEmbedding")
    return found


def _wait(folder: CheckpointFolder) -> None:
    """Waits for an `async_save` to the folder; raises what it raised."""
    future = _pending.pop(folder.path, None)
    if future is not None:
        try:
            future.result()
        except CheckpointError as problem:
            raise CheckpointError(f"an earlier async_save failed: {problem}") from problem
