"""Seconds that the communication of a step takes at stated bandwidths and latencies: a model, not a measurement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tpuemb_torch.planning.collectives import Collective
from tpuemb_torch.planning.costs import MACHINES


@dataclass(frozen=True)
class Network:
    """What connects ranks.

    Attributes:
        within_node: bytes per second of each rank to others of its node, in each direction.
        between_nodes: the same to other nodes.
        latency_within: seconds of a message that others wait for, within a node.
        latency_between: between nodes.
        per_message: seconds of a rank's work for each message of an all-to-all, which do not wait for each other.
    """

    within_node: float
    between_nodes: float
    latency_within: float
    latency_between: float
    per_message: float


#: Bandwidths of `MACHINES`; latencies of NCCL's ring over NVLink and networks, protocol Simple (`hwLat` in its
#: src/graph/tuning.cc, version 2.19).  The work for a message is an assumption.
NETWORK = Network(MACHINES["cuda"].within_node, MACHINES["cuda"].between_nodes, 3.4e-6, 14e-6, 1e-6)


class Time(NamedTuple):
    """Seconds of one collective on its slowest rank, by what they are spent on.

    Attributes:
        within: bytes within the node.
        between: bytes between nodes, at the same time.
        messages: latencies, and the work for messages, before or after.
    """

    within: float
    between: float
    messages: float

    @property
    def total(self) -> float:
        """Seconds."""
        return max(self.within, self.between) + self.messages

    @property
    def bound(self) -> str:
        """What takes most of it."""
        return max(("within nodes", "between nodes", "messages"), key=lambda name: self[_PLACES[name]])


_PLACES = {"within nodes": 0, "between nodes": 1, "messages": 2}


def seconds_of(collective: Collective, network: Network = NETWORK) -> Time:
    """Returns the time of a collective that begins on all ranks at once and has the network to itself."""
    wire = collective.wire
    within = np.maximum(wire.sent_within, wire.received_within) / network.within_node
    between = np.maximum(wire.sent_between, wire.received_between) / network.between_nodes
    if collective.operation == "all_to_all":
        latency = network.latency_between if wire.messages_between.any() else network.latency_within
        messages = collective.messages * network.per_message + latency * (collective.messages > 0)
    else:
        waits = wire.steps_within * network.latency_within + wire.steps_between * network.latency_between
        messages = np.full_like(within, waits) * (collective.handed > 0)
    slowest = int((np.maximum(within, between) + messages).argmax())
    return Time(float(within[slowest]), float(between[slowest]), float(messages[slowest]))


@dataclass(frozen=True)
class Projection:
    """The communication of one step.

    Attributes:
        within, between: bytes to other ranks of the node, and of other nodes: the mean over ranks.
        most_within, most_between: sent or received, whichever is more, by the rank that has most of it.
        messages: messages with content that the busiest rank sends.
        seconds: collectives one after the other, each on its slowest rank.
        slowest: the phase and content of the collective that takes longest, and what bounds it.
    """

    within: float
    between: float
    most_within: float
    most_between: float
    messages: int
    seconds: float
    slowest: str


def project(collectives: Sequence[Collective], network: Network = NETWORK) -> Projection:
    """Returns sums over a step's collectives, and how long they take."""
    wires = [collective.wire for collective in collectives]
    times = [seconds_of(collective, network) for collective in collectives]
    sent_within, received_within = sum(w.sent_within for w in wires), sum(w.received_within for w in wires)
    sent_between, received_between = sum(w.sent_between for w in wires), sum(w.received_between for w in wires)
    longest = max(range(len(times)), key=lambda number: times[number].total)
    return Projection(
        float(np.mean(sent_within)),
        float(np.mean(sent_between)),
        float(np.maximum(sent_within, received_within).max()),
        float(np.maximum(sent_between, received_between).max()),
        int(np.ceil(np.max(sum(collective.messages for collective in collectives)))),
        sum(time.total for time in times),
        f"{collectives[longest].content}: {times[longest].bound}",
    )
