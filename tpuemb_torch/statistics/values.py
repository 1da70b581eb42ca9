"""Statistics as frozen dataclasses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any, NamedTuple

#: What is added up over ranks, and of what the largest counts.
SUMS = ("batches", "ids", "distinct_ids", "bags", "empty_bags")
MAXIMA = ("max_distinct_ids", "max_ids_per_shard", "max_distinct_ids_per_shard")


class PartitionLimits(NamedTuple):
    """The two limits of a table that SparseCore configurations (jax-tpu-embedding, keras-rs) ask for."""

    max_ids_per_partition: int
    max_unique_ids_per_partition: int


@dataclass(frozen=True)
class TableStats:
    """The lookups of one table.  Every number is exact; ids count after the id policy, with repetitions.

    A batch is what one rank looks up in one step: a step of n ranks is n batches.  A bag is one sample of one
    feature; in a sequence, each step of a sample is one, of at most one id.
    """

    name: str
    vocabulary_size: int
    batches: int
    ids: int
    #: Added up over batches: an id that occurs in two batches counts twice.
    distinct_ids: int
    #: In one batch.
    max_distinct_ids: int
    #: Rows that were looked up at least once.
    touched_rows: int
    bags: int
    empty_bags: int
    #: The most ids of one batch that lie in one shard.
    max_ids_per_shard: int
    #: The most distinct ids of one batch that lie in one shard.
    max_distinct_ids_per_shard: int
    #: The most frequent ids with how often each occurred; the most frequent first, of equals the smaller id.
    hot_ids: tuple[tuple[int, int], ...] = ()

    @property
    def pooling_factor(self) -> float:
        """Mean number of ids of a bag, empty ones included; 0 without bags."""
        return self.ids / self.bags if self.bags else 0.0

    @property
    def mean_distinct_ids(self) -> float:
        """Mean number of distinct ids of a batch; 0 without batches."""
        return self.distinct_ids / self.batches if self.batches else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Returns every field, and the means, as JSON has them."""
        values = asdict(self)
        values["hot_ids"] = [list(pair) for pair in self.hot_ids]
        values["pooling_factor"] = self.pooling_factor
        values["mean_distinct_ids"] = self.mean_distinct_ids
        return values


@dataclass(frozen=True)
class Stats:
    """The lookups of all tables, in the config's order: of one rank's own input, or of all ranks together."""

    tables: tuple[TableStats, ...]
    #: Into how many shards rows are cut for the numbers per shard, and how ("div" or "mod").
    num_shards: int
    sharding_strategy: str
    world_size: int = 1
    #: Whose input; None: of all ranks.
    rank: int | None = 0
    #: Each rank's own, where `rank` is None.
    ranks: tuple[Stats, ...] = ()

    def table(self, name: str) -> TableStats:
        """Returns the statistics of a table.

        Raises:
            KeyError: if there is no such table.
        """
        for table in self.tables:
            if table.name == name:
                return table
        raise KeyError(f"no table {name!r} in the statistics: they have {[table.name for table in self.tables]}")

    def pooling_factors(self) -> dict[str, float]:
        """Returns the mean number of ids of a bag by table, as TorchRec's planner takes it; tables without bags are
        left out, for nothing is known of them."""
        return {table.name: table.pooling_factor for table in self.tables if table.bags}

    def mean_distinct_ids(self) -> dict[str, float]:
        """Returns the mean number of distinct ids of a batch by table, as `make_plan` takes it; tables without bags are
        left out."""
        return {table.name: table.mean_distinct_ids for table in self.tables if table.bags}

    def partition_limits(self, headroom: float = 1.0) -> dict[str, PartitionLimits]:
        """Returns `max_ids_per_partition` and `max_unique_ids_per_partition` by table: what was seen, times headroom.

        The limits of stacked tables are at most the sums of theirs.

        Args:
            headroom: factor of at least 1; results are rounded up, and are at least 1.
        """
        if not headroom >= 1:
            raise ValueError(f"headroom must be at least 1, got {headroom}: less would drop ids that were seen")

        def limit(seen: int) -> int:
            return max(1, seen if headroom == 1 else ceil(seen * headroom))

        return {
            table.name: PartitionLimits(limit(table.max_ids_per_shard), limit(table.max_distinct_ids_per_shard))
            for table in self.tables
        }

    def to_dict(self) -> dict[str, Any]:
        """Returns everything, each rank's own included, as JSON has it."""
        values: dict[str, Any] = {
            "num_shards": self.num_shards,
            "sharding_strategy": self.sharding_strategy,
            "world_size": self.world_size,
            "rank": self.rank,
            "tables": [table.to_dict() for table in self.tables],
        }
        if self.rank is None:
            values["ranks"] = [rank.to_dict() for rank in self.ranks]
        return values

    def to_json(self) -> str:
        """Returns `to_dict()` as JSON text."""
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False, allow_nan=False)


def merge_tables(parts: Sequence[TableStats], touched_rows: int, hot_ids: Sequence[tuple[int, int]]) -> TableStats:
    """Returns the statistics of a table over ranks.

    Args:
        parts: each rank's own.
        touched_rows, hot_ids: over all ranks; they do not follow from those of the ranks.
    """
    first = parts[0]
    return TableStats(
        first.name,
        first.vocabulary_size,
        touched_rows=touched_rows,
        hot_ids=tuple(hot_ids),
        **{field: sum(getattr(part, field) for part in parts) for field in SUMS},
        **{field: max(getattr(part, field) for part in parts) for field in MAXIMA},
    )
