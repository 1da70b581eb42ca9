"""Rows between ranks: rounds that bound the buffers, and values that are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import tpuemb_torch as tpuemb
from tests.ranks import run_ranks
from tpuemb_torch.sharding import exchange, shard_rows
from tpuemb_torch.sharding.exchange import Block, Piece, move

ROWS, COLUMNS = 57, 6


def numbers(rows: range) -> torch.Tensor:
    return torch.tensor(list(rows))[:, None] * 100.0 + torch.arange(float(COLUMNS))


def div_to_mod(rank: int, world: int, limit: int) -> tuple[int, int]:
    """Moves a table from DIV to MOD shards and from MOD to columns; returns the largest buffers and their number."""
    exchange.BUFFER_BYTES = 4 * limit
    sizes = []
    all_to_all = dist.all_to_all_single

    def recorded(output: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(max(output.numel(), values.numel()))
        return all_to_all(output, values, *args, **kwargs)

    dist.all_to_all_single = recorded
    group = dist.group.WORLD

    def piece(rows: range, columns: range, values: torch.Tensor) -> Piece:
        return Piece(Block("t", rows, columns, ("parameters",)), {"parameters": values})

    div, mod = (shard_rows(ROWS, world, rank, strategy) for strategy in ("div", "mod"))
    every = range(COLUMNS)
    middle = piece(mod, every, torch.full((len(mod), COLUMNS), -1.0))
    move([piece(div, every, numbers(div))], [middle], group)
    assert torch.equal(middle.tensors["parameters"], numbers(mod))
    columns = range(rank * COLUMNS // world, (rank + 1) * COLUMNS // world)
    last = piece(range(ROWS), columns, torch.full((ROWS, len(columns)), -1.0))
    move([middle], [last], group)
    assert torch.equal(last.tensors["parameters"], numbers(range(ROWS))[:, columns.start : columns.stop])
    return max(sizes), len(sizes)


@pytest.mark.parametrize("limit", [7, 40, 10_000])
def test_no_rank_holds_more_than_the_limit(limit: int) -> None:
    results = run_ranks(3, div_to_mod, limit)
    assert max(largest for largest, _ in results) <= max(limit, COLUMNS)  # a row is not cut
    calls = {count for _, count in results}
    assert len(calls) == 1
    assert (calls == {2}) == (limit == 10_000)


def offered_twice(rank: int, world: int) -> list[float]:
    """Every rank offers the same rows: its own go first, then those of the lowest rank."""
    exchange.BUFFER_BYTES = 4 * 2
    group = dist.group.WORLD

    def piece(rows: range, value: float) -> Piece:
        return Piece(Block("t", rows, range(1), ("w",)), {"w": torch.full((len(rows), 1), value)})

    target = piece(range(9), -1.0)
    move([piece(range(rank, 9 - rank), float(rank))], [target], group)
    return target.tensors["w"][:, 0].tolist()


def test_where_several_ranks_offer_a_row() -> None:
    zero, one, two = run_ranks(3, offered_twice)
    assert zero == [0.0] * 9
    assert one == [0.0] + [1.0] * 7 + [0.0]
    assert two == [0.0] * 2 + [2.0] * 5 + [0.0] * 2


def small() -> tpuemb.TPUEmbedding:
    return tpuemb.TPUEmbedding(
        tpuemb.load_config("""
        mode: TRAINING num_hosts: 1 num_tensor_cores: 1 sharding_strategy: MOD
        table_descriptor { name: "t" vocabulary_size: 5 dimension: 2 optimization_parameters {
            learning_rate { constant: 0.5 } adagrad {} } }
        feature_descriptor { name: "f" table_id: 0 input_shape: 2 }""")
    )


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.tensor([[0.0, 1.0], [2.0, float("nan")]]), r"'t', accumulators: row 3, column 1 is nan"),
        (torch.tensor([[0.0, 1.0], [-float("inf"), 0.0]]), r"'t', accumulators: row 3, column 0 is -inf"),
        (np.array([[0.0, 1e39], [0.0, 0.0]]), r"'t', accumulators: row 1, column 1 is inf as float32"),
        (torch.zeros(2, 2, dtype=torch.int32), r"must be float32, got torch.int32"),
        (torch.zeros(2, 3), r"shape \[2, 3\], but shard 1 of 2 \(mod\) is \[2, 2\]"),
    ],
)
def test_a_value_that_is_refused_changes_nothing(value: Any, message: str) -> None:
    embedding = small()
    before = embedding.retrieve_parameters()
    with pytest.raises((ValueError, TypeError), match=message):
        embedding.load_parameters({"t": {"parameters": torch.zeros(2, 2), "accumulators": value}}, 2, 1)
    after = embedding.retrieve_parameters()
    assert all(torch.equal(before["t"][slot], after["t"][slot]) for slot in before["t"])


def test_values_that_are_not_finite_are_loaded_on_request() -> None:
    embedding = small()
    values = torch.tensor([[0.0, float("nan")], [float("inf"), 1.0]])
    embedding.load_parameters({"t": {"parameters": values}}, 2, 1, allow_nonfinite=True)
    assert torch.equal(embedding.retrieve_parameters(None, 2, 1)["t"]["parameters"].isnan(), values.isnan())


def load_and_retrieve(rank: int, world: int, strategy: str, plan: str) -> None:
    """Each rank loads shards of its own, in turn; then every shard is read on every rank."""
    rows = 13
    config = tpuemb.load_config(f"""
        mode: TRAINING num_hosts: 1 num_tensor_cores: 1 sharding_strategy: {strategy}
        table_descriptor {{ name: "t" vocabulary_size: {rows} dimension: {COLUMNS} optimization_parameters {{
            learning_rate {{ constant: 0.5 }} adagrad {{}} }} }}
        feature_descriptor {{ name: "f" table_id: 0 input_shape: 2 }}""")
    embedding = tpuemb.shard(tpuemb.TPUEmbedding(config), plan)
    exchange.BUFFER_BYTES = 4 * 20
    for offset, num_shards in enumerate((1, 2, 4, 13)):
        shards = [
            numbers(shard_rows(rows, num_shards, i, config.sharding_strategy)) + offset for i in range(num_shards)
        ]
        for first in range(0, num_shards, world):
            own = (first + rank) % num_shards
            given = {"parameters": shards[own], "accumulators": shards[own] + 0.5}
            embedding.load_parameters({"t": given}, num_shards, own)
        for shard, expected in enumerate(shards):
            found = embedding.retrieve_parameters(["t"], num_shards, shard)["t"]
            assert torch.equal(found["parameters"], expected)
            assert torch.equal(found["accumulators"], expected + 0.5)


@pytest.mark.parametrize("strategy", ["DIV_DEFAULT", "MOD"])
@pytest.mark.parametrize("plan", ["row_wise", "table_wise", "column_wise"])
def test_shards_under_every_plan(strategy: str, plan: str) -> None:
    run_ranks(3, load_and_retrieve, strategy, plan)
