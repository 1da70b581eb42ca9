"""Ids against the table they look up: every id is checked where feature and table names are still known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from tpuemb_torch.preprocessing.inputs import InputError

ID_POLICIES = ("error", "drop", "clamp")


class KeyNames(Protocol):
    """What a key looks up, for messages."""

    @property
    def feature(self) -> str: ...

    @property
    def table(self) -> str: ...


def check_ids(
    ids: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    ids_per_key: Tensor,
    limits: Tensor,
    keys: Sequence[KeyNames],
    policy: str,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Applies the id policy.

    Args:
        ids: int64 `[n]`, key-major.
        offsets: int64 `[bags + 1]`, where each bag's ids begin.
        weights: float32 `[n]` or None.
        ids_per_key: int64 `[keys]`.
        limits: int64 `[keys]`, vocabulary size of each key's table.
        keys: names of each key's feature and table.
        policy: "error" raises; "drop" removes the id, as if it had not been in the bag; "clamp" takes the nearest
            legal id.

    Returns:
        ids, offsets and weights with every id in range.

    Raises:
        InputError: under "error"; names feature, table, position, id and limit.
    """
    if ids.numel():
        low, high = torch.aminmax(ids)
        if int(low) >= 0 and int(high) < int(limits.min()):
            return ids, offsets, weights  # within the smallest table: no look at each id's own
    limit = torch.repeat_interleave(limits, ids_per_key, output_size=ids.numel())
    bad = (ids < 0) | (ids >= limit)
    if not bool(bad.any()):
        return ids, offsets, weights
    if policy == "clamp":
        return torch.minimum(ids.clamp(min=0), limit - 1), offsets, weights
    if policy == "drop":
        keep = ~bad
        kept_before = torch.cat([offsets.new_zeros(1), keep.cumsum(0)])
        return ids[keep], kept_before[offsets], None if weights is None else weights[keep]
    position = int(bad.nonzero()[0])
    key, within = locate(position, ids_per_key)
    raise InputError(
        f"feature {keys[key].feature!r}: id {int(ids[position])} at position {within} is outside table "
        f"{keys[key].table!r}, whose ids are 0 to {int(limits[key]) - 1} ({int(bad.sum())} such ids in the batch). "
        f'Fix the input, or choose id_policy="drop" or "clamp".'
    )


def locate(position: int, ids_per_key: Tensor) -> tuple[int, int]:
    """Which key an id is of, and its place among the ids of that key."""
    ends = ids_per_key.cumsum(0)
    key = int(torch.searchsorted(ends, position, right=True))
    return key, position - int(ends[key] - ids_per_key[key])
