"""stats.json: written whole, read back equal, and refused where it cannot be true."""

from __future__ import annotations

import json
import math
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tpuemb_torch as tpuemb
from tests.statistics.plain import config_text, plain_stats, ragged
from tpuemb_torch.statistics import merge_tables, save_stats

NAMES = ("users", 'Filme, ältere "\\\n')
ROWS = (6, 2**40)
BATCHES = (
    ([[[1, 1, 5], []], [[0]]], [[[0], [7, 7]], [[7]]]),
    ([[[1, 2], [1, 3]]], [[[], []]]),
)  # by rank, table and batch


def example() -> tpuemb.Stats:
    """Two ranks, two tables, three shards."""
    ranks = tuple(
        tpuemb.Stats(
            tuple(
                replace(plain_stats(name, 8, own), vocabulary_size=rows)
                for name, rows, own in zip(NAMES, ROWS, batches, strict=True)
            ),
            num_shards=3,
            sharding_strategy="mod",
            world_size=2,
            rank=rank,
        )
        for rank, batches in enumerate(BATCHES)
    )
    tables = (
        merge_tables([rank.tables[0] for rank in ranks], 5, [(1, 4), (0, 1)]),
        merge_tables([rank.tables[1] for rank in ranks], 2, [(7, 3), (0, 1)]),
    )
    return tpuemb.Stats(tables, 3, "mod", 2, None, ranks)


def test_merged() -> None:
    users = example().tables[0]
    assert (users.batches, users.ids, users.distinct_ids, users.bags, users.empty_bags) == (3, 8, 6, 5, 1)
    assert (users.max_distinct_ids, users.max_ids_per_shard, users.max_distinct_ids_per_shard) == (3, 4, 3)
    assert (users.pooling_factor, users.mean_distinct_ids) == (8 / 5, 2.0)


def test_round_trip(tmp_path: Path) -> None:
    stats = example()
    path = save_stats(stats, tmp_path / "a" / "b")
    assert path == tmp_path / "a" / "b" / "stats.json"
    assert tpuemb.read_stats(path.parent) == stats
    assert tpuemb.read_stats(str(path.parent)).ranks[1] == stats.ranks[1]
    assert os.listdir(path.parent) == ["stats.json"]
    assert json.loads(path.read_text())["format"] == 1


def test_the_older_file_stays_until_the_new_one_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_stats(example(), tmp_path)
    before = (tmp_path / "stats.json").read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        save_stats(replace(example(), sharding_strategy="div"), tmp_path)
    assert (tmp_path / "stats.json").read_bytes() == before
    assert os.listdir(tmp_path) == ["stats.json"]


def test_one_rank_alone_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rank 1 alone: save stats\(all_ranks=True\)"):
        save_stats(example().ranks[1], tmp_path)
    assert os.listdir(tmp_path) == []


def test_json() -> None:
    stats = example()
    values = json.loads(stats.to_json())
    assert values == stats.to_dict()
    assert values["tables"][0]["hot_ids"] == [[1, 4], [0, 1]]
    assert values["tables"][0]["pooling_factor"] == 1.6
    assert values["tables"][0]["mean_distinct_ids"] == 2.0
    assert [rank["rank"] for rank in values["ranks"]] == [0, 1]
    assert "ranks" not in stats.ranks[0].to_dict()


def test_what_planners_and_configurations_take() -> None:
    stats = example()
    assert stats.pooling_factors() == {NAMES[0]: 8 / 5, NAMES[1]: 4 / 5}
    limits = stats.partition_limits()
    assert limits[NAMES[0]] == (4, 3)
    assert (limits[NAMES[0]].max_ids_per_partition, limits[NAMES[0]].max_unique_ids_per_partition) == (4, 3)
    assert stats.partition_limits(1.3)[NAMES[0]] == (6, 4)
    nothing = tpuemb.Stats((plain_stats("t", 3, []),), 1, "div")
    assert nothing.partition_limits() == {"t": (1, 1)}
    for headroom in (0.9, math.nan):
        with pytest.raises(ValueError, match="headroom"):
            stats.partition_limits(headroom)
    assert stats.table(NAMES[1]).vocabulary_size == 2**40
    with pytest.raises(KeyError, match="films"):
        stats.table("films")


def change(path: tuple[str | int, ...], value: Any) -> Callable[[dict[str, Any]], None]:
    def apply(content: dict[str, Any]) -> None:
        target: Any = content
        for key in path[:-1]:
            target = target[key]
        if value is DELETE:
            del target[path[-1]]
        else:
            target[path[-1]] = value

    return apply


