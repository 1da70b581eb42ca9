"""Save and load with torch.distributed.checkpoint; a checkpoint is written beside the last one and swapped in whole.

A checkpoint folder holds `latest`, the name of a data folder, and that folder: tables and dense state in
torch.distributed.checkpoint's format, `extra.pt`, and `checkpoint.json` with the configs and a digest of every file.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import re
import shutil
import uuid
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from tpuemb_torch.checkpoint.tables import Collection, TableBlocks, collections, unwrapped
from tpuemb_torch.config import Config, load_config
from tpuemb_torch.sharding.exchange import raise_together

_FORMAT = 1


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, or read into this model; the message says why."""


def save(path: str | os.PathLike[str], model: nn.Module, step: int = 0, extra: Any = None) -> None:
    """Writes a checkpoint (collective).

    Args:
        path: folder; made if missing.  An earlier checkpoint in it stays whole until the new one is.
        model: a `TPUEmbedding`, or a model that contains one (or a `TPUEmbeddingBagCollection`), also wrapped in
            DistributedDataParallel or DistributedModelParallel.
        step: number of training steps so far; kept with the checkpoint.
        extra: what else to keep (optimizer state, epoch, ...): tensors, numbers, strings, dicts and lists.  Rank 0's
            is written.

    Raises:
        CheckpointError: if the model has no embedding, or the folder cannot be written.
    """
    found = _collections(model)
    group = _group(found)
    folder = Path(path)
    name = _agreed(f"step-{step}-{uuid.uuid4().hex[:8]}", group)
    state: dict[str, Any] = _dense_state(model)
    for prefix, collection in found.items():
        blocks = TableBlocks.allocate(prefix, collection)
        blocks.read_from(collection)
        state.update(blocks.tensors)
    error: Exception | None = None
    extra_bytes = b""
    try:
        (folder / name).mkdir(parents=True, exist_ok=True)
        if _rank(group) == 0:
            extra_bytes = _serialized(extra)
    except OSError as problem:
        error = CheckpointError(f"cannot write checkpoint {folder}: {problem}")
    except CheckpointError as problem:
        error = problem
    raise_together(error, group, CheckpointError)
    dcp.save(state, checkpoint_id=folder / name, process_group=group, no_dist=group is None)
    if _rank(group) == 0:
        try:
            (folder / name / "extra.pt").write_bytes(extra_bytes)
            description = {
                "format": _FORMAT,
                "step": step,
                "configs": {p: base64.b64encode(c.config.serialize()).decode() for p, c in found.items()},
                "files": _digests(folder / name),
            }
            description["digest"] = _description_digest(description)
            (folder / name / "checkpoint.json").write_text(json.dumps(description, indent=1))
            _swap_in(folder, name)
        except OSError as problem:
            error = CheckpointError(f"cannot write checkpoint {folder}: {problem}")
    raise_together(error, group, CheckpointError)


def load(path: str | os.PathLike[str], model: nn.Module) -> Any:
    """Reads a checkpoint into a model (collective), whatever sharding and number of ranks it was saved under.

    Args:
        path: the folder given to `save`.
        model: a model of the same tables, optimizers and dense parameters.

    Returns:
        What was given to `save` as `extra`.

    Raises:
        CheckpointError: if there is no checkpoint, or it is of another model; the model is unchanged then.
    """
    found = _collections(model)
    group = _group(found)
    data = folder = Path(path)
    error: Exception | None = None
    try:
        data = folder / (folder / "latest").read_text().strip()
        description = json.loads((data / "checkpoint.json").read_text())
        if description.pop("digest", None) != _description_digest(description):
            raise CheckpointError(f"checkpoint {data} is damaged: checkpoint.json is not as it was written")
        _check_same(folder, description, found)
        if _rank(group) == 0:
            _check_files(data, description["files"])
    except OSError as problem:
        error = CheckpointError(f"no checkpoint in {folder}: {problem}")
    except CheckpointError as problem:
        error = problem
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        error = CheckpointError(f"checkpoint {data} is damaged: checkpoint.json cannot be understood ({problem})")
    raise_together(error, group, CheckpointError)
    dense = _dense_state(model)
    blocks = {prefix: TableBlocks.allocate(prefix, collection) for prefix, collection in found.items()}
    # Everything is read into copies first, so that a damaged file leaves the model as it is.
    state: dict[str, Any] = {name: torch.empty_like(value, device="cpu") for name, value in dense.items()}
    for block in blocks.values():
        state.update(block.tensors)
    error = None
    try:
        dcp.load(state, checkpoint_id=data, process_group=group, no_dist=group is None)
        extra = torch.load(data / "extra.pt", weights_only=True)
    except (Exception, CheckpointException) as problem:  # the latter is no Exception
        error = CheckpointError(f"checkpoint {data} cannot be read into this model: {problem}")
    raise_together(error, group, CheckpointError)
    with torch.no_grad():
        for name, value in dense.items():
            value.copy_(state[name])
    for prefix, collection in found.items():
        blocks[prefix].write_to(collection)
    return extra


