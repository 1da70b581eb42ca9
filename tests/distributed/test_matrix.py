"""Every optimizer, combiner, kind of sharding and exchange on one to four ranks: the numbers of one process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

import tpuemb_torch as tpuemb
from tests.distributed import matrix_cases as cases
from tests.distributed.matrix_cases import TableCase, Work
from tests.ranks import run_ranks

#: Tables of 12 columns, which any number of ranks here divides; few rows, so that every row has several gradients.
TABLES = tuple(
    TableCase(optimizer, combiner, rows, 12)
    for number, optimizer in enumerate(cases.OPTIMIZERS)
    for combiner, rows in zip(cases.COMBINERS, (5 + number, 9, 14), strict=True)
)
SIZES = ((5, 3, 0, 4), (0, 6, 2, 1), (4, 4, 4, 4))
KINDS = ("row_wise", "table_wise", "column_wise", "table_row_wise")


def plan_of(kind: str, world: int) -> dict[str, str]:
    """The kind of each table; "mixed" has all."""
    kinds = KINDS if world == 4 else KINDS[:3]
    return {table.name: kinds[n % len(kinds)] if kind == "mixed" else kind for n, table in enumerate(TABLES)}


@cache
def work(world: int, strategy: str) -> Work:
    return Work(TABLES, strategy, tuple(sizes[:world] for sizes in SIZES))


@cache
def expected(world: int, strategy: str) -> Any:
    return cases.one_process(work(world, strategy))


def train(rank: int, world: int, kind: str, strategy: str, exchange: str) -> Any:
    if world == 4:
        os.environ.update(LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(rank % 2))
    plan = plan_of(kind, world)
    exchanges = cases.exchanges(TABLES, plan, exchange)
    embedding = tpuemb.shard(cases.layer(TABLES, strategy), plan, exchange=exchanges)
    return cases.on_rank(embedding, work(world, strategy), rank)


def all_cases() -> Iterator[Any]:
    """All that make sense.  Two ranks, and one case of every other number of ranks, are quick enough for every run."""
    for world in (1, 2, 3, 4):
        for kind in (*KINDS, "mixed"):
            for strategy in ("DIV_DEFAULT", "MOD"):
                for exchange in ("pooled", "distinct"):
                    by_rows = kind not in ("table_wise", "column_wise")
                    if (
                        (kind == "table_row_wise" and world < 4)
                        or (kind == "column_wise" and exchange == "distinct")
                        or (strategy == "DIV_DEFAULT" and not by_rows)
                    ):
                        continue
                    quick = world == 2 or (kind == "mixed" and strategy == "MOD")
                    yield pytest.param(world, kind, strategy, exchange, marks=[] if quick else [pytest.mark.slow])


@pytest.mark.parametrize(("world", "kind", "strategy", "exchange"), list(all_cases()))
def test_equals_one_process(world: int, kind: str, strategy: str, exchange: str) -> None:
    results = run_ranks(world, train, kind, strategy, exchange)
    what = f"{kind}, {strategy}, {exchange}, {world} ranks"
    cases.assert_same(results, expected(world, strategy), work(world, strategy), what)