DELETE = object()
TABLE = ("ranks", 1, "tables", 0)
BROKEN: list[tuple[tuple[str | int, ...], Any, str, str]] = [
    (("format",), 2, "format", "2: this version reads format 1"),
    (("format",), True, "format", "True: this version"),
    (("format",), DELETE, "format", "None: this version"),
    (("rank",), 0, "rank", "0 instead of null"),
    (("rank",), DELETE, "rank", "is missing"),
    (("world_size",), 3, "ranks", "2 entries for world_size 3"),
    (("world_size",), 0, "world_size", "0 is not a whole number of at least 1"),
    (("num_shards",), 0, "num_shards", "0 is not"),
    (("num_shards",), "3", "num_shards", "a string instead of a whole number"),
    (("sharding_strategy",), "rows", "sharding_strategy", "'rows' is neither"),
    (("sharding_strategy",), None, "sharding_strategy", "null instead of a string"),
    (("tables",), {}, "tables", "an object instead of a list"),
    (("tables", 0), 5, "tables[0]", "a whole number instead of an object"),
    (("ranks",), DELETE, "ranks", "is missing"),
    (("ranks", 0), [], "ranks[0]", "a list instead of an object"),
    (("ranks", 1, "rank"), 0, "ranks[1].rank", "0 instead of 1"),
    (("ranks", 1, "rank"), None, "ranks[1].rank", "null instead of a whole number"),
    (("ranks", 1, "num_shards"), 4, "ranks[1].num_shards", "4 here, 3 for all ranks"),
    (("ranks", 1, "world_size"), 1, "ranks[1].world_size", "1 here, 2 for all ranks"),
    (("ranks", 0, "sharding_strategy"), "div", "ranks[0].sharding_strategy", "div here, mod for all"),
    ((*TABLE, "name"), "other", "ranks[1].tables", "other"),
    ((*TABLE, "vocabulary_size"), 7, "ranks[1].tables", "7"),
    ((*TABLE, "ids"), DELETE, "ranks[1].tables[0].ids", "is missing"),
    ((*TABLE, "ids"), 4.0, "ranks[1].tables[0].ids", "a fraction instead of a whole number"),
    ((*TABLE, "ids"), True, "ranks[1].tables[0].ids", "True is not a whole number"),
    ((*TABLE, "ids"), -4, "ranks[1].tables[0].ids", "-4 is not a whole number of at least 0"),
    ((*TABLE, "ids"), 3, "ranks[1].tables[0].max_ids_per_shard", "4 is more than ids, 3"),
    ((*TABLE, "batches"), 2, "tables[0].batches", "3, but the ranks' give 4"),
    ((*TABLE, "distinct_ids"), 5, "ranks[1].tables[0].distinct_ids", "5 is more than ids, 4"),
    ((*TABLE, "max_distinct_ids"), 4, "ranks[1].tables[0].max_distinct_ids", "4 is more than distinct_ids, 3"),
    ((*TABLE, "touched_rows"), 4, "ranks[1].tables[0].touched_rows", "4 is more than distinct_ids, 3"),
    ((*TABLE, "touched_rows"), 1, "ranks[1].tables[0].hot_ids", "3 ids, more than touched_rows, 1"),
    ((*TABLE, "empty_bags"), 3, "ranks[1].tables[0].empty_bags", "3 is more than bags, 2"),
    ((*TABLE, "max_ids_per_shard"), 5, "ranks[1].tables[0].max_ids_per_shard", "5 is more than ids, 4"),
    (
        (*TABLE, "max_distinct_ids_per_shard"),
        4,
        "ranks[1].tables[0].max_distinct_ids_per_shard",
        "4 is more than max_distinct_ids, 3",
    ),
    ((*TABLE, "hot_ids"), "", "ranks[1].tables[0].hot_ids", "a string instead of a list"),
    ((*TABLE, "hot_ids", 0), [1], "ranks[1].tables[0].hot_ids[0]", "not a pair"),
    ((*TABLE, "hot_ids", 0), [1, True], "ranks[1].tables[0].hot_ids[0]", "not a pair"),
    ((*TABLE, "hot_ids", 0), [6, 2], "ranks[1].tables[0].hot_ids[0]", "id 6 is outside [0, 6)"),
    ((*TABLE, "hot_ids", 0), [-1, 2], "ranks[1].tables[0].hot_ids[0]", "id -1 is outside"),
    ((*TABLE, "hot_ids", 0), [1, 0], "ranks[1].tables[0].hot_ids[0]", "count 0 is outside [1, 4]"),
    ((*TABLE, "hot_ids", 0), [1, 5], "ranks[1].tables[0].hot_ids[0]", "count 5 is outside [1, 4]"),
    ((*TABLE, "hot_ids"), [[2, 1], [1, 2]], "ranks[1].tables[0].hot_ids", "must be ordered by count"),
    ((*TABLE, "hot_ids"), [[3, 1], [2, 1]], "ranks[1].tables[0].hot_ids", "then by id"),
    ((*TABLE, "hot_ids"), [[1, 2], [1, 1]], "ranks[1].tables[0].hot_ids", "each id once"),
    (("tables", 0, "ids"), 9, "tables[0].ids", "9, but the ranks' give 8"),
    (("tables", 0, "max_ids_per_shard"), 3, "tables[0].max_ids_per_shard", "3, but the ranks' give 4"),
    (("tables", 0, "touched_rows"), 2, "tables[0].touched_rows", "2, but the ranks touched [3, 3]"),
    (("tables", 1, "touched_rows"), 3, "tables[1].touched_rows", "3, but the ranks touched [2, 0]"),
]


