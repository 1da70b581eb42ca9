"""The bytes and messages of a step, for every rank and phase, from a plan."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from tpuemb_torch.planning.collectives import PHASES, Array, Backend, Collective, Wire, all_to_all, around_ring
from tpuemb_torch.planning.plan import SHARDINGS, Plan, TablePlan
from tpuemb_torch.planning.requests import COUNT_BYTES, LARGEST_INT32, id_bytes_of, request, wanted


def traffic(
    plan: Plan,
    *,
    weighted: bool = False,
    ids: Mapping[str, ArrayLike] | None = None,
    distinct: Mapping[str, ArrayLike] | None = None,
    kernel_groups: Mapping[str, Hashable] | None = None,
    learning_rates: int = 0,
    step_protocol: bool = False,
    backend: Backend = "nccl",
) -> tuple[Collective, ...]:
    """Returns the collectives of a training step, by phase.

    Every rank has the plan's bags, or fewer: batches are padded to the longest of all ranks and features.

    Args:
        plan: from `make_plan` or `read_plan`.
        weighted: whether a gain travels with each id: if any rank has weights, or any combiner is not "sum".
        ids: of pooled tables, by name: ids of a rank's batch, which hit all rows alike; or those of each rank for each
            shard of rows, `[ranks, shards]` (`[ranks, 1]` where rows are not cut).  Default: bags by pooling factor.
        distinct: the same for the distinct rows of a rank's batch, of tables of the distinct exchange.  Default:
            `PlannedTable.distinct`.
        kernel_groups: by table, what its tables in one kernel group have in common (optimizer with its options, and
            dimension); default: number of slots and dimension.
        learning_rates: number of dynamic learning rates, which ranks compare.
        step_protocol: whether `TPUEmbedding` takes the step, which agrees on what is enqueued and sent, too.
        backend: whose algorithms.
    """
    world, local = plan.world_size, plan.local_world_size
    # int64: size of the batch, error, weights, end; whether rates are set, and those of now and of the last step.
    agreed = {"batch": 8 * (4 + 2 + 4 * learning_rates)}
    if step_protocol:
        # float64: an error, and each rate twice.
        agreed = {"enqueue": agreed["batch"], **agreed, "step": 8 * (1 + 2 * learning_rates)}
    found = [
        around_ring("agreement", "", content, "all_reduce", np.full(world, float(size)), world, local, backend)
        for content, size in agreed.items()
    ]
    if world == 1:
        return tuple(found)
    pooled_id = max((id_bytes_of(table) for table in plan.tables), default=4)
    for sharding in SHARDINGS:
        tables = [table for table in plan.tables if table.sharding == sharding]
        by_sums = [table for table in tables if table.exchange == "pooled"]
        if by_sums:
            numbers = [_spread(table, (ids or {}).get(table.table.name), world) for table in by_sums]
            found += _pooled(plan, by_sums, numbers, weighted, pooled_id, backend)
        by_rows = [table for table in tables if table.exchange == "distinct"]
        if by_rows:
            numbers = [_spread(table, (distinct or {}).get(table.table.name), world) for table in by_rows]
            labels = [(kernel_groups or {}).get(t.table.name, (t.table.num_slots, t.columns)) for t in by_rows]
            found += _distinct(plan, by_rows, numbers, labels)
    return tuple(sorted(found, key=lambda collective: PHASES.index(collective.phase)))


def _pooled(
    plan: Plan, tables: Sequence[TablePlan], numbers: Sequence[Array], weighted: bool, id_bytes: int, backend: Backend
) -> list[Collective]:
    """TorchRec's exchange of the tables of one kind of sharding."""
    world, local, sharding = plan.world_size, plan.local_world_size, tables[0].sharding
    asked = [request(table, number, weighted, id_bytes) for table, number in zip(tables, numbers, strict=True)]
    # For each destination: the numbers of lengths, ids (and gains) to come, and the batch's size.
    splits = np.full((1, world), 8.0 * (4 if weighted else 3))
    found = [
        all_to_all("input dist", sharding, "splits", splits, local),
        all_to_all("input dist", sharding, "lengths", _to_holders(tables, [r.lengths for r in asked], world), local),
        all_to_all("input dist", sharding, "ids", _to_holders(tables, [r.ids for r in asked], world), local),
    ]
    if weighted:
        gains = _to_holders(tables, [r.gains for r in asked], world)
        found.append(all_to_all("input dist", sharding, "gains", gains, local))
    sums = _to_holders(tables, [r.rows for r in asked], world)
    if sharding == "row_wise":
        return found + _sums_of_group(plan, sharding, sums[0] * world, world, backend)
    if sharding == "table_row_wise":
        return found + _sums_by_nodes(plan, sums[0, ::local], backend)
    return [
        *found,
        all_to_all("output dist", sharding, "sums", sums.T, local),
        all_to_all("backward", sharding, "gradients", sums, local),
    ]


