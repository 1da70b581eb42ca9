"""The statistics file of a `profile_data_directory`: written whole, and checked number by number when read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from tpuemb_torch.config.write import write_atomically
from tpuemb_torch.statistics.errors import StatsError
from tpuemb_torch.statistics.values import MAXIMA, SUMS, Stats, TableStats, merge_tables

#: Name of the file in the directory.
STATS_FILE = "stats.json"
_FORMAT = 1
_COUNTS = ("vocabulary_size", *SUMS, *MAXIMA, "touched_rows")


def save_stats(stats: Stats, directory: str | os.PathLike[str]) -> Path:
    """Writes statistics of all ranks to `stats.json` in a directory, which is made if missing.

    The file appears whole or not at all; an older one is replaced.

    Raises:
        ValueError: for statistics of one rank alone.
        OSError: if the file cannot be written.
    """
    if stats.rank is not None:
        raise ValueError(f"statistics of rank {stats.rank} alone: save stats(all_ranks=True)")
    path = Path(directory) / STATS_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"format": _FORMAT, **stats.to_dict()}
    write_atomically(path, (json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode())
    return path


def read_stats(directory: str | os.PathLike[str]) -> Stats:
    """Reads the statistics in a directory: of all ranks together, and each rank's own in `ranks`.

    Raises:
        StatsError: if there are none, or the file does not hold what `save_stats` writes; names file and field.
    """
    path = Path(directory) / STATS_FILE
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise StatsError(str(path), "no such file: a layer's write_stats() writes it") from None
    except OSError as error:
        raise StatsError(str(path), f"cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise StatsError(str(path), f"is not JSON ({error}): write it again with write_stats()") from error
    return _Reader(f"{path}: ").stats(content)


class _Reader:
    """Turns the values of a file into statistics; every error names the file and the field."""

    def __init__(self, file: str) -> None:
        self._file = file

    def fail(self, field: str, problem: str) -> NoReturn:
        raise StatsError(self._file + field, problem)

    def stats(self, content: Any) -> Stats:
        """The whole file."""
        if not isinstance(content, dict):
            raise StatsError(self._file.removesuffix(": "), f"holds {_kind(content)} instead of an object")
        version = content.get("format")
        if version != _FORMAT or isinstance(version, bool):
            self.fail("format", f"{version!r}: this version reads format {_FORMAT}; write the file with this version")
        if self.value(content, "", "rank", object) is not None:
            self.fail("rank", f"{content['rank']!r} instead of null, which is for all ranks")
        together = self.of_ranks(content, "", None)
        parts = self.value(content, "", "ranks", list)
        if len(parts) != together.world_size:
            self.fail("ranks", f"{len(parts)} entries for world_size {together.world_size}: write the file again")
        ranks = tuple(self.of_ranks(part, f"ranks[{number}].", number) for number, part in enumerate(parts))
        for number, own in enumerate(ranks):
            self.check_alike(f"ranks[{number}].", own, together)
        for index, table in enumerate(together.tables):
            self.check_sum(f"tables[{index}].", table, [own.tables[index] for own in ranks])
        return Stats(together.tables, together.num_shards, together.sharding_strategy, together.world_size, None, ranks)

    def of_ranks(self, content: Any, place: str, rank: int | None) -> Stats:
        """One rank's own statistics, or those of all ranks (None) without each rank's own."""
        if not isinstance(content, dict):
            self.fail(place.removesuffix("."), f"{_kind(content)} instead of an object")
        if rank is not None and self.count(content, place, "rank") != rank:
            self.fail(f"{place}rank", f"{content['rank']} instead of {rank}: ranks are in order")
        strategy = self.value(content, place, "sharding_strategy", str)
        if strategy not in ("div", "mod"):
            self.fail(f"{place}sharding_strategy", f'{strategy!r} is neither "div" nor "mod"')
        return Stats(
            tuple(
                self.table(entry, f"{place}tables[{index}].")
                for index, entry in enumerate(self.value(content, place, "tables", list))
            ),
            self.count(content, place, "num_shards", least=1),
            strategy,
            self.count(content, place, "world_size", least=1),
            rank,
        )

    def table(self, content: Any, place: str) -> TableStats:
        """One table's numbers, which must fit each other."""
        if not isinstance(content, dict):
            self.fail(place.removesuffix("."), f"{_kind(content)} instead of an object")
        name = self.value(content, place, "name", str)
        counts = {field: self.count(content, place, field) for field in _COUNTS}
        pairs = self.value(content, place, "hot_ids", list)
        hot_ids = tuple(self.hot_id(pair, f"{place}hot_ids[{number}]", counts) for number, pair in enumerate(pairs))
        for field, *limits in (
            ("distinct_ids", "ids"),
            ("max_distinct_ids", "distinct_ids", "vocabulary_size"),
            ("touched_rows", "distinct_ids", "vocabulary_size"),
            ("empty_bags", "bags"),
            ("max_ids_per_shard", "ids"),
            ("max_distinct_ids_per_shard", "max_ids_per_shard", "max_distinct_ids"),
        ):
            for limit in limits:
                if counts[field] > counts[limit]:
                    self.fail(f"{place}{field}", f"{counts[field]} is more than {limit}, {counts[limit]}")
        if len(hot_ids) > counts["touched_rows"]:
            self.fail(f"{place}hot_ids", f"{len(hot_ids)} ids, more than touched_rows, {counts['touched_rows']}")
        by_count = sorted(hot_ids, key=lambda pair: (-pair[1], pair[0]))
        if list(hot_ids) != by_count or len(dict(hot_ids)) != len(hot_ids):
            self.fail(f"{place}hot_ids", "must be ordered by count, then by id, each id once")
        return TableStats(name, hot_ids=hot_ids, **counts)

    def hot_id(self, pair: Any, field: str, counts: dict[str, int]) -> tuple[int, int]:
        if not (isinstance(pair, list) and len(pair) == 2 and all(type(number) is int for number in pair)):
            self.fail(field, f"{pair!r} is not a pair of an id and a count")
        row, count = pair
        if not 0 <= row < counts["vocabulary_size"]:
            self.fail(field, f"id {row} is outside [0, {counts['vocabulary_size']})")
        if not 1 <= count <= counts["ids"]:
            self.fail(field, f"count {count} is outside [1, {counts['ids']}], the table's ids")
        return row, count

    def check_alike(self, place: str, own: Stats, together: Stats) -> None:
        """A rank's statistics are of the same layer as those of all ranks."""
        described: dict[str, Callable[[Stats], Any]] = {
            "num_shards": lambda stats: stats.num_shards,
            "sharding_strategy": lambda stats: stats.sharding_strategy,
            "world_size": lambda stats: stats.world_size,
            "tables": lambda stats: [(table.name, table.vocabulary_size) for table in stats.tables],
        }
        for field, value in described.items():
            if value(own) != value(together):
                self.fail(place + field, f"{value(own)} here, {value(together)} for all ranks: write the file again")

    def check_sum(self, place: str, table: TableStats, parts: list[TableStats]) -> None:
        """A table's numbers over all ranks are those of the ranks taken together."""
        expected = merge_tables(parts, table.touched_rows, table.hot_ids)
        for field in (*SUMS, *MAXIMA):
            if getattr(table, field) != getattr(expected, field):
                self.fail(
                    place + field,
                    f"{getattr(table, field)}, but the ranks' give {getattr(expected, field)}: write the file again",
                )
        touched = [part.touched_rows for part in parts]
        if not max(touched) <= table.touched_rows <= sum(touched):
            self.fail(f"{place}touched_rows", f"{table.touched_rows}, but the ranks touched {touched}")

    def value(self, content: dict[str, Any], place: str, field: str, kind: type) -> Any:
        if field not in content:
            self.fail(place + field, "is missing")
        if not isinstance(content[field], kind):
            self.fail(place + field, f"{_kind(content[field])} instead of {_KINDS[kind]}")
        return content[field]

    def count(self, content: dict[str, Any], place: str, field: str, least: int = 0) -> int:
        value = self.value(content, place, field, int)
        if isinstance(value, bool) or value < least:
            self.fail(place + field, f"{value!r} is not a whole number of at least {least}")
        return int(value)


_KINDS: dict[type, str] = {
    dict: "an object",
    list: "a list",
    str: "a string",
    int: "a whole number",
    float: "a fraction",
    bool: "true or false",
    type(None): "null",
}


def _kind(value: Any) -> str:
    return _KINDS[type(value)]
