"""What a rank exchanges with the holder of one shard of a table in a step, in bytes.

Pooled: TorchRec's exchange.  Lengths of bags, ids and gains go to the holders of rows; sums of bags come back, and
gradients of sums go out again (torchrec/distributed/dist_data.py: KJTAllToAll, PooledEmbeddingsAllToAll).
Distinct: each distinct row of a rank's batch is asked for once; the row comes back, and one gradient goes out.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tpuemb_torch.planning.plan import FLOAT32_BYTES, TablePlan

LENGTH_BYTES = 8
COUNT_BYTES = 8
LARGEST_INT32 = 2**31 - 1


class Request(NamedTuple):
    """Bytes between one rank and the holder of one shard; numbers, or arrays over ranks and shards.

    Attributes:
        lengths: of bags, to the holder.
        ids: to the holder.
        gains: one for each id, to the holder.
        rows: sums of bags or rows back to the rank; their gradients, as many bytes, to the holder again.
    """

    lengths: Any
    ids: Any
    gains: Any
    rows: Any

    @property
    def to_holder(self) -> Any:
        """Bytes of the input dist."""
        return self.lengths + self.ids + self.gains


def request(plan: TablePlan, number: Any, weighted: bool, id_bytes: int) -> Request:
    """Returns the bytes for a number of ids (pooled) or of distinct rows (distinct) that a rank wants of a shard.

    Args:
        plan: the table.
        number: ids or rows; a number or an array.
        weighted: whether a gain travels with each id: if any rank has weights, or any combiner is not "sum".
        id_bytes: 4 or 8.
    """
    if plan.exchange == "distinct":
        return Request(0, number * id_bytes, 0, number * (plan.columns * FLOAT32_BYTES))
    bags = plan.table.bags
    gains = number * FLOAT32_BYTES if weighted else 0
    return Request(bags * LENGTH_BYTES, number * id_bytes, gains, bags * plan.columns * FLOAT32_BYTES)


def wanted(plan: TablePlan) -> float:
    """Ids (pooled) or distinct rows (distinct) of one rank's batch, as far as the plan tells."""
    return plan.table.distinct if plan.exchange == "distinct" else plan.table.bags * plan.table.pooling_factor


def id_bytes_of(plan: TablePlan) -> int:
    """4, or 8 where TorchRec's table (row-wise shards padded to the longest) has more than 2^31 - 1 rows."""
    rows = plan.rows(0) * len(plan.ranks) if plan.by_rows else plan.table.vocabulary_size
    return 4 if rows <= LARGEST_INT32 else 8
