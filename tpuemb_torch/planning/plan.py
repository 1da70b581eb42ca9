"""A plan, and what it asks of each rank, to the byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

from tpuemb_torch.config.shards import shard_rows

Sharding = Literal["row_wise", "table_wise", "column_wise", "table_row_wise"]
SHARDINGS: tuple[Sharding, ...] = ("row_wise", "table_wise", "column_wise", "table_row_wise")

#: What ranks send each other: float32 sums of bags, or each row that a rank's batch needs, once.
Exchange = Literal["pooled", "distinct"]
EXCHANGES: tuple[Exchange, ...] = ("pooled", "distinct")

FLOAT32_BYTES = 4
_ID_BYTES = 8
_GAIN_BYTES = 4


@dataclass(frozen=True)
class PlannedTable:
    """What a planner knows of a table.

    Attributes:
        name: its name.
        vocabulary_size: rows.
        dimension: columns.
        num_slots: slot variables of its optimizer; each is as large as the weights.
        bags: bags of one rank's batch, over all features of the table.
        pooling_factor: mean number of ids of a bag.
        sweeps_all_rows: whether its optimizer steps all rows, also those without a lookup.
        distinct_ids: mean number of distinct rows that one rank's batch looks up; None: it is not known.
    """

    name: str
    vocabulary_size: int
    dimension: int
    num_slots: int
    bags: int = 0
    pooling_factor: float = 1.0
    sweeps_all_rows: bool = False
    distinct_ids: float | None = None

    @property
    def distinct(self) -> float:
        """Distinct rows of one rank's batch: what is known, or as many as there can be."""
        most = min(self.bags * self.pooling_factor, float(self.vocabulary_size))
        return most if self.distinct_ids is None else min(self.distinct_ids, float(self.vocabulary_size))

    @property
    def weight_bytes(self) -> int:
        """Bytes of the whole table's weights; its slots take `num_slots` times as many."""
        return self.vocabulary_size * self.dimension * FLOAT32_BYTES


@dataclass(frozen=True)
class TablePlan:
    """How one table is cut, and the ranks of its shards in their order.

    Row-wise and table-row-wise shards are runs of rows (under MOD: every n-th), column-wise shards equal numbers of
    columns.  `ranks` are consecutive unless column-wise.  They exchange sums of bags ("pooled"), or each row that a
    rank's batch needs, once ("distinct").
    """

    table: PlannedTable
    sharding: Sharding
    ranks: Sequence[int]
    exchange: Exchange = "pooled"

    @property
    def by_rows(self) -> bool:
        """Whether shards have some of the rows, and all columns."""
        return self.sharding in ("row_wise", "table_row_wise")

    @property
    def columns(self) -> int:
        """Columns of each shard."""
        return self.table.dimension // (1 if self.by_rows else len(self.ranks))

    def rows(self, shard: int) -> int:
        """Rows of a shard, by its place in `ranks`."""
        if not self.by_rows:
            return self.table.vocabulary_size
        # MOD gives as many rows as DIV.
        return len(shard_rows(self.table.vocabulary_size, len(self.ranks), shard, "div"))

    def batch_bytes(self, world_size: int) -> int:
        """Estimated bytes of a step in the memory of each rank with a shard, beside the shard.

        The ids (int64) and gains (float32) that arrive, evenly spread over shards of rows; and float32 sums of bags
        and their gradients, for the bags of all ranks, whichever shard their ids are in.  Where distinct rows are
        exchanged: ids, rows and gradients of the distinct rows of each rank.
        """
        if self.exchange == "distinct":
            rows = world_size * self.table.distinct / (len(self.ranks) if self.by_rows else 1)
            return round(rows * (_ID_BYTES + 2 * self.columns * FLOAT32_BYTES))
        bags = world_size * self.table.bags
        ids = bags * self.table.pooling_factor / (len(self.ranks) if self.by_rows else 1)
        return round(ids * (_ID_BYTES + _GAIN_BYTES)) + 2 * bags * self.columns * FLOAT32_BYTES

    @property
    def own_bytes(self) -> int:
        """Estimated bytes of a step on every rank: its activations and their gradients; of distinct rows, these too."""
        vectors = self.table.bags + (self.table.distinct if self.exchange == "distinct" else 0)
        return round(2 * vectors * self.table.dimension * FLOAT32_BYTES)


@dataclass(frozen=True)
class RankUsage:
    """What one rank holds.

    Attributes:
        rank: its number.
        tables: tables of which it has a shard with rows.
        rows: rows of all shards.
        weight_bytes: float32 weights, exactly; no rank stores a padding row.
        slot_bytes: float32 slots, exactly.
        batch_bytes: an estimate of ids, sums and gradients of a step, see `TablePlan.batch_bytes`; with the rank's own
            activations and their gradients.
    """

    rank: int
    tables: int
    rows: int
    weight_bytes: int
    slot_bytes: int
    batch_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.weight_bytes + self.slot_bytes + self.batch_bytes


@dataclass(frozen=True)
class Plan:
    """Where the shards of all tables are; from `make_plan` or `read_plan`.

    Attributes:
        tables: in the order of the configuration.
        world_size: ranks.
        local_world_size: ranks of each node; node i has the ranks from `i * local_world_size` on.
        memory_per_rank: the limit that it was made for, in bytes, or None.
    """

    tables: tuple[TablePlan, ...]
    world_size: int
    local_world_size: int
    memory_per_rank: int | None = None

    @cached_property
    def usage(self) -> tuple[RankUsage, ...]:
        """What each rank holds."""
        # Changes from rank to rank: a table of many ranks is a few entries, whatever their number.
        steps: dict[str, list[int]] = {
            name: [0] * (self.world_size + 1)
            for name in ("tables", "rows", "weight_bytes", "slot_bytes", "batch_bytes")
        }

        def add(name: str, first: int, stop: int, value: int) -> None:
            steps[name][first] += value
            steps[name][stop] -= value

        def add_shards(plan: TablePlan, first: int, stop: int, rows: int) -> None:
            weights = rows * plan.columns * FLOAT32_BYTES
            add("tables", first, stop, int(rows > 0))
            add("rows", first, stop, rows)
            add("weight_bytes", first, stop, weights)
            add("slot_bytes", first, stop, weights * plan.table.num_slots)
            add("batch_bytes", first, stop, plan.batch_bytes(self.world_size))

        for plan in self.tables:
            own = plan.own_bytes
            add("batch_bytes", 0, self.world_size, own)
            if plan.by_rows:
                first, shards = plan.ranks[0], len(plan.ranks)
                longer = plan.table.vocabulary_size % shards
                if longer:
                    add_shards(plan, first, first + longer, plan.rows(0))
                add_shards(plan, first + longer, first + shards, plan.rows(shards - 1))
            else:
                for rank in plan.ranks:
                    add_shards(plan, rank, rank + 1, plan.rows(0))
        columns = {name: list(accumulate(changes))[: self.world_size] for name, changes in steps.items()}
        return tuple(
            RankUsage(rank, **{name: values[rank] for name, values in columns.items()})
            for rank in range(self.world_size)
        )

    @property
    def largest_bytes(self) -> int:
        """Bytes of the fullest rank."""
        return max(usage.total_bytes for usage in self.usage)

    def to_dict(self) -> dict[str, Any]:
        """Returns what a plan file has, as plain values."""
        from tpuemb_torch.planning.files import to_mapping

        return to_mapping(self)
