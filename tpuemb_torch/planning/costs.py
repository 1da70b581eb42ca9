"""What a shard costs each rank in a step: bytes of the kernel and of the exchange, over bandwidths.

Numbers are for comparing plans, not predictions.  Bandwidths are those of TorchRec's planner
(torchrec/distributed/planner/constants.py: HBM_MEM_BW, DDR_MEM_BW, INTRA_NODE_BANDWIDTH, CROSS_NODE_BANDWIDTH).
"""

from __future__ import annotations

from dataclasses import dataclass

from tpuemb_torch.planning.plan import TablePlan

_GIB = 2**30
_FLOAT32_BYTES = 4
_BYTES_OF_ID_AND_GAIN = 12


@dataclass(frozen=True)
class Machines:
    """Bandwidths in bytes per second, of each rank: to its memory, within its node, and to other nodes."""

    memory: float
    within_node: float
    between_nodes: float


MACHINES = {
    "cuda": Machines(897 * _GIB, 600 * _GIB, 12.5 * _GIB),
    # Ranks of one machine speak through its memory.
    "cpu": Machines(51 * _GIB, 51 * _GIB, 12.5 * _GIB),
}


def seconds(plan: TablePlan, world_size: int, local_world_size: int, machines: Machines) -> float:
    """Estimated seconds of a step on each rank that has a shard.

    The kernel reads the looked-up rows and their gradients, then reads and writes the distinct rows' weights and slots
    (all rows where the optimizer sweeps them).  Ids arrive; sums of bags leave, their gradients come back.  In table-
    row-wise, sums are first added within the node, so that only a share of them travels between nodes.
    """
    table, shards = plan.table, len(plan.ranks)
    bags = world_size * table.bags
    ids = bags * table.pooling_factor / (shards if plan.by_rows else 1)
    row_bytes = plan.columns * _FLOAT32_BYTES
    rows = plan.rows(0)
    stepped = rows if table.sweeps_all_rows else min(ids, rows)
    kernel = row_bytes * (2 * ids + 2 * stepped * (1 + table.num_slots))
    received = ids * _BYTES_OF_ID_AND_GAIN
    sums = 2 * bags * row_bytes
    elsewhere = (world_size - local_world_size) / world_size
    beside = (local_world_size - 1) / world_size
    between, within = (received + sums) * elsewhere, (received + sums) * beside
    if plan.sharding == "table_row_wise":
        between = (received + sums / shards) * elsewhere
        within = received * beside + sums * (shards - 1) / shards
    return kernel / machines.memory + between / machines.between_nodes + within / machines.within_node
