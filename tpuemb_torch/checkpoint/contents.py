"""What a checkpoint is made of."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tpuemb_torch.checkpoint.errors import CheckpointError
from tpuemb_torch.checkpoint.tables import (
    Chunk,
    Collection,
    chunks_to_write,
    collections,
    gathered_blocks,
    plan_of,
    unwrapped,
)
from tpuemb_torch.sharding.exchange import raise_together


@dataclass(frozen=True, eq=False)
class Contents:
    """What this rank writes.

    Attributes:
        chunks: its share of the tables.
        dense: everything but the tables, by name; the same on all ranks.
        extra: the user's own, serialized; rank 0's is written.
        description: what goes into `checkpoint.json`, digests aside.
    """

    chunks: list[Chunk]
    dense: dict[str, Tensor]
    extra: bytes
    description: dict[str, Any]

    @staticmethod
    def of(
        model: nn.Module,
        found: Mapping[str, Collection],
        step: int,
        extra: Any,
        group: dist.ProcessGroup | None,
        *,
        copy: bool,
        scratch: Path,
    ) -> Contents:
        """Gathers a model's (collective).

        Args:
            model: the model.
            found: its collections.
            step: number of training steps so far.
            extra: the user's own.
            group: the ranks that save together.
            copy: whether the contents must not change when the model does.
            scratch: a folder; see `chunks_to_write`.
        """
        error: Exception | None = None
        extra_bytes = b""
        try:
            if rank_in(group) == 0:
                extra_bytes = _serialized(extra)
        except CheckpointError as problem:
            error = problem
        raise_together(error, group, CheckpointError)
        chunks: list[Chunk] = []
        plan = {}
        for prefix, collection in found.items():
            blocks = gathered_blocks(collection)
            plan[prefix] = plan_of(blocks)
            chunks += chunks_to_write(
                prefix,
                collection,
                blocks,
                copy=copy,
                writes_copies=rank_in(group) == 0,
                scratch=None if copy else scratch,
            )
        dense = dense_state(model)
        _check_same_on_all(dense, group)
        if copy:
            dense = {name: value.detach().to("cpu", copy=True) for name, value in dense.items()}
        rates = {prefix: collection.steps.rates for prefix, collection in found.items()}
        description = {
            "step": step,
            "configs": {p: base64.b64encode(c.config.serialize()).decode() for p, c in found.items()},
            "learning_rates": {p: None if values is None else values.tolist() for p, values in rates.items()},
            "world_size": 1 if group is None else dist.get_world_size(group),
            "plan": plan,
        }
        return Contents(chunks, dense, extra_bytes, description)


def group_of(found: Mapping[str, Collection]) -> dist.ProcessGroup | None:
    """The ranks that save together: those of a sharded collection, or all of the job."""
    for collection in found.values():
        if collection.process_group is not None:
            return collection.process_group
    return dist.group.WORLD if dist.is_initialized() else None


def rank_in(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else dist.get_rank(group)


def dense_state(model: nn.Module) -> dict[str, Tensor]:
    """Live tensors of everything but the embedding collections, by unwrapped name."""
    prefixes = tuple(collections(model))
    named = {unwrapped(name): t for name, t in [*model.named_parameters(), *_persistent_buffers(model)]}
    return {f"dense/{name}": tensor for name, tensor in named.items() if not name.startswith(prefixes)}


def _check_same_on_all(dense: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Refuses tensors of which each rank has a part, unless they say so (DTensor): one part would be saved for all."""
    if group is None:
        return
    own = {name: tuple(value.shape) for name, value in dense.items() if not isinstance(value, DTensor)}
    shapes: list[dict[str, tuple[int, ...]]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(shapes, own, group=group)
    for name in sorted(set().union(*shapes)):
        found = [shape.get(name) for shape in shapes]
        if len(set(found)) > 1:
            raise CheckpointError(
                f"{name.removeprefix('dense/')} has shapes {found} on the ranks: it is sharded by other means than "
                "DTensor; save its module by itself"
            )


def _persistent_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [
        (f"{prefix}.{name}" if prefix else name, buffer)
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    ]


def _serialized(extra: Any) -> bytes:
    """What `extra.pt` will hold, read once to see that `load` can."""
    buffer = io.BytesIO()
    try:
        torch.save(extra, buffer)
        buffer.seek(0)
        torch.load(buffer, map_location="cpu", weights_only=True)
    except Exception as problem:  # pickling may raise anything
        raise CheckpointError(
            "extra holds what cannot be read back safely; give tensors, numbers, strings, dicts and lists "
            f"(NumPy values as float() or tensors): {problem}"
        ) from problem
    return buffer.getvalue()
