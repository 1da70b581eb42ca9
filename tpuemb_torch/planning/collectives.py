"""What travels between ranks when they call a collective.

All-to-all: each rank sends the others their parts directly; its own part stays.  Other collectives go around a ring,
as NCCL's and gloo's do: of an all-reduce of S bytes among n ranks, each sends 2 (n-1)/n S; of a reduce-scatter of S
bytes, or an all-gather to S bytes, (n-1)/n S; in n-1 messages (all-reduce: 2 (n-1)), one after the other.  What a ring
sends between nodes is spread over the ranks of a node, as NCCL has a ring for each network interface.  gloo's
reduce-scatter is an all-reduce (torch/csrc/distributed/c10d/ProcessGroupGloo.cpp).  NCCL's all-reduce of a few bytes
goes up and down trees instead (src/graph/tuning.cc).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]
Backend: TypeAlias = Literal["nccl", "gloo"]
#: In the order of a step.
PHASES = ("agreement", "input dist", "output dist", "backward")


class Wire(NamedTuple):
    """What travels between ranks, by rank `[ranks]`; a rank's own part never does.

    Attributes:
        sent_within, sent_between: bytes to other ranks of its node, and of other nodes.
        received_within, received_between: bytes from them.
        messages_within, messages_between: messages with content that it sends.
        steps_within, steps_between: how many of the messages wait for the one before (numbers, the same for all ranks).
    """

    sent_within: Array
    sent_between: Array
    received_within: Array
    received_between: Array
    messages_within: Array
    messages_between: Array
    steps_within: int = 0
    steps_between: int = 0


@dataclass(frozen=True, eq=False)
class Collective:
    """One collective, which all ranks call.

    Attributes:
        phase: one of `PHASES`.
        sharding: the tables that it is for; "" for all.
        content: what is in it: "lengths", "ids", "sums", ...
        operation: "all_to_all", "all_reduce", "reduce_scatter" or "all_gather".
        handed: bytes that each rank hands to it, its own part included, `[ranks]`.
        wire: what travels for that.
    """

    phase: str
    sharding: str
    content: str
    operation: str
    handed: Array
    wire: Wire

    @property
    def sent(self) -> Array:
        """Bytes to other ranks, by rank."""
        return self.wire.sent_within + self.wire.sent_between

    @property
    def received(self) -> Array:
        """Bytes from other ranks, by rank."""
        return self.wire.received_within + self.wire.received_between

    @property
    def messages(self) -> Array:
        """Messages with content to other ranks, by rank."""
        return self.wire.messages_within + self.wire.messages_between


def all_to_all(phase: str, sharding: str, content: str, matrix: Array, local: int) -> Collective:
    """An all-to-all of all ranks.

    Args:
        phase: see `Collective`.
        sharding: see `Collective`.
        content: see `Collective`.
        matrix: bytes from each rank (axis 0) to each (axis 1); an axis of length 1 stands for all ranks alike.
        local: ranks of each node.
    """
    world = max(matrix.shape)
    full = np.broadcast_to(matrix, (world, world))
    within_out, within_in = _of_own_node(full, local)
    messages = (full > 0).astype(float)
    messages_within, _ = _of_own_node(messages, local)
    own = full.diagonal()
    handed = full.sum(1, dtype=float)
    wire = Wire(
        within_out - own,
        handed - within_out,
        within_in - own,
        full.sum(0, dtype=float) - within_in,
        messages_within - (own > 0),
        messages.sum(1) - messages_within,
    )
    return Collective(phase, sharding, content, "all_to_all", handed, wire)


def _of_own_node(full: NDArray[np.generic], local: int) -> tuple[Array, Array]:
    """Sums of each row and of each column over the ranks of the same node."""
    nodes = len(full) // local
    node = np.arange(nodes)
    blocks = full.reshape(nodes, local, nodes, local)[node, :, node, :].astype(float)
    return blocks.sum(2).reshape(-1), blocks.sum(1).reshape(-1)


def around_ring(
    phase: str, sharding: str, content: str, operation: str, handed: Array, size: int, local: int, backend: Backend
) -> Collective:
    """A ring of all ranks, or one in each node; for a small all-reduce of NCCL, a tree.

    Args:
        phase: see `Collective`.
        sharding: see `Collective`.
        content: see `Collective`.
        operation: "all_reduce", "reduce_scatter" or "all_gather".
        handed: bytes that each rank hands in, `[ranks]`, equal in a ring.
        size: ranks of each ring: all, or those of a node.
        local: ranks of each node.
        backend: whose algorithms.
    """
    nodes = size // local  # 0 in a group that is a part of a node
    rounds = 2 if operation == "all_reduce" or (operation == "reduce_scatter" and backend == "gloo") else 1
    whole = handed * size if operation == "all_gather" else handed
    sent: Array = rounds * whole * (size - 1) / size
    between = rounds * max(nodes - 1, 0)
    within = rounds * (size - 1) - between
    messages = float(within + between)
    if operation == "all_reduce" and backend == "nccl":
        messages = 2 * (size - 1) / size  # up the tree and down, on average; so are the bytes
        within, between = 2 * (local - 1), 2 * (nodes - 1).bit_length()
    share = 1 / local if nodes > 1 else 0.0
    inside, outside = sent * (1 - share), sent * share
    each: Array = np.where(handed > 0, messages, 0.0)
    wire = Wire(inside, outside, inside, outside, each * (1 - share), each * share, within, between)
    return Collective(phase, sharding, content, operation, handed, wire)
