"""Makes plans: each table cut as little as the balance of time and memory allows, largest first.

TorchRec's own planner scores every proposal over every shard of every table: minutes at 100 tables and 64 ranks.  This
one keeps a few numbers for each rank, and its plans depend on nothing but its arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from tpuemb_torch.config import Config
from tpuemb_torch.planning.costs import MACHINES, Machines, seconds
from tpuemb_torch.planning.errors import PlanError
from tpuemb_torch.planning.fit import does_not_fit
from tpuemb_torch.planning.plan import SHARDINGS, Plan, PlannedTable, Sharding, TablePlan
from tpuemb_torch.planning.rules import planned_tables, refusal
from tpuemb_torch.planning.sizes import parse_bytes

#: Columns of a column-wise shard that "auto" makes, at least: narrower rows waste a GPU's memory transactions.
_LEAST_COLUMNS = 32
#: How much of a rank's mean load one shard may be; the best plan of these is taken.  0: as even as it can be.
_SHARES = (inf, 2.0, 1.0, 0.5, 0.2, 0.1, 0.03, 0.0)


def make_plan(
    config: Config,
    world_size: int,
    local_world_size: int | None = None,
    sharding: str | Mapping[str, str] = "auto",
    memory_per_rank: int | str | None = None,
    pooling_factors: Mapping[str, float] | None = None,
    device: str = "cuda",
) -> Plan:
    """Plans a configuration for a number of ranks; needs no process group and no tables.

    Args:
        config: the tables; `input_shape` gives the batch of one rank.
        world_size: number of ranks.
        local_world_size: ranks of each node; default: all are on one.
        sharding: "auto", "row_wise", "table_wise", "column_wise" or "table_row_wise", for all tables or by table name.
        memory_per_rank: limit in bytes, or as text ("80GB"): for weights, slots and the estimated buffers of a step;
            None is no limit.
        pooling_factors: mean number of ids of a bag by table, such as `stats.pooling_factors()`; 1.0 for those left
            out.
        device: "cuda" or "cpu": whose bandwidths the costs are of.

    Returns:
        A plan that `shard` can build; the same for the same arguments.

    Raises:
        PlanError: for a wrong argument, a table that cannot be sharded as asked, or tables that do not fit: the message
            says what each needs, what there is, and what would fit.
    """
    local = world_size if local_world_size is None else local_world_size
    limit = _check(world_size, local, memory_per_rank, device)
    kinds = _kinds(config, sharding)
    tables = planned_tables(config, pooling_factors)
    accumulates = {table.name: table.optimizer.accumulation != "disabled" for table in config.tables}
    topology = Topology(world_size, local, MACHINES[device])
    chosen = _search(_all_options(tables, kinds, accumulates, topology), topology, limit)
    if chosen is None:

        def replan(ranks: int, any_kind: bool, limit: int | None) -> Plan | None:
            nodes = local if ranks % local == 0 else ranks
            other = Topology(ranks, nodes, topology.machines)
            allowed = dict.fromkeys(kinds, "auto") if any_kind else kinds
            try:
                options = _all_options(tables, allowed, accumulates, other)
            except PlanError:
                return None
            found = _least_memory(options, other) if limit is None else _search(options, other, limit)
            return None if found is None else Plan(tuple(found[t.name] for t in tables), ranks, nodes)

        assert limit is not None
        raise does_not_fit(limit, world_size, local, replan)
    return Plan(tuple(chosen[table.name] for table in tables), world_size, local, limit)


@dataclass(frozen=True)
class Topology:
    """The ranks, and what their steps cost."""

    world_size: int
    local_world_size: int
    machines: Machines


@dataclass(frozen=True)
class _Option:
    """One way to shard a table, with its ranks still to be chosen (`plan.ranks` has the right number of them)."""

    plan: TablePlan
    seconds: float
    bytes: int


@dataclass(frozen=True)
class _Placed:
    tables: dict[str, TablePlan]
    score: tuple[float, float]


def _check(world_size: int, local_world_size: int, memory: int | str | None, device: str) -> int | None:
    for name, value in (("world_size", world_size), ("local_world_size", local_world_size)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise PlanError(name, f"{value!r} is not a whole number of at least 1")
    if world_size % local_world_size:
        raise PlanError(
            "local_world_size",
            f"{local_world_size} does not divide world_size {world_size}: nodes have equally many ranks",
        )
    if device not in MACHINES:
        raise PlanError("device", f"{device!r} is not one of {', '.join(MACHINES)}")
    try:
        return None if memory is None else parse_bytes(memory)
    except ValueError as error:
        raise PlanError("memory_per_rank", str(error)) from None


def _kinds(config: Config, sharding: str | Mapping[str, str]) -> dict[str, str]:
    names = [table.name for table in config.tables]
    kinds = dict.fromkeys(names, sharding) if isinstance(sharding, str) else dict(sharding)
    if set(kinds) != set(names):
        raise PlanError("sharding", f"names tables {sorted(kinds)}, the config has {sorted(names)}: give each one kind")
    for name, kind in kinds.items():
        if kind not in ("auto", *SHARDINGS):
            where = "sharding" if isinstance(sharding, str) else f"table {name!r}"
            raise PlanError(where, f"{kind!r} is not one of auto, {', '.join(SHARDINGS)}")
    return kinds


def _options(table: PlannedTable, kind: str, topology: Topology, accumulates: bool) -> list[_Option]:
    """The ways to shard a table, from one rank to all.

    Raises:
        PlanError: if there is none.
    """
    world, local = topology.world_size, topology.local_world_size
    options, problem = [], ""
    for sharding, count in _cuts(table, kind, topology):
        plan = TablePlan(table, sharding, range(count))
        reason = refusal(plan, world, local, accumulates)
        if reason is not None:
            problem = reason
            continue
        cost = seconds(plan, world, local, topology.machines)
        stored = plan.rows(0) * plan.columns * 4 * (1 + table.num_slots)
        options.append(_Option(plan, cost, stored + plan.batch_bytes(world)))
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


def _place(
    options: Mapping[str, Sequence[_Option]], topology: Topology, share: float, limit: int | None
) -> _Placed | None:
    """One plan: each table in the first way of which a shard is at most `share` of a rank's mean load, and fits.

    Tables go largest first, each to the ranks with the least load after it; load is the larger of time and memory, as
    parts of their means.  None if they do not fit.
    """
    world = topology.world_size
    total_seconds = sum(ways[0].seconds * len(ways[0].plan.ranks) for ways in options.values()) or 1.0
    total_bytes = sum(ways[0].bytes * len(ways[0].plan.ranks) for ways in options.values()) or 1
    time_unit, byte_unit = total_seconds / world, total_bytes / world

    def load(option: _Option) -> float:
        return max(option.seconds / time_unit, option.bytes / byte_unit)

    # A rank's own activations are there under every plan.
    own = sum(2 * ways[0].plan.table.bags * ways[0].plan.table.dimension * 4 for ways in options.values())
    times, sizes = np.zeros(world), np.full(world, float(own))
    first_way = {
        name: next((i for i, way in enumerate(ways) if load(way) <= share), len(ways) - 1)
        for name, ways in options.items()
    }
    order = sorted(
        options, key=lambda n: (-len(options[n][first_way[n]].plan.ranks), -load(options[n][first_way[n]]), n)
    )
    tables: dict[str, TablePlan] = {}
    for name in order:
        for option in options[name][first_way[name] :]:
            loads = np.maximum((times + option.seconds) / time_unit, (sizes + option.bytes) / byte_unit)
            if limit is not None:
                loads[sizes + option.bytes > limit] = inf
            ranks = _least_loaded(option.plan, loads, topology.local_world_size)
            chosen = slice(ranks.start, ranks.stop) if isinstance(ranks, range) else list(ranks)
            if not np.isinf(loads[chosen]).any():
                times[chosen] += option.seconds
                sizes[chosen] += option.bytes
                tables[name] = TablePlan(option.plan.table, option.plan.sharding, ranks)
                break
        else:
            return None
    return _Placed(tables, (float(times.max()), float(sizes.max())))


def _least_loaded(plan: TablePlan, loads: np.ndarray, local: int) -> Sequence[int]:
    if plan.sharding == "row_wise":
        return range(len(loads))
    if plan.sharding == "table_row_wise":
        first = int(loads.reshape(-1, local).max(axis=1).argmin()) * local
        return range(first, first + local)
    if plan.sharding == "table_wise":
        return range(rank := int(loads.argmin()), rank + 1)
    return tuple(sorted(np.argsort(loads, kind="stable")[: len(plan.ranks)].tolist()))


def _search(
    options: Mapping[str, Sequence[_Option]], topology: Topology, limit: int | None
) -> dict[str, TablePlan] | None:
    """The best plan within a limit, or None."""
    found = [placed for share in _SHARES if (placed := _place(options, topology, share, limit)) is not None]
    return min(found, key=lambda placed: placed.score).tables if found else None


def _least_memory(options: Mapping[str, Sequence[_Option]], topology: Topology) -> dict[str, TablePlan]:
    """The plan whose fullest rank has about the least that the search finds."""

    def smallest(limit: int | None) -> _Placed | None:
        found = [placed for share in _SHARES if (placed := _place(options, topology, share, limit)) is not None]
        return min(found, key=lambda placed: placed.score[1], default=None)

    best = smallest(None)
    assert best is not None
    impossible = 0.0
    while best.score[1] - impossible > 0.01 * best.score[1]:
        middle = (best.score[1] + impossible) / 2
        placed = smallest(int(middle))
        if placed is None:
            impossible = middle
        else:
            best = placed
    return best.tables


def _all_options(
    tables: Sequence[PlannedTable], kinds: Mapping[str, str], accumulates: Mapping[str, bool], topology: Topology
) -> dict[str, list[_Option]]:
    return {t.name: _options(t, kinds[t.name], topology, accumulates[t.name]) for t in tables}
