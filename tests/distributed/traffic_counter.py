"""Counts what a rank hands to torch.distributed's collectives, and what its sockets send."""

from __future__ import annotations

import inspect
import os
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

#: Functions that move tensors or objects between ranks.
_COLLECTIVES = (
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_gather_single", "all_reduce", "all_to_all"),
    *("all_to_all_single", "batch_isend_irecv", "broadcast", "broadcast_object_list", "gather", "gather_object"),
    *("irecv", "isend", "recv", "reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor"),
    *("scatter", "scatter_object_list", "send"),
)


@dataclass(frozen=True)
class Call:
    """One collective of one rank.

    Attributes:
        phase: that of the counter.
        operation: "all_to_all", "all_reduce", "reduce_scatter", "all_gather", or another function's name.
        size: ranks of its group.
        handed: bytes of the tensor that the rank gave.
        sent: bytes to other ranks; of an all-to-all only, since others leave it to the algorithm.
        received: bytes from other ranks.
        messages: to how many ranks it sends something.
    """

    phase: str
    operation: str
    size: int
    handed: int
    sent: int = 0
    received: int = 0
    messages: int = 0


class Counter:
    """Collectives by phase, which the test sets."""

    def __init__(self) -> None:
        self.phase = ""
        self.calls: list[Call] = []

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Counts the calls in its body."""
        known: dict[str, Callable[[Mapping[str, Any], dist.ProcessGroup], Call]] = {
            "all_to_all_single": self._all_to_all,
            "all_reduce": self._one_tensor("all_reduce", "tensor"),
            "reduce_scatter_tensor": self._one_tensor("reduce_scatter", "input"),
            "reduce_scatter_single": self._one_tensor("reduce_scatter", "input"),
            "all_gather_into_tensor": self._one_tensor("all_gather", "input_tensor"),
            "all_gather_single": self._one_tensor("all_gather", "input_tensor"),
        }
        originals = {name: getattr(dist, name) for name in _COLLECTIVES}
        try:
            for name, function in originals.items():
                setattr(dist, name, self._counted(name, function, known.get(name)))
            yield
        finally:
            for name, function in originals.items():
                setattr(dist, name, function)

    def _counted(self, name: str, function: Callable[..., Any], count: Any) -> Callable[..., Any]:
        signature = inspect.signature(inspect.unwrap(function))

        def counted(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            group = bound.arguments.get("group") or dist.group.WORLD
            # Ones that the model does not know are seen, not left out.
            self.calls.append(Call(self.phase, name, 0, 0) if count is None else count(bound.arguments, group))
            return function(*args, **kwargs)

        return counted

    def _all_to_all(self, arguments: Mapping[str, Any], group: dist.ProcessGroup) -> Call:
        own = dist.get_rank(group)

        def to_others(tensor: Tensor, splits: list[int] | None) -> list[int]:
            splits = splits or [tensor.numel() // group.size()] * group.size()
            assert sum(splits) == tensor.numel() and tensor.dim() == 1
            return [tensor.element_size() * number for rank, number in enumerate(splits) if rank != own]

        sent = to_others(arguments["input"], arguments["input_split_sizes"])
        received = to_others(arguments["output"], arguments["output_split_sizes"])
        given = _bytes(arguments["input"])
        messages = sum(size > 0 for size in sent)
        return Call(self.phase, "all_to_all", group.size(), given, sum(sent), sum(received), messages)

    def _one_tensor(self, operation: str, name: str) -> Callable[[Mapping[str, Any], dist.ProcessGroup], Call]:
        return lambda arguments, group: Call(self.phase, operation, group.size(), _bytes(arguments[name]))


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def sent_by_sockets() -> int:
    """Bytes that this process's TCP connections have sent, without TCP's and IP's headers and repeats.

    Source: `tcpi_bytes_sent` and `tcpi_bytes_retrans` of struct tcp_info, Linux's include/uapi/linux/tcp.h (4.19 on).
    """
    total = 0
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(number))) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                sent, repeated = struct.unpack_from(
                    "QQ", connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256), 200
                )
                total += sent - repeated
    return total


def sockets_tell() -> bool:
    """Whether the system's sockets tell what they have sent."""
    with socket.socket() as probe, suppress(OSError, AttributeError):
        return len(probe.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)) >= 216
    return False