def _sums_of_group(plan: Plan, sharding: str, handed: Array, size: int, backend: Backend) -> list[Collective]:
    """Partial sums, added among groups of `size` ranks; the way back, each sum's gradient to all of the group."""
    local = plan.local_world_size
    back = handed / size
    return [
        around_ring("output dist", sharding, "sums", "reduce_scatter", handed, size, local, backend),
        around_ring("backward", sharding, "gradients", "all_gather", back, size, local, backend),
    ]


def _sums_by_nodes(plan: Plan, of_node: Array, backend: Backend) -> list[Collective]:
    """Partial sums, added in each node, then sent to ranks of the same number in the other nodes.

    Args:
        plan: the ranks.
        of_node: `[nodes]`, bytes of sums that a rank gets from a node's tables.
        backend: whose algorithms.
    """
    world, local = plan.world_size, plan.local_world_size
    nodes = world // local
    mine, total = np.repeat(of_node, local), float(of_node.sum())
    found = _sums_of_group(plan, "table_row_wise", mine * world, local, backend) if local > 1 else []
    if nodes > 1:
        nothing = np.zeros(world)
        has = (mine > 0).astype(float)
        some, others = (nodes - 1) * has, float(np.count_nonzero(of_node)) - has
        out, back = (nodes - 1) * mine, total - mine
        found += [
            Collective(
                *("output dist", "table_row_wise", "sums between nodes", "all_to_all", nodes * mine),
                Wire(nothing, out, nothing, back, nothing, some),
            ),
            Collective(
                *("backward", "table_row_wise", "gradients between nodes", "all_to_all", np.full(world, total)),
                Wire(nothing, back, nothing, out, nothing, others),
            ),
        ]
    return found


def _distinct(
    plan: Plan, tables: Sequence[TablePlan], numbers: Sequence[Array], labels: Sequence[Hashable]
) -> list[Collective]:
    """The distinct exchange of the tables of one kind of sharding."""
    world, local, sharding = plan.world_size, plan.local_world_size, tables[0].sharding
    rows_of: dict[Hashable, Array] = {}  # of each kernel group, by rank
    has: dict[Hashable, Array] = {}
    for table, label in zip(tables, labels, strict=True):
        ranks = list(table.ranks)
        rows_of.setdefault(label, np.zeros(world))[ranks] += [table.rows(shard) for shard in range(len(ranks))]
        has.setdefault(label, np.zeros(world))[ranks] = 1
    id_bytes = 4 if max(rows.max() for rows in rows_of.values()) <= LARGEST_INT32 else 8
    counts = COUNT_BYTES * np.sum(list(has.values()), axis=0)[None]
    asked = [request(table, number, False, id_bytes) for table, number in zip(tables, numbers, strict=True)]
    rows = _to_holders(tables, [r.rows for r in asked], world)
    return [
        all_to_all("input dist", sharding, "counts", counts, local),
        all_to_all("input dist", sharding, "ids", _to_holders(tables, [r.ids for r in asked], world), local),
        all_to_all("output dist", sharding, "rows", rows.T, local),
        all_to_all("backward", sharding, "gradients", rows, local),
    ]


def _spread(plan: TablePlan, number: ArrayLike | None, world: int) -> Array:
    """Numbers of ids or rows that each rank wants of each shard, `[1 or ranks, shards]`."""
    shards = len(plan.ranks)
    array = np.asarray(wanted(plan) if number is None else number, dtype=float)
    if array.ndim == 0:
        if not plan.by_rows:
            return np.full((1, shards), float(array))
        rows = np.array([plan.rows(shard) for shard in (0, shards - 1)], dtype=float)
        longer = plan.table.vocabulary_size % shards
        shares = np.where(np.arange(shards) < longer, *rows) if longer else np.full(shards, rows[0])
        return (float(array) * shares / plan.table.vocabulary_size)[None]
    expected = (world, shards if plan.by_rows else 1)
    if array.shape != expected:
        raise ValueError(
            f"table {plan.table.name!r}: numbers of shape {list(array.shape)}; give one, or {list(expected)}"
        )
    return np.broadcast_to(array, (world, shards))


def _to_holders(tables: Sequence[TablePlan], values: Sequence[ArrayLike], world: int) -> Array:
    """Bytes from each rank to each, `[1 or ranks, ranks]`: 1 where all ranks send alike."""
    arrays = [np.atleast_2d(np.asarray(value, dtype=float)) for value in values]
    total = np.zeros((max(len(array) for array in arrays), world))
    for table, array in zip(tables, arrays, strict=True):
        total[:, list(table.ranks)] += array
    return total
