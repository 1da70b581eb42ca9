"""Whether a plan fits, and if not: what each table needs, what there is, and what would fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from tpuemb_torch.planning.errors import PlanError
from tpuemb_torch.planning.plan import Plan, TablePlan
from tpuemb_torch.planning.sizes import format_bytes

_MOST_TABLES = 20
_MOST_TIMES_THE_RANKS = 8


#: A plan for a number of ranks, with the kinds of sharding that were asked for or (True) any; within a limit, or (None)
#: that whose fullest rank has least.  None if there is none.
Replan: TypeAlias = Callable[[int, bool, int | None], Plan | None]


def does_not_fit(limit: int, world_size: int, local_world_size: int, replan: Replan) -> PlanError:
    """Returns the error for tables that do not fit; its message has the numbers, largest table first.

    Args:
        limit: bytes of each rank.
        world_size: ranks.
        local_world_size: ranks of each node.
        replan: tries something else.
    """
    plan = replan(world_size, False, None)
    assert plan is not None
    fullest = max(plan.usage, key=lambda usage: usage.total_bytes)
    lines = [
        f"the tables do not fit: rank {fullest.rank} of {world_size} needs {_exactly(fullest.total_bytes)} "
        f"(weights {format_bytes(fullest.weight_bytes)}, slots {format_bytes(fullest.slot_bytes)}, buffers of a step "
        f"{format_bytes(fullest.batch_bytes)}), available are {_exactly(limit)}"
    ]
    by_size = sorted(plan.tables, key=lambda planned: (-_stored(planned), planned.table.name))
    lines += [f"  {_needs(planned, world_size, limit)}" for planned in by_size[:_MOST_TABLES]]
    if len(by_size) > _MOST_TABLES:
        rest = by_size[_MOST_TABLES:]
        lines.append(f"  {len(rest)} smaller tables: {_exactly(sum(map(_stored, rest)))} in all")
    ways = [f"{_exactly(fullest.total_bytes)} per rank on these {world_size} ranks"]
    if replan(world_size, True, limit) is not None:
        ways.append(f'sharding "auto" on these {world_size} ranks')
    ranks = _enough_ranks(plan, limit, local_world_size, replan)
    if ranks is not None:
        ways.append(f"{ranks} ranks with {format_bytes(limit)} each, under auto")
    else:
        ways.append("more ranks alone do not help: the buffers of a step grow with them; use a smaller batch as well")
    return PlanError("memory_per_rank", "\n".join([*lines, f"what would fit: {'; '.join(ways)}"]))


def _stored(planned: TablePlan) -> int:
    return planned.table.weight_bytes * (1 + planned.table.num_slots)


def _needs(planned: TablePlan, world_size: int, limit: int) -> str:
    table, shards = planned.table, len(planned.ranks)
    shard = planned.rows(0) * planned.columns * 4 * (1 + table.num_slots)
    where = "one rank" if shards == 1 else f"each of {shards} ranks"
    return (
        f"table {table.name!r}: needs {_exactly(_stored(planned))} (weights {format_bytes(table.weight_bytes)}, slots "
        f"{format_bytes(table.num_slots * table.weight_bytes)}); {planned.sharding} puts {format_bytes(shard)} and "
        f"{format_bytes(planned.batch_bytes(world_size))} of buffers on {where}, available {format_bytes(limit)}"
    )


def _enough_ranks(plan: Plan, limit: int, node: int, replan: Replan) -> int | None:
    """About the smallest number of ranks (whole nodes) on which "auto" fits, or None if none is found."""

    def fits(nodes: int) -> bool:
        return replan(nodes * node, True, limit) is not None

    low = plan.world_size // node
    high = max(low + 1, -(-sum(map(_stored, plan.tables)) // (limit * node)))
    most = _MOST_TIMES_THE_RANKS * high
    while not fits(high):
        low, high = high, 2 * high
        if high > most:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high * node


def _exactly(size: int) -> str:
    return f"{size:,} bytes" if size < 1024 else f"{format_bytes(size)} ({size:,} bytes)"
