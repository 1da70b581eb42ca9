"""What the ranks of a table send each other: sums of bags, or distinct rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tpuemb_torch.config import Config
from tpuemb_torch.planning.costs import Topology
from tpuemb_torch.planning.errors import PlanError
from tpuemb_torch.planning.plan import EXCHANGES, TablePlan

#: Ids of a bag, where nothing is known of the batches.  Rows of longer bags cost a few times their sums at most; sums
#: of shorter bags cost, row-wise, as many times the rows as there are nodes.
_UNKNOWN_IDS = 10.0


def exchange_of_tables(config: Config, exchange: str | Mapping[str, str]) -> dict[str, str]:
    """What was asked for, by table name: "auto", "pooled" or "distinct".

    Raises:
        PlanError: for an unknown table or exchange; tables that a mapping leaves out are "auto".
    """
    if not isinstance(exchange, str | Mapping):
        raise PlanError(
            "exchange", f"{exchange!r} is neither one of auto, {', '.join(EXCHANGES)} nor a mapping of them"
        )
    names = [table.name for table in config.tables]
    asked = dict.fromkeys(names, exchange) if isinstance(exchange, str) else dict(exchange)
    for name, value in asked.items():
        where = "exchange" if isinstance(exchange, str) else f"table {name!r}"
        if name not in names:
            raise PlanError("exchange", f"no table {name!r}: the configuration has {', '.join(names)}")
        if value not in ("auto", *EXCHANGES):
            raise PlanError(where, f"exchange {value!r} is not one of auto, {', '.join(EXCHANGES)}")
    return {name: asked.get(name, "auto") for name in names}


def with_exchange(plan: TablePlan, asked: str, topology: Topology, accumulates: bool, known: bool) -> TablePlan:
    """A table's plan with the exchange that was asked for, or under "auto" the one that costs less.

    Args:
        plan: the table and its shards.
        asked: "auto", "pooled" or "distinct".
        topology: the ranks.
        accumulates: whether the table's gradients are summed over ranks before the step.
        known: whether something is known of the batches.
    """
    pooled, distinct = replace(plan, exchange="pooled"), replace(plan, exchange="distinct")
    if asked != "auto":
        return distinct if asked == "distinct" else pooled
    if plan.sharding == "table_row_wise" and not accumulates:
        # TorchRec's does not keep the order of the ranks, in which such gradients are steps.
        return distinct
    if plan.sharding == "column_wise" or topology.world_size == 1:
        return pooled
    table = plan.table if known else replace(plan.table, pooling_factor=_UNKNOWN_IDS)
    distinct_cost, pooled_cost = (topology.seconds(replace(way, table=table)) for way in (distinct, pooled))
    return distinct if distinct_cost <= pooled_cost else pooled
