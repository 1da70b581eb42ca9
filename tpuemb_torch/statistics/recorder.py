"""The statistics of one collection: on or off, of this rank or of all."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tpuemb_torch.config import Config
from tpuemb_torch.preprocessing import Key, PreparedInput, sort_ids
from tpuemb_torch.statistics.counters import HotIds, LookupCounters, Sort, hottest
from tpuemb_torch.statistics.files import save_stats
from tpuemb_torch.statistics.values import Stats, TableStats, merge_tables

TOP_K = 10


class CountsInput:
    """The methods of a module that counts what it looks up."""

    _statistics: InputStatistics

    @property
    def statistics(self) -> InputStatistics:
        """The counters, on or off."""
        return self._statistics

    def collect_stats(self, enabled: bool = True, *, top_k: int = TOP_K, num_shards: int | None = None) -> None:
        """Switches statistics of the input on or off.  They are off at first, and on where the config has a
        `profile_data_directory`; `shard` keeps the choice, and counts from zero.

        Every lookup counts, in training or not.  While on, a layer holds 8 bytes per row of its tables (whole tables
        on each rank) on the device of the ids, and a batch costs one sort of its ids, which a step on unsharded tables
        then need not do.

        Args:
            enabled: False stops counting; what was counted stays until `stats(reset=True)`.
            top_k: how many hot ids `stats` reports per table.
            num_shards: into how many shards rows are cut, as the config's `sharding_strategy` says, for the numbers
                per shard; None: the number of ranks.  Another number than before starts from zero.

        Raises:
            ValueError: for a negative `top_k`, or `num_shards` below 1.
        """
        if enabled:
            self.statistics.start(top_k, num_shards)
        else:
            self.statistics.stop()

    def stats(self, *, all_ranks: bool = False, reset: bool = False) -> Stats:
        """Returns the statistics of what was looked up.

        Args:
            all_ranks: of all ranks together, and each rank's own in `ranks` (collective: the counts of all rows are
                added over the ranks).  Otherwise of this rank's own input.
            reset: whether to count from zero afterwards.

        Raises:
            RuntimeError: if statistics were never on, here or (`all_ranks`) on another rank.
            ValueError: if ranks collect with different options (`all_ranks`).
        """
        return self.statistics.stats(all_ranks=all_ranks, reset=reset)

    def write_stats(self, directory: str | os.PathLike[str] | None = None) -> Path:
        """Writes the statistics of all ranks to `stats.json` in a directory, for `read_stats` and `tpuemb stats`.

        The file appears whole or not at all; an older one is replaced.  In a job of several ranks, all must call it,
        and rank 0 writes.

        Args:
            directory: made if missing; None: the config's `profile_data_directory`.

        Returns:
            The file.

        Raises:
            RuntimeError, ValueError: as `stats` does; and if there is no directory, or it is an URL.
            OSError: if the file cannot be written; on all ranks.
        """
        return self.statistics.write(directory)


class InputStatistics:
    """Counts what a collection looks up, while it is on.  A config with a `profile_data_directory` switches it on.

    Args:
        config: the collection's.
        keys: the collection's keys, in its order; those of a table are neighbours.
        group: the ranks that the tables are sharded over; None: there is one process.
        device: where those ranks exchange numbers.
    """

    def __init__(
        self,
        config: Config,
        keys: Sequence[Key],
        group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._config = config
        self._keys = list(keys)
        self._group = group
        self._device = device or torch.device("cpu")
        self._world = 1 if group is None else dist.get_world_size(group)
        self._rank = 0 if group is None else dist.get_rank(group)
        self._on = False
        self._top_k = TOP_K
        self._asked_shards: int | None = None
        self._counters: LookupCounters | None = None
        if config.profile_data_directory:
            self.start()

    def on_ranks(self, group: dist.ProcessGroup, device: torch.device) -> InputStatistics:
        """Statistics of the sharded collection: with the same options, from zero."""
        sharded = InputStatistics(self._config, self._keys, group, device)
        if self._counters is not None:
            sharded.start(self._top_k, self._asked_shards)
            sharded._on = self._on
        return sharded

    def start(self, top_k: int = TOP_K, num_shards: int | None = None) -> None:
        """Switches on; see `TPUEmbedding.collect_stats`."""
        if top_k < 0:
            raise ValueError(f"top_k={top_k}: give the number of hot ids to report, 0 for none")
        if num_shards is not None and num_shards < 1:
            raise ValueError(f"num_shards={num_shards}: give the number of shards, or None for the number of ranks")
        self._top_k, self._asked_shards = top_k, num_shards
        shards = num_shards or self._world
        if self._counters is None or self._counters.num_shards != shards:
            tables = {table.name: table for table in self._config.tables}
            keys = Counter(key.table for key in self._keys)
            features = Counter({key.feature: key.table for key in self._keys}.values())
            self._counters = LookupCounters(
                [tables[name] for name in keys],
                [keys[name] for name in keys],
                [features[name] for name in keys],
                shards,
                self._config.sharding_strategy,
            )
        self._on = True

    def stop(self) -> None:
        """Switches off; what was counted stays."""
        self._on = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within, nothing is counted."""
        on, self._on = self._on, False
        try:
            yield
        finally:
            self._on = on

    def record(self, prepared: PreparedInput, sort: Sort = sort_ids) -> PreparedInput:
        """Counts a batch that is looked up, if statistics are on.

        Args:
            prepared: the batch.
            sort: what sorts its ids, if that was not done; a faster one with the result of `sort_ids`.

        Returns:
            The batch; if it was counted, with its ids sorted, which the step then need not do.
        """
        if not self._on or self._counters is None:
            return prepared
        return self._counters.add(prepared, sort)

    def stats(self, *, all_ranks: bool = False, reset: bool = False) -> Stats:
        """See `TPUEmbedding.stats`."""
        found = self._of_all_ranks() if all_ranks else self._own()
        if found is None:
            raise RuntimeError("no input statistics: call collect_stats() before the batches that are to be counted")
        if reset and self._counters is not None:
            self._counters.reset()
        return found

    def write(self, directory: str | os.PathLike[str] | None = None) -> Path:
        """See `TPUEmbedding.write_stats`."""
        target = os.fspath(directory or self._config.profile_data_directory)
        if not target:
            raise ValueError("the config has no profile_data_directory: give write_stats() a directory")
        if "://" in target:
            raise ValueError(f"{target!r} is not a directory of this machine: give write_stats() one")
        stats = self.stats(all_ranks=True)
        path, error = Path(target), None
        if self._rank == 0:
            try:
                path = save_stats(stats, target)
            except (OSError, ValueError) as problem:  # the other ranks must hear of it
                error = problem
        written = self._gathered((path, None if error is None else str(error)))
        if error is not None:
            raise error
        if written[0][1] is not None:
            raise OSError(f"rank 0 could not write the statistics: {written[0][1]}")
        return Path(written[0][0])

    def _own(self) -> Stats | None:
        """Of this rank's own input; None where nothing was ever to be counted."""
        counters = self._counters
        if counters is None:
            return None
        return self._stats(self._in_config_order(counters.table_stats(self._top_k)), self._rank)

    def _of_all_ranks(self) -> Stats | None:
        """Of all ranks (collective)."""
        ranks: list[Stats | None] = self._gathered(self._own())
        without = [rank for rank, stats in enumerate(ranks) if stats is None]
        if without and self._world > 1:
            raise RuntimeError(f"no input statistics on ranks {without}: call collect_stats() on every rank")
        if without:
            return None
        parts = [stats for stats in ranks if stats is not None]
        top_ks = self._gathered(self._top_k)
        for name, values in (("num_shards", [stats.num_shards for stats in parts]), ("top_k", top_ks)):
            if len(set(values)) > 1:
                raise ValueError(f"{name} differs between ranks ({values}): give collect_stats() the same on all")
        assert self._counters is not None
        merged = []
        for index, table in enumerate(self._counters.tables):
            own = [stats.table(table.name) for stats in parts]
            merged.append(merge_tables(own, *self._hottest_of_all(self._counters, index)))
        return self._stats(self._in_config_order(merged), None, tuple(parts))

    def _hottest_of_all(self, counters: LookupCounters, index: int) -> tuple[int, HotIds]:
        """What `hottest` finds over all ranks: their counts are added row by row."""
        lookups = counters.lookups(index)
        if lookups is None:
            lookups = torch.zeros(counters.tables[index].vocabulary_size, dtype=torch.int64)
        if self._group is not None:
            lookups = lookups.to(self._device, copy=True)
            dist.all_reduce(lookups, group=self._group)
        return hottest(lookups, self._top_k)

    def _in_config_order(self, stats: Sequence[TableStats]) -> tuple[TableStats, ...]:
        by_name = {table.name: table for table in stats}
        return tuple(by_name[table.name] for table in self._config.tables)

    def _stats(self, tables: tuple[TableStats, ...], rank: int | None, ranks: tuple[Stats, ...] = ()) -> Stats:
        assert self._counters is not None
        return Stats(tables, self._counters.num_shards, self._config.sharding_strategy, self._world, rank, ranks)

    def _gathered(self, value: Any) -> list[Any]:
        """Every rank's value, by rank."""
        values = [value] * self._world
        if self._group is not None:
            dist.all_gather_object(values, value, group=self._group)
        return values
