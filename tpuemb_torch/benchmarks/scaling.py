"""What ranks would send each other in a step, from 8 ranks to thousands: a projection with the communication model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from tpuemb_torch.config import Config, load_config
from tpuemb_torch.planning import Plan, PlanError, make_plan
from tpuemb_torch.planning.projection import Projection, project
from tpuemb_torch.planning.sizes import format_bytes
from tpuemb_torch.planning.traffic import traffic

#: Rows of the 26 tables of Criteo's 1 TB of click logs, at most 40 million each, and ids of a bag in their multi-hot
#: form: MLPerf training's DLRM-DCNv2 (mlcommons/training, recommendation_v2/torchrec_dlrm/README.md).
_ROWS = (
    *(40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10, 2209, 11938, 155, 4, 976),
    *(14, 40000000, 40000000, 40000000, 590152, 12973, 108, 36),
)
_IDS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)


@dataclass(frozen=True)
class Workload:
    """Tables as (rows, columns, shape of a rank's batch of bags, ids of a bag), with Adagrad."""

    title: str
    tables: tuple[tuple[int, int, tuple[int, ...], int], ...]

    @property
    def config(self) -> Config:
        """Its configuration."""
        lines = ["mode: TRAINING num_hosts: 1 num_tensor_cores: 1"]
        for number, (rows, columns, shape, _) in enumerate(self.tables):
            sizes = " ".join(f"input_shape: {size}" for size in shape)
            lines += [
                f'table_descriptor {{ name: "t{number}" vocabulary_size: {rows} dimension: {columns} '
                "optimization_parameters { adagrad {} learning_rate { constant: 0.01 } } }",
                f'feature_descriptor {{ name: "f{number}" table_id: {number} {sizes} }}',
            ]
        return load_config("\n".join(lines))

    @property
    def pooling_factors(self) -> dict[str, float]:
        """Ids of a bag, by table."""
        return {f"t{number}": float(ids) for number, (*_, ids) in enumerate(self.tables)}

    @property
    def distinct_ids(self) -> dict[str, float]:
        """Expected distinct rows of a rank's batch, by table, where ids follow Zipf's law."""
        return {
            f"t{number}": expected_distinct(rows, int(np.prod(shape)) * ids)
            for number, (rows, _, shape, ids) in enumerate(self.tables)
        }


WORKLOADS = {
    "one-hot": Workload(
        "26 tables of Criteo's sizes, dimension 128, 2,048 samples a rank, one id a bag",
        tuple((rows, 128, (2048,), 1) for rows in _ROWS),
    ),
    "multi-hot": Workload(
        "the same tables, 1 to 100 ids a bag (214 a sample)",
        tuple((rows, 128, (2048,), ids) for rows, ids in zip(_ROWS, _IDS, strict=True)),
    ),
    "sequence": Workload(
        "100 million items and as many users, dimension 64, 512 samples a rank with 200 items each, one id a bag",
        ((100_000_000, 64, (512, 200), 1), (100_000_000, 64, (512,), 1)),
    ),
}
#: (sharding, exchange)
WAYS = (
    ("row_wise", "pooled"),
    ("row_wise", "distinct"),
    ("table_row_wise", "pooled"),
    ("table_row_wise", "distinct"),
    ("table_wise", "pooled"),
    ("table_wise", "distinct"),
    ("column_wise", "pooled"),
    ("auto", "auto"),
)


def expected_distinct(rows: int, ids: int) -> float:
    """Expected number of distinct ids among some that follow Zipf's law with exponent 1."""
    # The first ids one by one, then blocks of them, each 0.1 % longer than the one before.
    edges = np.unique(np.geomspace(1, rows + 1, max(2, min(rows + 1, 30_000))).astype(np.int64))
    counts, middles = np.diff(edges), np.sqrt(edges[:-1] * (edges[1:] - 1.0))
    shares = 1 / middles
    shares /= (counts * shares).sum()
    with np.errstate(divide="ignore"):  # one row has all: log(0)
        return float((counts * -np.expm1(ids * np.log1p(-np.minimum(shares, 1)))).sum())


@dataclass(frozen=True)
class Row:
    """One plan: buffers of its fullest rank in bytes (see `RankUsage.batch_bytes`), and what travels."""

    sharding: str
    exchange: str
    ranks: int
    buffers: int
    projection: Projection


def rows_of(workload: Workload, ranks: Sequence[int], per_node: int) -> list[Row]:
    """Returns all plans that there are: column-wise ones only while the dimension divides."""
    config, found = workload.config, []
    for sharding, exchange in WAYS:
        for world in ranks:
            with suppress(PlanError):
                plan = make_plan(
                    *(config, world, min(world, per_node), sharding),
                    pooling_factors=workload.pooling_factors,
                    exchange=exchange,
                    distinct_ids=workload.distinct_ids,
                )
                buffers = max(usage.batch_bytes for usage in plan.usage)
                found.append(Row(sharding, exchange, world, buffers, project(traffic(plan))))
    return found


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """Yields the lines of a Markdown table: milliseconds by plan and ranks."""
    ranks = list(dict.fromkeys(row.ranks for row in rows))
    by_way: dict[tuple[str, str], dict[int, str]] = {}
    for row in rows:
        by_way.setdefault((row.sharding, row.exchange), {})[row.ranks] = _milliseconds(row)
    yield f"| sharding | exchange | {' | '.join(f'{n:,} ranks' for n in ranks)} |"
    yield "|---|---|" + "--:|" * len(ranks)
    for (sharding, exchange), cells in by_way.items():
        yield f"| {sharding} | {exchange} | {' | '.join(cells.get(n, '') for n in ranks)} |"


def details(rows: Sequence[Row]) -> Iterator[str]:
    """Yields the lines of a Markdown table: bytes and messages of each plan that was asked for by name."""
    columns = ("ranks", "in a node", "between, mean", "between, most", "messages", "buffers", "ms", "slowest")
    yield f"| sharding, exchange | {' | '.join(columns)} |"
    yield "|---|--:|--:|--:|--:|--:|--:|--:|---|"
    for row in (row for row in rows if row.sharding != "auto"):
        found = row.projection
        sizes = [format_bytes(round(n)) for n in (found.most_within, found.between, found.most_between)]
        cells = [*sizes, f"{found.messages:,}", format_bytes(row.buffers), _milliseconds(row), found.slowest]
        yield f"| {row.sharding}, {row.exchange} | {row.ranks:,} | {' | '.join(cells)} |"


def of_plan(plan: Plan, weighted: bool) -> Iterator[str]:
    """Yields the lines of a Markdown table: the collectives of a step under a plan."""
    columns = ("handed over", "in a node, most", "between, mean", "between, most", "messages", "ms")
    yield f"| phase | sharding | content | operation | {' | '.join(columns)} |"
    yield "|---|---|---|---|" + "--:|" * len(columns)
    for collective in traffic(plan, weighted=weighted):
        found = project([collective])
        sizes = (float(collective.handed.max()), found.most_within, found.between, found.most_between)
        cells = [*(format_bytes(round(n)) for n in sizes), f"{found.messages:,}", f"{1e3 * found.seconds:.2f}"]
        names = (collective.phase, collective.sharding or "all", collective.content, collective.operation)
        yield f"| {' | '.join((*names, *cells))} |"


def _milliseconds(row: Row) -> str:
    value = 1e3 * row.projection.seconds
    return f"{value:,.{max(0, 2 - len(str(int(value))) + (value < 1))}f}"
