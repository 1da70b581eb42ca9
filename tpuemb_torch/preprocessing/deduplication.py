"""Deduplication data: how the activations of a batch are made of distinct rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tpuemb_torch.preprocessing.keyed import Key, PreparedInput


@dataclass(frozen=True, eq=False)
class DeduplicationData:
    """What XlaRecvTPUEmbeddingDeduplicationData returns: one entry per embedding core of this process.

    The distinct rows of a core's tables, taken in the order of `rows`, indexed by the core's indices, times its
    weights and summed per bag, are the activations.  It belongs to one batch, and recv and send refuse another's.

    Attributes:
        batch: number of the batch it belongs to.
        cores: per core, a tuple of rank-1 tensors: uint32 indices and float32 weights (gains), one per looked-up id.
        rows: per core, the distinct rows: int64 `[distinct, 2]` of table number in the config, and id.
    """

    batch: int
    cores: tuple[tuple[Tensor, Tensor], ...]
    rows: tuple[Tensor, ...]


def deduplicate(
    batch: int, prepared: PreparedInput, keys: list[Key], table_numbers: dict[str, int]
) -> DeduplicationData:
    """Deduplicates a batch by table and id; one process drives one core."""
    kjt = prepared.kjt
    ids = kjt.values()
    table_of_key = torch.tensor([table_numbers[key.table] for key in keys], device=ids.device)
    per_key = kjt.lengths().view(len(keys), -1).sum(1)
    table = torch.repeat_interleave(table_of_key, per_key, output_size=ids.numel())
    rows, indices = torch.unique(torch.stack([table, ids], dim=1), dim=0, return_inverse=True)
    gains = kjt.weights_or_none()
    weights = torch.ones(ids.numel(), device=ids.device) if gains is None else gains
    return DeduplicationData(batch, ((indices.to(torch.uint32), weights),), (rows,))
