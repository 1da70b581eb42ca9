"""Tables cut by rows over the ranks of one node: two nodes of two ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

import tpuemb_torch as tpuemb
from tests.distributed import cases
from tests.ranks import run_ranks

SIZES = (3, 5, 0, 2)
SEEDS = [[100 * size + 10 * step + rank for rank, size in enumerate(SIZES)] for step in range(3)]


def parts(step: int) -> list[dict[str, Any]]:
    return [cases.make_batch(size, seed) for size, seed in zip(SIZES, SEEDS[step], strict=True)]


def train_on_nodes(rank: int, world: int, strategy: str, plan: Any) -> Any:
    os.environ.update(LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(rank % 2))
    config = tpuemb.load_config(cases.config_text("ftrl", strategy))
    embedding = tpuemb.shard(tpuemb.TPUEmbedding(config, cases.COMBINERS, seed=3), plan)
    seen = cases.train(embedding, [parts(step)[rank] for step in range(3)], [[seeds[rank]] for seeds in SEEDS])
    stored = {(s.part.table.name, s.part.rows) for s in embedding.collection.stored()}
    return seen, cases.to_numpy(embedding.retrieve_parameters()), stored


@pytest.mark.parametrize("strategy", ["DIV_DEFAULT", "MOD"])
def test_same_numbers_as_one_process(strategy: str) -> None:
    plan = {"user": "table_row_wise", "item": "table_row_wise", "tiny": "row_wise"}
    results = run_ranks(4, train_on_nodes, strategy, plan)
    config = tpuemb.load_config(cases.config_text("ftrl", strategy))
    alone = tpuemb.TPUEmbedding(config, cases.COMBINERS, seed=3)
    expected = cases.train(alone, [cases.concatenate(parts(step)) for step in range(3)], SEEDS)
    for step in range(3):
        start = 0
        for rank, size in enumerate(SIZES):
            for name, whole in expected[step].items():
                found = results[rank][0][step][name]
                np.testing.assert_allclose(found, whole[start : start + size], rtol=2e-5, atol=1e-6)
            start += size
    for _, parameters, _ in results:
        for table, slots in cases.to_numpy(alone.retrieve_parameters()).items():
            for slot, values in slots.items():
                np.testing.assert_allclose(parameters[table][slot], values, rtol=2e-5, atol=1e-6)
    # The largest table is on one node, the next on the other, and a node's ranks have its rows as two hosts would.
    whole = range(23)
    halves = [whole[:12], whole[12:]] if strategy == "DIV_DEFAULT" else [whole[::2], whole[1::2]]
    by_rank = [dict(stored) for _, _, stored in results]
    users = [rank for rank in range(4) if "user" in by_rank[rank]]
    assert users in ([0, 1], [2, 3])
    assert [by_rank[rank]["user"] for rank in users] == halves
    assert [rank for rank in range(4) if "item" in by_rank[rank]] == [rank for rank in range(4) if rank not in users]


def state_of_nodes(rank: int, world: int, strategy: str, folder: str) -> Any:
    os.environ.update(LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(rank % 2))
    config = tpuemb.load_config(cases.config_text("adam", strategy))
    by_node, by_rank = (
        tpuemb.shard(
            tpuemb.TPUEmbedding(config, cases.COMBINERS, seed=seed), {"user": kind, "item": "row_wise", "tiny": other}
        )
        for seed, kind, other in ((1, "table_row_wise", "table_wise"), (2, "row_wise", "table_wise"))
    )
    state = by_node.state_dict()
    user = next(value for key, value in state.items() if "user" in key)
    sizes = [tuple(shard.shard_sizes) for shard in user.metadata().shards_metadata]
    fresh = tpuemb.shard(
        tpuemb.TPUEmbedding(config, cases.COMBINERS, seed=9),
        {"user": "table_row_wise", "item": "row_wise", "tiny": "table_wise"},
    )
    fresh.load_state_dict(state)
    refusal = ""
    try:
        by_rank.load_state_dict(state)
    except RuntimeError as error:
        refusal = str(error)
    tpuemb.checkpoint.save(folder, by_node)
    tpuemb.checkpoint.load(folder, by_rank)
    tables = [cases.to_numpy(embedding.retrieve_parameters()) for embedding in (by_node, fresh, by_rank)]
    return tuple(user.size()), sizes, refusal, tables


@pytest.mark.parametrize("strategy", ["DIV_DEFAULT", "MOD"])
def test_state_has_the_stored_rows(strategy: str, tmp_path: Path) -> None:
    for size, sizes, refusal, (saved, loaded, elsewhere) in run_ranks(
        4, state_of_nodes, strategy, str(tmp_path / "saved")
    ):
        assert size == (23, 8)
        assert sizes == [(12, 8), (11, 8)]
        for table, slots in saved.items():
            np.testing.assert_array_equal(loaded[table]["parameters"], slots["parameters"])
            for slot, values in slots.items():
                np.testing.assert_array_equal(elsewhere[table][slot], values)
        if strategy == "MOD":
            # The same number of ranks, but the table's rows are in another order.
            assert (
                "rows ordered for [2, 4, 1] shards of each table; these tables are MOD-sharded over [4, 4, 1]"
                in refusal
            )


def in_a_subgroup(rank: int, world: int, kind: str) -> str:
    os.environ.update(LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(rank % 2))
    group = dist.new_group([0, 1])
    if rank > 1:
        return ""
    with pytest.raises(NotImplementedError) as caught:
        tpuemb.shard(tpuemb.TPUEmbedding(tpuemb.load_config(cases.config_text("sgd"))), kind, process_group=group)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["table_row_wise", "row_wise"])
def test_subgroups_are_refused(kind: str) -> None:
    messages = run_ranks(4, in_a_subgroup, kind)
    assert all("a process group of 2 of the job's 4 ranks" in message for message in messages[:2])
