"""What a shard costs each rank in a step: bytes of the kernel and of the exchange, over bandwidths.

Numbers are for comparing plans, not predictions.  Bandwidths are those of TorchRec's planner
(torchrec/distributed/planner/constants.py: HBM_MEM_BW, DDR_MEM_BW, INTRA_NODE_BANDWIDTH, CROSS_NODE_BANDWIDTH).
"""

from __future__ import annotations

from dataclasses import dataclass

from tpuemb_torch.planning.plan import FLOAT32_BYTES, TablePlan
from tpuemb_torch.planning.requests import id_bytes_of, request, wanted

_GIB = 2**30


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


@dataclass(frozen=True)
class Topology:
    """The ranks, and what their steps cost."""

    world_size: int
    local_world_size: int
    machines: Machines

    def seconds(self, plan: TablePlan) -> float:
        """Estimated seconds of a step on each rank that has a shard of the table."""
        return seconds(plan, self.world_size, self.local_world_size, self.machines)


def seconds(plan: TablePlan, world_size: int, local_world_size: int, machines: Machines) -> float:
    """Estimated seconds of a step on each rank that has a shard.

    The kernel reads the looked-up rows and their gradients, then reads and writes the distinct rows' weights and slots
    (all rows where the optimizer sweeps them).  What is exchanged is that of `planning.requests`, with a gain for each
    id, sent as in `planning.traffic`: in row-wise and table-row-wise, sums are added on their way.
    """
    table, shards = plan.table, len(plan.ranks)
    wanted_of_shard = wanted(plan) / (shards if plan.by_rows else 1)
    rows, looked_up = plan.rows(0), world_size * wanted_of_shard
    stepped = rows if table.sweeps_all_rows else min(looked_up, rows)
    row_bytes = plan.columns * FLOAT32_BYTES
    kernel = row_bytes * (2 * looked_up + 2 * stepped * (1 + table.num_slots))
    asked = request(plan, wanted_of_shard, weighted=True, id_bytes=id_bytes_of(plan))
    elsewhere, beside = world_size - local_world_size, local_world_size - 1
    between, within = asked.to_holder * elsewhere, asked.to_holder * beside
    back_and_forth = 2 * asked.rows
    if plan.exchange == "pooled" and plan.sharding == "row_wise":
        around = back_and_forth * (world_size - 1)
        share = 1 / local_world_size if elsewhere else 0
        between, within = between + around * share, within + around * (1 - share)
    elif plan.exchange == "pooled" and plan.sharding == "table_row_wise":
        between += back_and_forth * (world_size // local_world_size - 1)
        within += back_and_forth * world_size * (local_world_size - 1) / local_world_size
    else:
        between, within = between + back_and_forth * elsewhere, within + back_and_forth * beside
    return kernel / machines.memory + between / machines.between_nodes + within / machines.within_node
