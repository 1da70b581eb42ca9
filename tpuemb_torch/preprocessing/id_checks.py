"""Ids against the table they look up: every id is checked where feature and table names are still known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tpuemb_torch.preprocessing.inputs import InputError

ID_POLICIES = ("error", "drop", "clamp")


@dataclass(frozen=True)
class KeyInfo:
    """What a key looks up, for messages."""

    feature: str
    table: str


def check_ids(
    ids: Tensor,
    lengths: Tensor,
    weights: Tensor | None,
    limits: Tensor,
    infos: Sequence[KeyInfo],
    policy: str,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Applies the id policy.

    Args:
        ids: int64 `[n]`, key-major.
        lengths: int64 `[keys * stride]`.
        weights: float32 `[n]` or None.
        limits: int64 `[keys]`, vocabulary size of each key's table.
        infos: names of each key's feature and table.
        policy: "error" raises; "drop" removes the id, as if it had not been in the bag; "clamp" takes the nearest
            legal id.

    Returns:
        ids, lengths and weights with every id in range.

    Raises:
        InputError: under "error"; names feature, table, position, id and limit.
    """
    stride = lengths.numel() // len(infos)
    key_ids = lengths.view(len(infos), stride).sum(1)
    limit = torch.repeat_interleave(limits, key_ids, output_size=ids.numel())
    bad = (ids < 0) | (ids >= limit)
    if not bool(bad.any()):
        return ids, lengths, weights
    if policy == "clamp":
        return torch.minimum(ids.clamp(min=0), limit - 1), lengths, weights
    if policy == "drop":
        keep = ~bad
        bag = torch.repeat_interleave(torch.arange(lengths.numel(), device=ids.device), lengths)
        kept = torch.bincount(bag[keep], minlength=lengths.numel())
        return ids[keep], kept, None if weights is None else weights[keep]
    position = int(bad.nonzero()[0])
    ends = key_ids.cumsum(0)
    key = int(torch.searchsorted(ends, position, right=True))
    within = position - int(ends[key] - key_ids[key])
    info = infos[key]
    raise InputError(
        f"feature {info.feature!r}: id {int(ids[position])} at position {within} is outside table {info.table!r}, "
        f"whose ids are 0 to {int(limits[key]) - 1} ({int(bad.sum())} such ids in the batch). "
        f'Fix the input, or choose id_policy="drop" or "clamp".'
    )
