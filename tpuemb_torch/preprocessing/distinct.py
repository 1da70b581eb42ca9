"""The distinct rows of a lookup: one stable sort, shared by everything in a step that needs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class SortedIds:
    """The ids of a lookup in row order.

    Attributes:
        rows: int64 `[distinct]`, ascending.
        starts: int64 `[distinct + 1]`, where each row's ids begin in the sorted order.
        order: int64 `[n]`, the position in the lookup of each sorted id; equal ids keep their order.
    """

    rows: Tensor
    starts: Tensor
    order: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> SortedIds:
        """The same with every tensor changed (moved, pinned, ...)."""
        return SortedIds(change(self.rows), change(self.starts), change(self.order))

    def inverse(self) -> Tensor:
        """int64 `[n]`: for each id of the lookup, the place of its row in `rows`."""
        place = torch.arange(self.rows.numel(), device=self.rows.device)
        place = torch.repeat_interleave(place, self.starts.diff(), output_size=self.order.numel())
        return torch.empty_like(place).index_copy_(0, self.order, place)

    def split(self, first_rows: Sequence[int]) -> list[SortedIds]:
        """The part of each run of rows.

        Args:
            first_rows: where each run begins, ascending; the last one has no end.  The ids of a run must be
                neighbours in the lookup, and runs must follow each other there as their rows do.

        Returns:
            One `SortedIds` per run, its rows counted from the run's first, its order from the run's first id.
        """
        if len(first_rows) == 1 and first_rows[0] == 0:
            return [self]
        bounds = torch.searchsorted(self.rows, torch.tensor(first_rows, device=self.rows.device)).tolist()
        bounds.append(self.rows.numel())
        begins = self.starts[torch.tensor(bounds, device=self.starts.device)].tolist()
        return [
            SortedIds(self.rows[a:b] - first_row, self.starts[a : b + 1] - begin, self.order[begin:end] - begin)
            for first_row, a, b, begin, end in zip(
                first_rows, bounds[:-1], bounds[1:], begins[:-1], begins[1:], strict=True
            )
        ]


def sort_ids(ids: Tensor, limit: int) -> SortedIds:
    """Sorts ids (int64 `[n]`, each below `limit`) and finds the distinct ones."""
    # 32-bit keys sort about a fifth faster.
    keys = ids.int() if limit <= torch.iinfo(torch.int32).max else ids
    keys, order = torch.sort(keys, stable=True)
    first = torch.ones_like(keys, dtype=torch.bool)
    torch.ne(keys[1:], keys[:-1], out=first[1:])
    begin = first.nonzero().squeeze(1)
    starts = torch.cat([begin, begin.new_tensor([ids.numel()])])
    return SortedIds(keys[begin].long(), starts, order)
