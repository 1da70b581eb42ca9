"""Work that is spread unevenly over ranks: no samples, no ids, one shard's ids alone, fewer rows than ranks."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import pytest

import tpuemb_torch as tpuemb
from tests.distributed import matrix_cases as cases
from tests.distributed.matrix_cases import TableCase, Work
from tests.ranks import run_ranks

#: Fewer rows than ranks, and columns that some numbers of ranks divide.
TABLES = (
    TableCase("sgd", "sum", 1, 1),
    TableCase("adagrad", "mean", 2, 2),
    TableCase("adam_non_lazy", "sqrtn", 3, 3),
    TableCase("ftrl", "sum", 7, 6),
    TableCase("adagrad", "mean", 10, 1),
    TableCase("momentum", "sum", 5, 4),
    TableCase("adagrad_disabled", "mean", 6, 6),
    TableCase("lion", "sqrtn", 2, 3),
)
KINDS = ("row_wise", "table_wise", "column_wise", "table_row_wise")
NO_SAMPLES = ((7, 1, 0, 3), (0, 0, 2, 5), (0, 0, 0, 0))
SAMPLES = ((3, 2, 4, 1), (2, 2, 2, 2), (1, 3, 1, 2))
NO_IDS = (("none", "all", "all", "none"), ("none",) * 4, ("all", "none", "first", "all"))
ONE_SHARD = (("first",) * 4,) * 3


def works(world: int) -> dict[str, Work]:
    """The work of each case, by its name."""

    def of_ranks(values: Any) -> Any:
        return tuple(value[:world] for value in values)

    samples = of_ranks(SAMPLES)
    return {
        "ranks without samples": Work(TABLES, "MOD", of_ranks(NO_SAMPLES)),
        "ranks without ids": Work(TABLES, "DIV_DEFAULT", samples, of_ranks(NO_IDS)),
        "ids of one shard": Work(TABLES, "MOD", samples, of_ranks(ONE_SHARD)),
        "ranks without a table": Work(TABLES[3:4], "DIV_DEFAULT", samples),
    }


def plan_of(kind: str, tables: tuple[TableCase, ...], world: int) -> dict[str, str]:
    """One kind for all tables that can have it."""
    plan = {}
    for table in tables:
        divides = table.columns % world == 0
        plan[table.name] = kind if divides or kind != "column_wise" else "table_wise"
    return plan


@cache
def expected(world: int, name: str) -> Any:
    return cases.one_process(works(world)[name])


def train(rank: int, world: int, exchange: str) -> dict[tuple[str, str], Any]:
    if world == 4:
        os.environ.update(LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(rank % 2))
    results = {}
    for kind in kinds(world, exchange):
        for name, work in works(world).items():
            try:
                plan = plan_of(kind, work.tables, world)
                exchanges = cases.exchanges(work.tables, plan, exchange)
                embedding = tpuemb.shard(cases.layer(work.tables, work.strategy), plan, exchange=exchanges)
                results[kind, name] = cases.on_rank(embedding, work, rank)
            except Exception as error:
                error.add_note(f"{kind}, {name}")
                raise
    return results


def kinds(world: int, exchange: str) -> list[str]:
    """Those that make a difference: nodes are of two ranks, and columns always exchange sums."""
    left_out = {"table_row_wise": world != 4, "column_wise": exchange == "distinct"}
    return [kind for kind in KINDS if not left_out.get(kind)]


@pytest.mark.parametrize("exchange", ["pooled", "distinct"])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_equals_one_process(world: int, exchange: str) -> None:
    results = run_ranks(world, train, exchange)
    for name, work in works(world).items():
        for kind in kinds(world, exchange):
            by_rank = [result[kind, name] for result in results]
            cases.assert_same(by_rank, expected(world, name), work, f"{kind} on {world} ranks, {exchange}, {name}")
