"""What cannot be built, in words: the planner never proposes it, and every other plan is checked."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

from tpuemb_torch.config import Config
from tpuemb_torch.planning.errors import PlanError
from tpuemb_torch.planning.plan import Plan, PlannedTable, TablePlan


def refusal(plan: TablePlan, world_size: int, local_world_size: int, accumulates: bool = True) -> str | None:
    """Returns why a table cannot be sharded so, and what to do; None where it can.

    Args:
        plan: the table and its ranks.
        world_size: ranks.
        local_world_size: ranks of each node.
        accumulates: whether its gradients are summed over ranks before the step.
    """
    table, shards = plan.table, len(plan.ranks)
    if plan.sharding == "column_wise" and plan.exchange == "distinct":
        return "column_wise exchanges sums of bags: use exchange pooled, or another sharding"
    if plan.sharding == "column_wise" and table.dimension % shards:
        return f"dimension {table.dimension} does not divide into {shards} equal columns: use row_wise or table_wise"
    if plan.sharding == "row_wise" and list(plan.ranks) != list(range(world_size)):
        return f"row_wise is over all {world_size} ranks in their order, not {list(plan.ranks)}"
    if plan.sharding == "table_wise" and shards != 1:
        return f"table_wise is on one rank, not {list(plan.ranks)}"
    if plan.sharding == "table_row_wise":
        first = plan.ranks[0]
        node = list(range(first, first + local_world_size))
        if first % local_world_size or list(plan.ranks) != node:
            return f"table_row_wise is over the {local_world_size} ranks of one node, not {list(plan.ranks)}"
        if not accumulates and plan.exchange == "pooled":
            return (
                "with gradient_accumulation_status DISABLED each rank's gradients are a step of their own, in the "
                "order of the ranks, which TorchRec's table_row_wise does not keep: use exchange distinct, row_wise "
                "or table_wise"
            )
    outside = [rank for rank in plan.ranks if not 0 <= rank < world_size]
    if outside or len(set(plan.ranks)) != shards:
        return f"ranks {list(plan.ranks)}: give different ones in [0, {world_size})"
    if table.num_slots > 1 and plan.columns == 1 and 1 in _row_counts(plan):
        way = (
            "give it a second row" if table.vocabulary_size == table.dimension == 1 else "use table_wise, or more rows"
        )
        return (
            f"the plan gives a rank one row of dimension 1, and TorchRec takes the {table.num_slots} slots there for "
            f"values of the whole table: {way}"
        )
    return None


def check(plan: Plan, config: Config) -> None:
    """Checks that a plan is for a configuration and can be built.

    Raises:
        PlanError: names the first table that is missing, unknown, of another size, or cannot be sharded so.
    """
    planned = {table.table.name: table for table in plan.tables}
    expected: Mapping[str, PlannedTable] = {table.name: table for table in planned_tables(config)}
    if planned.keys() != expected.keys():
        missing, unknown = sorted(expected.keys() - planned.keys()), sorted(planned.keys() - expected.keys())
        raise PlanError(
            "tables", f"the plan lacks {missing} and has {unknown} that the configuration does not: plan it anew"
        )
    accumulates = {table.name: table.optimizer.accumulates for table in config.tables}
    for name, table in planned.items():
        for field in ("vocabulary_size", "dimension", "num_slots"):
            have, want = getattr(table.table, field), getattr(expected[name], field)
            if have != want:
                raise PlanError(
                    f"tables.{name}", f"{field} is {have} in the plan, {want} in the configuration: plan it anew"
                )
        problem = refusal(table, plan.world_size, plan.local_world_size, accumulates[name])
        if problem:
            raise PlanError(f"table {name!r}", problem)


def planned_tables(
    config: Config,
    pooling_factors: Mapping[str, float] | None = None,
    distinct_ids: Mapping[str, float] | None = None,
) -> list[PlannedTable]:
    """Returns what a planner knows of the tables of a configuration.

    Args:
        config: gives rows, columns, slots, and the bags of one rank's batch (the product of `input_shape`).
        pooling_factors: mean number of ids of a bag by table; 1.0 for those left out.
        distinct_ids: mean number of distinct rows that one rank's batch looks up, by table.

    Raises:
        PlanError: for an unknown table or a number that is not a finite number of at least 0.
        NotImplementedError: for an optimizer without an update rule.
    """
    from math import prod

    from tpuemb_torch.optimizers import create_rule, slots_of  # imports torch

    factors, distinct = dict(pooling_factors or {}), dict(distinct_ids or {})
    bags = dict.fromkeys((table.name for table in config.tables), 0)
    for feature in config.features:
        bags[feature.table.name] += prod(feature.input_shape)
    for argument, numbers in (("pooling_factors", factors), ("distinct_ids", distinct)):
        for name, number in numbers.items():
            if name not in bags:
                raise PlanError(argument, f"no table {name!r}: the configuration has {', '.join(bags)}")
            if not is_count(number):
                raise PlanError(argument, f"table {name!r}: {number!r} is not a finite number of at least 0")
    return [
        PlannedTable(
            table.name,
            table.vocabulary_size,
            table.dimension,
            len(slots_of(table.optimizer)),
            bags[table.name],
            float(factors.get(table.name, 1.0)),
            create_rule(table.optimizer).sweeps_all_rows,
            float(distinct[table.name]) if table.name in distinct else None,
        )
        for table in config.tables
    ]


def is_count(value: object) -> bool:
    """Whether a value is a finite number of at least 0."""
    return not isinstance(value, bool) and isinstance(value, int | float) and isfinite(value) and value >= 0


def _row_counts(plan: TablePlan) -> set[int]:
    return {plan.rows(0), plan.rows(len(plan.ranks) - 1)}