@pytest.mark.parametrize(("path", "value", "field", "problem"), BROKEN, ids=lambda value: str(value)[:40])
def test_broken_fields_are_named(
    path: tuple[str | int, ...], value: Any, field: str, problem: str, tmp_path: Path
) -> None:
    file = save_stats(example(), tmp_path)
    content = json.loads(file.read_text())
    change(path, value)(content)
    file.write_text(json.dumps(content))
    with pytest.raises(tpuemb.StatsError) as caught:
        tpuemb.read_stats(tmp_path)
    assert caught.value.field.startswith(f"{file}: {field}")
    assert problem in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[]", "holds a list instead of an object"),
        (b"null", "holds null instead of an object"),
        (b'{"format": NaN}', "nan: this version"),
    ],
)
def test_what_is_no_statistics_file(data: bytes, problem: str, tmp_path: Path) -> None:
    (tmp_path / "stats.json").write_bytes(data)
    with pytest.raises(tpuemb.StatsError) as caught:
        tpuemb.read_stats(tmp_path)
    assert caught.value.field.startswith(str(tmp_path / "stats.json"))
    assert problem in caught.value.problem


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(tpuemb.StatsError, match=r"stats\.json: no such file: a layer's write_stats\(\) writes it"):
        tpuemb.read_stats(tmp_path)
    (tmp_path / "stats.json").mkdir()
    with pytest.raises(tpuemb.StatsError, match=r"stats\.json: cannot be read: Is a directory"):
        tpuemb.read_stats(tmp_path)


def test_a_layer_writes_to_its_profile_data_directory(tmp_path: Path) -> None:
    config = tpuemb.load_config(config_text({"t": 10}, directory=str(tmp_path / "profiles")))
    layer = tpuemb.TPUEmbedding(config, kernel="eager")
    for step in range(2):
        layer({"t": ragged([[1, 2 + step], []]), "more": ragged([[], [], [3], []])})
        assert layer.write_stats() == tmp_path / "profiles" / "stats.json"
    found = tpuemb.read_stats(tmp_path / "profiles")
    assert found == layer.stats(all_ranks=True)
    assert found.ranks == (layer.stats(),)
    assert found.table("t") == plain_stats("t", 10, [[[1, 2], [], [], [], [3], []], [[1, 3], [], [], [], [3], []]])
    assert layer.write_stats(tmp_path / "other") == tmp_path / "other" / "stats.json"
    assert tpuemb.read_stats(tmp_path / "other") == found


def test_where_nothing_can_be_written() -> None:
    layer = tpuemb.TPUEmbedding(tpuemb.load_config(config_text({"t": 10})), kernel="eager")
    layer.collect_stats()
    with pytest.raises(ValueError, match="no profile_data_directory: give"):
        layer.write_stats()
    layer = tpuemb.TPUEmbedding(tpuemb.load_config(config_text({"t": 10}, directory="gs://bucket/x")), kernel="eager")
    with pytest.raises(ValueError, match="'gs://bucket/x' is not a directory of this machine"):
        layer.write_stats()


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.text(st.characters(codec="utf-8"), min_size=1), min_size=1, max_size=3, unique=True),
    st.lists(st.lists(st.lists(st.integers(0, 6)), min_size=1), max_size=3),
    st.sampled_from(["div", "mod"]),
)
def test_every_statistics_can_be_read_back(
    tmp_path_factory: pytest.TempPathFactory, names: list[str], batches: list[list[list[int]]], strategy: str
) -> None:
    folder = tmp_path_factory.mktemp("stats")
    tables = tuple(plain_stats(name, 7, batches, 2, strategy, 3) for name in names)
    own = tpuemb.Stats(tables, 2, strategy)
    together = replace(own, rank=None, ranks=(own,))
    save_stats(together, folder)
    assert tpuemb.read_stats(folder) == together