def _collections(model: nn.Module) -> dict[str, Collection]:
    found = collections(model)
    if not found:
        raise CheckpointError(f"{type(model).__name__} contains no TPUEmbedding")
    return found


def _group(found: dict[str, Collection]) -> dist.ProcessGroup | None:
    """The ranks that save together: those of a sharded collection, or all of the job."""
    for collection in found.values():
        if collection.process_group is not None:
            return collection.process_group
    return dist.group.WORLD if dist.is_initialized() else None


def _dense_state(model: nn.Module) -> dict[str, Tensor]:
    """Live tensors of everything but the embedding collections, by unwrapped name."""
    prefixes = tuple(collections(model))
    named = [*model.named_parameters(), *_persistent_buffers(model)]
    state = {f"dense/{unwrapped(name)}": tensor for name, tensor in named}
    return {name: t for name, t in state.items() if not name.removeprefix("dense/").startswith(prefixes)}


def _persistent_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [
        (f"{prefix}.{name}" if prefix else name, buffer)
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    ]


def _check_same(folder: Path, description: dict[str, Any], found: dict[str, Collection]) -> None:
    if description.get("format") != _FORMAT:
        raise CheckpointError(
            f"checkpoint {folder} has format {description.get('format')}, this version reads {_FORMAT}"
        )
    saved = {p: load_config(base64.b64decode(text)) for p, text in description["configs"].items()}
    if set(saved) != set(found):
        raise CheckpointError(f"checkpoint {folder} has embeddings {sorted(saved)}, the model {sorted(found)}")
    for prefix, collection in found.items():
        _check_tables(folder, saved[prefix], collection.config)


def _check_tables(folder: Path, saved: Config, own: Config) -> None:
    def described(config: Config) -> dict[str, tuple[object, ...]]:
        return {t.name: (t.vocabulary_size, t.dimension, t.optimizer.algorithm) for t in config.tables}

    before, now = described(saved), described(own)
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            raise CheckpointError(
                f"checkpoint {folder}, table {name!r}: saved with (rows, dimension, optimizer) {before.get(name)}, "
                f"the model has {now.get(name)}"
            )


def _serialized(extra: Any) -> bytes:
    """What `extra.pt` will hold, read once to see that `load` can."""
    buffer = io.BytesIO()
    try:
        torch.save(extra, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as problem:  # pickling may raise anything
        raise CheckpointError(
            "extra holds what cannot be read back safely; give tensors, numbers, strings, dicts and lists "
            f"(NumPy values as float() or tensors): {problem}"
        ) from problem
    return buffer.getvalue()


def _digests(data: Path) -> dict[str, str]:
    """BLAKE2 digests of the files of a data folder, by name."""
    found = {}
    for file in sorted(data.iterdir()):
        if file.name != "checkpoint.json":
            with file.open("rb") as stream:
                found[file.name] = hashlib.file_digest(stream, hashlib.blake2b).hexdigest()
    return found


def _description_digest(description: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(description, sort_keys=True).encode()).hexdigest()


def _check_files(data: Path, digests: dict[str, str]) -> None:
    """Every file that was written is there, bit by bit."""
    found = _digests(data)
    for name, digest in digests.items():
        if name not in found:
            raise CheckpointError(f"checkpoint {data} is damaged: file {name} is missing")
        if found[name] != digest:
            raise CheckpointError(f"checkpoint {data} is damaged: file {name} is not as it was written")


def _swap_in(folder: Path, name: str) -> None:
    """Makes a complete data folder the checkpoint, and removes those of other saves, also of stopped ones."""
    pointer = folder / f"latest.{name}"
    pointer.write_text(name)
    os.replace(pointer, folder / "latest")
    for other in folder.glob("step-*"):
        if other.name != name and other.is_dir() and re.fullmatch(r"step-\d+-[0-9a-f]{8}", other.name):
            shutil.rmtree(other, ignore_errors=True)


def _agreed(value: str, group: dist.ProcessGroup | None) -> str:
    """Rank 0's value."""
    if group is None:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=dist.get_global_rank(group, 0), group=group)
    return values[0]


def _rank(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else dist.get_rank(group)
