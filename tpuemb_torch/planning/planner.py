"""Makes plans on paper."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tpuemb_torch.config import Config, load_config
from tpuemb_torch.planning.costs import MACHINES, Topology
from tpuemb_torch.planning.errors import PlanError
from tpuemb_torch.planning.exchange import exchange_of_tables
from tpuemb_torch.planning.fit import does_not_fit
from tpuemb_torch.planning.options import options_of
from tpuemb_torch.planning.plan import SHARDINGS, Plan, TablePlan
from tpuemb_torch.planning.rules import planned_tables
from tpuemb_torch.planning.sizes import parse_bytes


def make_plan(
    config: Config | Any,
    world_size: int,
    local_world_size: int | None = None,
    sharding: str | Mapping[str, str] = "auto",
    memory_per_rank: int | str | None = None,
    pooling_factors: Mapping[str, float] | None = None,
    device: str = "cuda",
    *,
    exchange: str | Mapping[str, str] = "auto",
    distinct_ids: Mapping[str, float] | None = None,
) -> Plan:
    """Plans a configuration for a number of ranks; needs no process group and no tables.

    Args:
        config: a `Config`, or anything `load_config` takes; `input_shape` gives the batch of one rank.
        world_size: number of ranks.
        local_world_size: ranks of each node; default: all are on one.
        sharding: "auto", "row_wise", "table_wise", "column_wise" or "table_row_wise", for all tables or by table name.
        memory_per_rank: limit in bytes, or as text ("80GB"): for weights, slots and the estimated buffers of a step;
            None is no limit.
        pooling_factors: mean number of ids of a bag by table, such as `stats.pooling_factors()`; 1.0 for those left
            out.
        device: "cuda" or "cpu": whose bandwidths the costs are of.
        exchange: what ranks send each other, for all tables or by table name: "pooled" (sums of bags), "distinct" (each
            row that a rank's batch needs, once), or "auto" (what costs less; also for tables left out).
            Where nothing is said of a table's batches, its bags are taken to have 10 ids for this.
        distinct_ids: mean number of distinct rows that one rank's batch looks up, by table, such as
            `stats.mean_distinct_ids()`; where it is not given, no id is taken to occur twice.

    Returns:
        A plan that `shard` can build; the same for the same arguments.

    Raises:
        PlanError: for a wrong argument, a table that cannot be sharded as asked, or tables that do not fit: the message
            says what each needs, what there is, and what would fit.
    """
    from tpuemb_torch.planning.placing import FEW_SHARES, least_memory, search  # imports numpy

    config = config if isinstance(config, Config) else load_config(config)
    local = world_size if local_world_size is None else local_world_size
    limit = _check(world_size, local, memory_per_rank, device)
    kinds = _kinds(config, sharding)
    exchanges = exchange_of_tables(config, exchange)
    tables = planned_tables(config, pooling_factors, distinct_ids)
    known = {*(pooling_factors or {}), *(distinct_ids or {})}
    accumulates = {table.name: table.optimizer.accumulates for table in config.tables}
    topology = Topology(world_size, local, MACHINES[device])

    def plan_of(chosen: Mapping[str, TablePlan], like: Topology) -> Plan:
        return Plan(tuple(chosen[t.name] for t in tables), like.world_size, like.local_world_size, limit)

    options = options_of(tables, kinds, exchanges, accumulates, known, topology)
    chosen = search(options, topology, limit)
    if chosen is not None:
        return plan_of(chosen, topology)
    assert limit is not None
    least = plan_of(least_memory(options, topology), topology)
    if least.largest_bytes <= limit:
        return least

    def fits(ranks: int) -> bool:
        other = Topology(ranks, local if ranks % local == 0 else ranks, topology.machines)
        auto = dict.fromkeys(kinds, "auto")
        anyhow = options_of(tables, auto, auto, accumulates, known, other)
        return search(anyhow, other, limit, FEW_SHARES) is not None

    raise does_not_fit(least, limit, fits)


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
