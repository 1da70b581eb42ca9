"""Statistics of several ranks: each rank's own, and all together, are those of one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed import DistributedModelParallel

import tpuemb_torch as tpuemb
from tests.distributed.cases import COMBINERS, concatenate, config_text, make_batch
from tests.ranks import run_ranks
from tpuemb_torch.statistics import merge_tables

STEPS = 3
SIZES = [(6, 0, 3), (2, 5, 3)]  # by rank and step


def config(strategy: str = "DIV_DEFAULT") -> tpuemb.Config:
    return tpuemb.load_config(config_text("adagrad", strategy))


def part(rank: int, step: int) -> dict[str, Any]:
    return make_batch(SIZES[rank][step], 10 * step + rank)


def layer(strategy: str = "DIV_DEFAULT") -> tpuemb.TPUEmbedding:
    return tpuemb.TPUEmbedding(config(strategy), COMBINERS, kernel="eager")


def alone(strategy: str, rank: int) -> tpuemb.Stats:
    """The statistics of one process that looks up a rank's parts."""
    embedding = layer(strategy)
    embedding.collect_stats(num_shards=2, top_k=4)
    for step in range(STEPS):
        embedding(part(rank, step))
    return embedding.stats()


def _sharded(rank: int, world: int, strategy: str, plan: str, folder: str) -> tuple[Any, ...]:
    embedding = layer(strategy)
    embedding.collect_stats(top_k=4)
    embedding(part(rank, 0))  # before sharding: it must not count after
    embedding = tpuemb.shard(embedding, plan)
    for step in range(STEPS):
        embedding(part(rank, step))
    own, together = embedding.stats(), embedding.stats(all_ranks=True)
    file = embedding.write_stats(folder)
    again = embedding.stats(all_ranks=True, reset=True)
    return own, together, str(file), again, embedding.stats()


@pytest.mark.parametrize(("strategy", "plan"), [("DIV_DEFAULT", "row_wise"), ("MOD", "table_wise")])
def test_as_in_one_process(strategy: str, plan: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "new" / "folder")
    results = run_ranks(2, _sharded, strategy, plan, folder)
    expected = [replace(alone(strategy, rank), world_size=2, rank=rank) for rank in range(2)]
    everything = layer(strategy)
    everything.collect_stats(top_k=4)
    for step in range(STEPS):
        everything(concatenate([part(0, step), part(1, step)]))
    for rank, (own, together, file, again, after) in enumerate(results):
        assert own == expected[rank]
        assert own.num_shards == 2
        assert (together.rank, together.world_size, together.ranks) == (None, 2, tuple(expected))
        for table, whole in zip(together.tables, everything.stats().tables, strict=True):
            both = [stats.table(table.name) for stats in expected]
            assert table == merge_tables(both, whole.touched_rows, whole.hot_ids)
            assert (table.ids, table.bags, table.empty_bags) == (whole.ids, whole.bags, whole.empty_bags)
            assert table.batches == 2 * STEPS
            assert len(table.hot_ids) == min(4, table.touched_rows) > 0
        assert file == str(Path(folder) / "stats.json")
        assert again == together
        assert after.table("user").ids == 0
    assert tpuemb.read_stats(folder) == results[0][1]


def _some_off(rank: int, world: int, folder: str) -> list[str]:
    embedding = layer()
    if rank == 0:
        embedding.collect_stats()
    embedding = tpuemb.shard(embedding, "row_wise")
    messages = []
    for call in (lambda: embedding.stats(all_ranks=True), lambda: embedding.write_stats(folder)):
        with pytest.raises(RuntimeError) as caught:
            call()
        messages.append(str(caught.value))
    embedding.collect_stats(top_k=3 + rank, num_shards=4)
    with pytest.raises(ValueError, match="top_k") as options:
        embedding.stats(all_ranks=True)
    messages.append(str(options.value))
    embedding.collect_stats(top_k=3, num_shards=4 + rank)
    with pytest.raises(ValueError, match="num_shards") as options:
        embedding.write_stats(folder)
    messages.append(str(options.value))
    embedding.collect_stats()
    embedding(part(rank, 0))
    with pytest.raises(OSError, match=r"Not a directory|File exists|rank 0 could not write") as written:
        embedding.write_stats(__file__)
    messages.append(type(written.value).__name__)
    # After all these, the ranks are still in step.
    assert embedding.stats(all_ranks=True).table("user").batches == 2
    return messages


def test_all_ranks_raise_alike(tmp_path: Path) -> None:
    first, second = run_ranks(2, _some_off, str(tmp_path))
    assert first[:4] == second[:4]
    assert "ranks [1]" in first[0] and "collect_stats() on every rank" in first[1]
    assert "([3, 4])" in first[2] and "([4, 5])" in first[3]
    assert first[4] in ("FileExistsError", "NotADirectoryError")
    assert second[4] == "OSError"
    assert list(tmp_path.iterdir()) == []


def _rejected(rank: int, world: int) -> int:
    embedding = layer()
    embedding.collect_stats()
    embedding = tpuemb.shard(embedding, "row_wise")
    bad = {**part(rank, 0)}
    if rank == 1:
        bad["viewer"] = torch.full_like(bad["viewer"], 23)
    with pytest.raises(tpuemb.InputError):
        embedding(bad)
    return embedding.stats().table("user").batches


def test_a_batch_that_another_rank_rejects_does_not_count() -> None:
    assert run_ranks(2, _rejected) == [0, 0]


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = layer()


def _by_model_parallel(rank: int, world: int) -> tuple[tpuemb.Stats, bool]:
    model = _Model()
    model.embedding.collect_stats(num_shards=3)
    sharded = DistributedModelParallel(model, device=torch.device("cpu"), sharders=tpuemb.sharders())
    embedding = sharded.module.embedding
    assert isinstance(embedding, tpuemb.TPUEmbedding)
    embedding(part(rank, 0))
    embedding.collect_stats(False)
    embedding(part(rank, 0))
    return embedding.stats(), dist.get_world_size() == 2


def test_in_distributed_model_parallel() -> None:
    for rank, (stats, _) in enumerate(run_ranks(2, _by_model_parallel)):
        expected = layer()
        expected.collect_stats(num_shards=3)
        expected(part(rank, 0))
        assert stats == replace(expected.stats(), world_size=2, rank=rank)


def _switched_off(rank: int, world: int) -> list[int]:
    """Off before sharding stays off after; and of a config with a directory, on."""
    counts = []
    for off in (False, True):
        text = config_text("adagrad") + 'profile_data_directory: "/profiles"'
        embedding = tpuemb.TPUEmbedding(tpuemb.load_config(text), COMBINERS, kernel="eager")
        if off:
            embedding.collect_stats(False)
        embedding = tpuemb.shard(embedding, "row_wise")
        embedding(part(rank, 0))
        counts.append(embedding.stats().table("user").batches)
    return counts


def test_sharding_keeps_the_choice() -> None:
    assert run_ranks(2, _switched_off) == [[1, 0], [1, 0]]
