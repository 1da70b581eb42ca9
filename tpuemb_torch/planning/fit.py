"""Whether a plan fits, and if not: what each table needs, what there is, and what would fit."""

from __future__ import annotations

from collections.abc import Callable

from tpuemb_torch.planning.errors import PlanError
from tpuemb_torch.planning.plan import Plan, TablePlan
from tpuemb_torch.planning.sizes import format_bytes

_MOST_TABLES = 20
_MOST_TIMES_THE_RANKS = 8
#: Jobs are not larger; a limit of a few bytes would have plans made for millions.
_MOST_RANKS = 1 << 14


def does_not_fit(plan: Plan, limit: int, fits: Callable[[int], bool]) -> PlanError:
    """Returns the error for tables that do not fit; its message has the numbers, largest table first.

    Args:
        plan: the one whose fullest rank has least.
        limit: bytes of each rank.
        fits: whether a number of ranks is enough, with any kind of sharding.
    """
    world_size = plan.world_size
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
    if fits(world_size):
        ways.append(f'sharding "auto" on these {world_size} ranks')
    ranks = _enough_ranks(plan, limit, fits)
    if ranks is not None:
        ways.append(f"{ranks} ranks with {format_bytes(limit)} each, under auto")
    else:
        ways.append(
            f"up to {_MOST_RANKS:,} ranks alone do not help: tables are too large for so little memory, or the buffers "
            "of a step, which grow with the ranks, are; use a smaller batch as well"
        )
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


def _enough_ranks(plan: Plan, limit: int, fits: Callable[[int], bool]) -> int | None:
    """About the smallest number of ranks (whole nodes) that is enough, or None if none is found."""
    node = plan.local_world_size
    low = plan.world_size // node
    high = max(low + 1, -(-sum(map(_stored, plan.tables)) // (limit * node)))
    most = _MOST_TIMES_THE_RANKS * high
    if high * node > _MOST_RANKS:
        return None
    while not fits(high * node):
        low, high = high, 2 * high
        if high > most or high * node > _MOST_RANKS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle * node) else (middle, high)
    return high * node


def _exactly(size: int) -> str:
    return f"{size:,} bytes" if size < 1024 else f"{format_bytes(size)} ({size:,} bytes)"
