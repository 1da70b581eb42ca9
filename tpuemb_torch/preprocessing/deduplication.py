"""Deduplication data: how the activations of a batch are made of distinct rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class DeduplicationData:
    """What XlaRecvTPUEmbeddingDeduplicationData returns: one entry per embedding core of this process.

    The distinct rows of a core's tables, taken in the order of `rows`, indexed by the core's indices, times its
    weights and summed per bag, are the activations.  It belongs to one batch, and recv and send refuse another's.
    Ids and bags come feature after feature, in the config's order, samples row-major.

    Attributes:
        batch: number of the batch it belongs to.
        cores: per core, a tuple of rank-1 tensors: uint32 indices and float32 weights (gains), one per looked-up id.
        rows: per core, the distinct rows: int64 `[distinct, 2]` of table number in the config, and id.
        lengths: per core, the number of ids of each bag, int64 `[bags]`.
    """

    batch: int
    cores: tuple[tuple[Tensor, Tensor], ...]
    rows: tuple[Tensor, ...]
    lengths: tuple[Tensor, ...] = ()

    def to(self, device: str | torch.device, non_blocking: bool = False) -> DeduplicationData:
        """The same data on a device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> DeduplicationData:
        """The same data in page-locked memory, from where it can be copied to a GPU without waiting."""
        return self._map(Tensor.pin_memory)

    def __reduce__(self) -> tuple[Any, ...]:
        # torch does not unpickle uint32 tensors; the same bits as int32 it does.
        cores = tuple((indices.view(torch.int32), weights) for indices, weights in self.cores)
        return _unpickled, (self.batch, cores, self.rows, self.lengths)

    def _map(self, change: Callable[[Tensor], Tensor]) -> DeduplicationData:
        cores = tuple((change(indices), change(weights)) for indices, weights in self.cores)
        return DeduplicationData(self.batch, cores, tuple(map(change, self.rows)), tuple(map(change, self.lengths)))


def _unpickled(
    batch: int, cores: tuple[tuple[Tensor, Tensor], ...], rows: tuple[Tensor, ...], lengths: tuple[Tensor, ...]
) -> DeduplicationData:
    cores = tuple((bits.view(torch.uint32), weights) for bits, weights in cores)
    return DeduplicationData(batch, cores, rows, lengths)
