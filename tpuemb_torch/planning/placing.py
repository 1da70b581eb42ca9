"""Places shards on ranks: each table cut as little as the balance of time and memory allows, largest first.

TorchRec's own planner scores every proposal over every shard of every table: minutes at 100 tables and 64 ranks.  This
one keeps two numbers for each rank, and its plans depend on nothing but its arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from tpuemb_torch.planning.costs import Topology
from tpuemb_torch.planning.options import Option
from tpuemb_torch.planning.plan import TablePlan

#: How much of a rank's mean load one shard may be; the best plan of these is taken.  0: as even as it can be.
SHARES = (inf, 2.0, 1.0, 0.5, 0.2, 0.1, 0.03, 0.0)
#: Some of them, where many plans are tried to say what would fit.
FEW_SHARES = (1.0, 0.2, 0.0)


@dataclass(frozen=True)
class _Placed:
    """A plan, and the seconds of its slowest and the bytes of its fullest rank."""

    tables: dict[str, TablePlan]
    score: tuple[float, float]


def search(
    options: Mapping[str, Sequence[Option]], topology: Topology, limit: int | None, shares: Sequence[float] = SHARES
) -> dict[str, TablePlan] | None:
    """The best plan within a limit, or None."""
    found = [placed for share in shares if (placed := _place(options, topology, share, limit)) is not None]
    return min(found, key=lambda placed: placed.score).tables if found else None


def least_memory(options: Mapping[str, Sequence[Option]], topology: Topology) -> dict[str, TablePlan]:
    """The plan whose fullest rank has about the least that the search finds."""

    def smallest(limit: int | None) -> _Placed | None:
        found = [placed for share in FEW_SHARES if (placed := _place(options, topology, share, limit)) is not None]
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


def _place(
    options: Mapping[str, Sequence[Option]], topology: Topology, share: float, limit: int | None
) -> _Placed | None:
    """One plan: each table in the first way of which a shard is at most `share` of a rank's mean load, and fits.

    Tables go largest first, each to the ranks with the least load after it; load is the larger of time and memory, as
    parts of their means.  None if they do not fit.
    """
    world = topology.world_size
    total_seconds = sum(ways[0].seconds * len(ways[0].plan.ranks) for ways in options.values()) or 1.0
    total_bytes = sum(ways[0].bytes * len(ways[0].plan.ranks) for ways in options.values()) or 1
    time_unit, byte_unit = total_seconds / world, total_bytes / world

    def load(option: Option) -> float:
        return max(option.seconds / time_unit, option.bytes / byte_unit)

    # What every rank has, whichever holds the tables.
    own = sum(ways[0].plan.own_bytes for ways in options.values())
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
                tables[name] = replace(option.plan, ranks=ranks)
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
