"""The ways to cut a table, from one rank to all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from tpuemb_torch.planning.costs import Topology
from tpuemb_torch.planning.errors import PlanError
from tpuemb_torch.planning.exchange import with_exchange
from tpuemb_torch.planning.plan import FLOAT32_BYTES, PlannedTable, Sharding, TablePlan
from tpuemb_torch.planning.rules import refusal

#: Columns of a column-wise shard that "auto" makes, at least: narrower rows waste a GPU's memory transactions.
_LEAST_COLUMNS = 32


@dataclass(frozen=True)
class Option:
    """One way to shard a table, with its ranks still to be chosen (`plan.ranks` has the right number of them)."""

    plan: TablePlan
    seconds: float
    bytes: int


def options_of(
    tables: Sequence[PlannedTable],
    kinds: Mapping[str, str],
    exchanges: Mapping[str, str],
    accumulates: Mapping[str, bool],
    known: AbstractSet[str],
    topology: Topology,
) -> dict[str, list[Option]]:
    """Returns the ways to shard each table.

    Args:
        tables: all tables.
        kinds: what was asked for, or "auto", by table name.
        exchanges: what was asked for, or "auto", by table name.
        accumulates: whether gradients are summed over ranks, by table name.
        known: tables of whose batches something is known.
        topology: the ranks.

    Raises:
        PlanError: for a table that cannot be sharded as asked.
    """
    return {
        t.name: _options(t, kinds[t.name], exchanges[t.name], topology, accumulates[t.name], t.name in known)
        for t in tables
    }


def _options(
    table: PlannedTable, kind: str, exchange: str, topology: Topology, accumulates: bool, known: bool
) -> list[Option]:
    """The ways to shard a table, from one rank to all.

    Raises:
        PlanError: if there is none.
    """
    world, local = topology.world_size, topology.local_world_size
    options, problem = [], ""
    for sharding, count in _cuts(table, kind, topology):
        plan = with_exchange(TablePlan(table, sharding, range(count)), exchange, topology, accumulates, known)
        reason = refusal(plan, world, local, accumulates)
        if reason is not None:
            problem = reason
            continue
        stored = plan.rows(0) * plan.columns * FLOAT32_BYTES * (1 + table.num_slots)
        options.append(Option(plan, topology.seconds(plan), stored + plan.batch_bytes(world)))
    if not options:
        raise PlanError(f"table {table.name!r}", problem)
    return options


def _cuts(table: PlannedTable, kind: str, topology: Topology) -> Iterator[tuple[Sharding, int]]:
    world, local = topology.world_size, topology.local_world_size
    if kind in ("auto", "table_wise"):
        yield "table_wise", 1
    if kind == "auto":
        count = 2
        while count <= world and table.dimension % count == 0 and table.dimension // count >= _LEAST_COLUMNS:
            yield "column_wise", count
            count *= 2
    if kind == "column_wise":
        yield "column_wise", world
    if kind == "table_row_wise" or (kind == "auto" and 1 < local < world):
        yield "table_row_wise", local
    if kind == "row_wise" or (kind == "auto" and world > 1):
        yield "row_wise", world
