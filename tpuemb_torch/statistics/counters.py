"""Counts the lookups of a layer, all tables together, with tensor operations alone.

A batch costs one sort of its ids, which a step on unsharded tables then need not do.  Every number is a sum or a
maximum of integers: results are exact, and the same in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from tpuemb_torch.config import Table
from tpuemb_torch.preprocessing import PreparedInput, SortedIds, sort_ids
from tpuemb_torch.statistics.values import TableStats

Sort = Callable[[Tensor, int], SortedIds]
HotIds = tuple[tuple[int, int], ...]


class LookupCounters:
    """Counters of some tables; they hold 8 bytes per row, on the device of the ids, from the first batch on.

    Args:
        tables: in the order of the collection's keys.
        keys_per_table: number of keys of each table in a batch by key.
        features_per_table: the same in a batch by feature.
        num_shards: into how many shards the rows of each table are cut.
        strategy: how: "div" or "mod".
    """

    def __init__(
        self,
        tables: Sequence[Table],
        keys_per_table: Sequence[int],
        features_per_table: Sequence[int],
        num_shards: int,
        strategy: str,
    ) -> None:
        self.tables = list(tables)
        self.num_shards = num_shards
        self._first_rows = [0, *accumulate(table.vocabulary_size for table in tables)]
        self._row_starts = torch.tensor(self._first_rows)
        # The first key of each table, and the number of keys: in a batch by key, and in one by feature.
        self._first_keys = [torch.tensor([0, *accumulate(c)]) for c in (keys_per_table, features_per_table)]
        # Under DIV a shard is a run of rows: where each begins, all tables back to back, and the end.
        self._shard_starts = _div_starts(self._row_starts, num_shards) if strategy == "div" else None
        self.reset()

    def reset(self) -> None:
        """Counts from zero, and frees the memory."""
        self.batches = 0
        self._count: Tensor | None = None  # int64 [rows of all tables], how often each was looked up
        count = len(self.tables)
        self._sums = torch.zeros(4, count, dtype=torch.int64)  # ids, distinct ids, bags, empty bags
        self._maxima = torch.zeros(3, count, dtype=torch.int64)  # distinct ids, ids per shard, distinct ids per shard

    def add(self, prepared: PreparedInput, sort: Sort = sort_ids) -> PreparedInput:
        """Counts a batch, whose ids are sorted by `sort` if they are not yet.

        Returns:
            The batch with its ids sorted, as a step needs them, too.
        """
        # Counters made under inference_mode could not be changed outside it.
        with torch.inference_mode(False), torch.no_grad():
            return self._add(prepared, sort)

    def _add(self, prepared: PreparedInput, sort: Sort) -> PreparedInput:
        count = self._on(prepared.ids.device)
        first_bags = torch.tensor([0, *accumulate(prepared.bags)])[self._first_keys[prepared.by_feature]]
        bounds = first_bags.to(count.device)
        empty_before = torch.nn.functional.pad((prepared.offsets.diff() == 0).cumsum(0), (1, 0))
        ordered = prepared.ordered
        if ordered is None:
            ids_of_table = prepared.offsets[bounds].diff()
            first_row = torch.repeat_interleave(self._row_starts[:-1], ids_of_table, output_size=prepared.ids.numel())
            ordered = sort(prepared.ids + first_row, count.numel())
        occurrences = ordered.starts.diff()
        per_shard = self._per_shard(ordered, occurrences)
        ids, distinct_ids = per_shard.sum(2)
        count.scatter_add_(0, ordered.rows, occurrences)
        self._sums += torch.stack([ids, distinct_ids, bounds.diff(), empty_before[bounds].diff()])
        self._maxima = torch.maximum(self._maxima, torch.cat([distinct_ids[None], per_shard.amax(2)]))
        self.batches += 1
        return replace(prepared, ordered=ordered)

    def _per_shard(self, ordered: SortedIds, occurrences: Tensor) -> Tensor:
        """int64 `[2, tables, shards]`: ids and distinct ids of a batch."""
        shape = (2, len(self.tables), self.num_shards)
        if self._shard_starts is not None:
            first = torch.searchsorted(ordered.rows, self._shard_starts)
            return torch.stack([ordered.starts[first].diff(), first.diff()]).view(shape)
        distinct_of_table = torch.searchsorted(ordered.rows, self._row_starts).diff()
        tables = torch.arange(len(self.tables), device=ordered.rows.device)
        table = torch.repeat_interleave(tables, distinct_of_table, output_size=ordered.rows.numel())
        shard = table * self.num_shards + (ordered.rows - self._row_starts[table]) % self.num_shards
        result = torch.zeros(2, shape[1] * shape[2], dtype=torch.int64, device=shard.device)
        result[0].scatter_add_(0, shard, occurrences)
        result[1].scatter_add_(0, shard, torch.ones_like(shard))
        return result.view(shape)

    def _on(self, device: torch.device) -> Tensor:
        """The counters of rows, with everything on a device."""
        if self._count is None:
            self._count = torch.zeros(self._first_rows[-1], dtype=torch.int64, device=device)
        self._count = self._count.to(device)
        self._sums, self._maxima = self._sums.to(device), self._maxima.to(device)
        self._row_starts = self._row_starts.to(device)
        self._shard_starts = None if self._shard_starts is None else self._shard_starts.to(device)
        return self._count

    def lookups(self, index: int) -> Tensor | None:
        """int64 `[rows]`, how often each row of a table was looked up; None: not once."""
        if self._count is None:
            return None
        return self._count[self._first_rows[index] : self._first_rows[index + 1]]

    def table_stats(self, top_k: int) -> list[TableStats]:
        """The statistics of each table."""
        sums, maxima = self._sums.t().tolist(), self._maxima.t().tolist()
        found = []
        for index, table in enumerate(self.tables):
            lookups = self.lookups(index)
            touched_rows, hot_ids = (0, ()) if lookups is None else hottest(lookups, top_k)
            ids, distinct_ids, bags, empty_bags = sums[index]
            max_distinct_ids, max_ids_per_shard, max_distinct_ids_per_shard = maxima[index]
            found.append(
                TableStats(
                    name=table.name,
                    vocabulary_size=table.vocabulary_size,
                    batches=self.batches,
                    ids=ids,
                    distinct_ids=distinct_ids,
                    max_distinct_ids=max_distinct_ids,
                    touched_rows=touched_rows,
                    bags=bags,
                    empty_bags=empty_bags,
                    max_ids_per_shard=max_ids_per_shard,
                    max_distinct_ids_per_shard=max_distinct_ids_per_shard,
                    hot_ids=hot_ids,
                )
            )
        return found


def _div_starts(row_starts: Tensor, num_shards: int) -> Tensor:
    """int64 `[tables * shards + 1]`: the first row of each shard under DIV, and the number of rows.

    Shard s of V rows begins at row s * floor(V/n) + min(s, V mod n).  Source: `partition_strategy` of TensorFlow's
    tf.nn.embedding_lookup.
    """
    rows, shard = row_starts.diff()[:, None], torch.arange(num_shards)
    first = row_starts[:-1, None] + shard * (rows // num_shards) + torch.minimum(shard, rows % num_shards)
    return torch.cat([first.reshape(-1), row_starts[-1:]])


def hottest(lookups: Tensor, top_k: int) -> tuple[int, HotIds]:
    """Number of rows looked up, and the most frequent ones with their counts; of equals the smaller ids.

    Args:
        lookups: int64 `[rows]`.
        top_k: how many at most.
    """
    touched = int(torch.count_nonzero(lookups))
    kept = min(top_k, touched)
    if kept == 0:
        return touched, ()
    # topk alone does not say which of several equal counts it takes.
    least = lookups.topk(kept).values[-1]
    above = (lookups > least).nonzero().flatten()
    equal = (lookups == least).nonzero().flatten()[: kept - above.numel()]
    ids = torch.cat([above, equal])
    order = torch.argsort(lookups[ids], descending=True, stable=True)
    ids = ids[order]
    return touched, tuple(zip(ids.tolist(), lookups[ids].tolist(), strict=True))
