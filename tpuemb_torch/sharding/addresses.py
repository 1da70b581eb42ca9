"""One number for every row of the tables that exchange distinct rows, ordered by who holds it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
from torch import Tensor

from tpuemb_torch.kernels.constants import Constant
from tpuemb_torch.sharding.placement import padded_rows


class TableShard(NamedTuple):
    """Where a shard of a table lies.

    Attributes:
        table: its name.
        shard: number of the shard, in the order of the rows.
        rank: who holds it.
        group: which of that rank's kernel groups.
        dimension: columns.
        first_row: its first row in the group's buffer.
        rows: how many it has.
    """

    table: str
    shard: int
    rank: int
    group: int
    dimension: int
    first_row: int
    rows: int


class Block(NamedTuple):
    """The buffer of one kernel group of one rank."""

    dimension: int
    rank: int
    group: int
    rows: int


class RowAddresses:
    """Addresses of rows: blocks follow each other by dimension, then rank, then group.

    So the sorted ids of a batch have the rows of each dimension together, and in them those of each rank.

    Args:
        shards: all shards of all tables.
        feature_tables: table of each feature; those of equal dimensions must be neighbours, dimensions ascending.
    """

    def __init__(self, shards: Sequence[TableShard], feature_tables: Sequence[str]) -> None:
        sizes: dict[tuple[int, int, int], int] = {}
        for shard in shards:
            place = (shard.dimension, shard.rank, shard.group)
            sizes[place] = max(sizes.get(place, 0), shard.first_row + shard.rows)
        self.blocks = [Block(*place, rows) for place, rows in sorted(sizes.items())]
        self.starts = [0, *accumulate(block.rows for block in self.blocks)]
        self.dimensions = sorted({block.dimension for block in self.blocks})
        #: First address of each dimension.
        self.first_of_dimension = [
            self.starts[next(i for i, block in enumerate(self.blocks) if block.dimension == dimension)]
            for dimension in self.dimensions
        ]
        start_of = dict(zip(sorted(sizes), self.starts, strict=False))
        of_table = {
            table: list(run)
            for table, run in groupby(sorted(shards, key=lambda s: (s.table, s.shard)), key=lambda s: s.table)
        }
        dimension_of = {table: run[0].dimension for table, run in of_table.items()}
        dimensions = [dimension_of[table] for table in feature_tables]
        if dimensions != sorted(dimensions):
            raise ValueError(f"features must come by ascending dimension, got {dimensions}")
        #: Number of features of each dimension.
        self.features = [dimensions.count(dimension) for dimension in self.dimensions]
        # A placed id is `shard * length + row`; see `RowPlacement`.
        length = {table: padded_rows(sum(s.rows for s in run), len(run)) // len(run) for table, run in of_table.items()}
        first_shift: dict[str, int] = {}
        shifts: list[int] = []
        for table, run in of_table.items():
            first_shift[table] = len(shifts)
            shifts += [
                start_of[s.dimension, s.rank, s.group] + s.first_row - number * length[table]
                for number, s in enumerate(run)
            ]
        self._whole = all(len(run) == 1 for run in of_table.values())
        self._length = Constant([length[table] for table in feature_tables], torch.int64)
        self._first_shift = Constant([first_shift[table] for table in feature_tables], torch.int64)
        self._shifts = Constant(shifts, torch.int64)

    @property
    def rows(self) -> int:
        """Number of addresses."""
        return self.starts[-1]

    def of(self, placed: Tensor, ids_per_feature: Tensor) -> Tensor:
        """Addresses, int64 `[n]`, of placed ids, integers `[n]`, feature after feature."""

        def spread(constant: Constant) -> Tensor:
            return torch.repeat_interleave(constant.on(placed.device), ids_per_feature, output_size=placed.numel())

        which = spread(self._first_shift)
        if not self._whole:
            which += torch.div(placed, spread(self._length), rounding_mode="floor")
        return placed + self._shifts.on(placed.device)[which]
