"""The same seed, plan and batches give the same bits; initial values depend on seed, table, row and column alone."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

import tpuemb_torch as tpuemb
from tests.distributed import matrix_cases as cases
from tests.distributed.matrix_cases import TableCase, Work
from tests.ranks import run_ranks

TABLES = (
    TableCase("adagrad", "mean", 40, 12),
    TableCase("adam_non_lazy", "sqrtn", 30, 12),
    TableCase("ftrl", "sum", 20, 12),
    TableCase("adagrad_disabled", "sum", 10, 12),
)
#: Every row has gradients of many samples, of all ranks.
WORK = Work(TABLES, "MOD", ((64, 50), (0, 80), (31, 64)))
KINDS = ("row_wise", "table_wise", "column_wise", "table_row_wise")
SHARDINGS = [(kind, exchange) for kind in KINDS for exchange in ("pooled", "distinct") if kind != "column_wise"]
SHARDINGS.append(("column_wise", "pooled"))


def shard(embedding: tpuemb.TPUEmbedding, kind: str, exchange: str, rank: int, world: int) -> tpuemb.TPUEmbedding:
    if world == 4:
        os.environ.update(LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(rank % 2))
    plan = dict.fromkeys((table.name for table in TABLES), kind)
    return tpuemb.shard(embedding, plan, exchange=cases.exchanges(TABLES, plan, exchange))


def train(rank: int, world: int, kernel: str) -> list[Any]:
    torch.set_num_threads(2)
    results = []
    for kind, exchange in SHARDINGS:
        embedding = cases.layer(TABLES, WORK.strategy, kernel=kernel)
        results.append(cases.on_rank(shard(embedding, kind, exchange, rank, world), WORK, rank))
    return results


@pytest.mark.parametrize("kernel", [pytest.param("eager", marks=pytest.mark.slow), "compiled"])
def test_two_runs_are_equal_to_the_last_bit(kernel: str) -> None:
    first, second = (run_ranks(2, train, kernel) for _ in range(2))
    for rank in range(2):
        for sharding, (seen, tables), (seen_again, tables_again) in zip(
            SHARDINGS, first[rank], second[rank], strict=True
        ):
            for step in range(cases.STEPS):
                for a, b in zip(seen[step], seen_again[step], strict=True):
                    np.testing.assert_array_equal(a, b, err_msg=f"{sharding}, rank {rank}, step {step}")
            for table, slots in tables.items():
                for slot, values in slots.items():
                    np.testing.assert_array_equal(
                        values, tables_again[table][slot], err_msg=f"{sharding}, {table} {slot}"
                    )
                    np.testing.assert_array_equal(values, first[0][SHARDINGS.index(sharding)][1][table][slot])


def initial_values(rank: int, world: int) -> list[cases.Values]:
    return [
        cases.to_numpy(
            shard(cases.layer(TABLES, WORK.strategy, device=device), kind, exchange, rank, world).retrieve_parameters()
        )
        for device in ("cpu", "meta")
        for kind, exchange in SHARDINGS
        if world == 4 or kind != "table_row_wise"
    ]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_initial_values_do_not_depend_on_ranks_or_plan(world: int) -> None:
    expected = cases.to_numpy(cases.layer(TABLES, "DIV_DEFAULT").retrieve_parameters())
    for by_sharding in run_ranks(world, initial_values):
        for found in by_sharding:
            assert found.keys() == expected.keys()
            for table, slots in expected.items():
                for slot, values in slots.items():
                    np.testing.assert_array_equal(found[table][slot], values, err_msg=f"{table} {slot}")


def test_initial_values_depend_on_seed_and_table_alone() -> None:
    values = cases.to_numpy(cases.layer(TABLES, "MOD").retrieve_parameters())
    others = cases.to_numpy(cases.layer(TABLES[::-1][:3], "MOD").retrieve_parameters())
    for table, slots in others.items():  # in another order, without one of the tables
        np.testing.assert_array_equal(slots["parameters"], values[table]["parameters"])
    another_seed = cases.to_numpy(cases.layer(TABLES, "MOD", seed=6).retrieve_parameters())
    drawn = [v[table.name]["parameters"][:10].tobytes() for v in (values, another_seed) for table in TABLES]
    assert len(set(drawn)) == len(drawn)
