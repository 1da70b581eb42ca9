"""Enqueue, recv, send: the steps of the TPU embedding ops as a queue of batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import torch
from torch import Tensor

from tpuemb_torch.preprocessing import DeduplicationData, PreparedBatch

#: Batches that may wait for their recv or send.
QUEUE_LIMIT = 64

#: Batch numbers are of the process, so that no layer takes another's deduplication data for its own.
_numbers = count()

_MODES = {
    "inference": "inference",
    "train": "training",
    "training": "training",
    "backward_pass_only": "backward_pass_only",
}


def resolve_mode(mode: str, configured: str) -> str:
    """The mode of a batch: the override, or the config's for "unspecified".

    Raises:
        ValueError: for an unknown mode, or training under an INFERENCE config.
    """
    if mode == "unspecified":
        return configured
    if mode not in _MODES:
        raise ValueError(f"mode {mode!r} is not one of unspecified, {', '.join(_MODES)}")
    if configured == "inference" and _MODES[mode] != "inference":
        raise ValueError(f"mode {mode!r} asked of a config in mode INFERENCE, which has no backward pass")
    return _MODES[mode]


@dataclass(eq=False)
class Batch:
    """One enqueued batch."""

    number: int
    mode: str
    prepared: PreparedBatch
    #: Activations with their graph, once received; what send differentiates.
    activations: list[Tensor] = field(default_factory=list)
    received: bool = False


class BatchQueue:
    """Batches in the order in which they were enqueued; recv and send each take the first that waits for them."""

    def __init__(self) -> None:
        self._batches: deque[Batch] = deque()

    def __len__(self) -> int:
        return len(self._batches)

    def check_room(self) -> None:
        """Raises RuntimeError if too many batches wait."""
        if len(self._batches) >= QUEUE_LIMIT:
            raise RuntimeError(
                f"{QUEUE_LIMIT} batches are waiting for recv or send: receive their activations "
                "and send the gradients of training batches before enqueueing more"
            )

    def enqueue(self, mode: str, prepared: PreparedBatch) -> None:
        self._batches.append(Batch(next(_numbers), mode, prepared))

    def to_receive(self) -> Batch:
        """The batch of the next recv."""
        for batch in self._batches:
            if not batch.received and batch.mode != "backward_pass_only":
                return batch
        raise RuntimeError("no batch to receive: enqueue one first (one recv for each enqueue)")

    def to_send(self) -> Batch:
        """The batch of the next send."""
        for batch in self._batches:
            if batch.mode == "training" and not batch.received:
                raise RuntimeError("gradients sent before the activations of their batch were received: recv first")
            if batch.mode != "inference":
                return batch
        raise RuntimeError(
            "no training batch waits for gradients: each recv in training mode takes one send, "
            "and inference batches take none"
        )

    def mark_received(self, batch: Batch, activations: list[Tensor]) -> None:
        batch.received = True
        batch.activations = activations
        if batch.mode == "inference":
            self._batches.remove(batch)

    def done(self, batch: Batch) -> None:
        self._batches.remove(batch)

    def clear(self) -> None:
        self._batches.clear()

    def waiting_for_gradients(self) -> int:
        """How many training batches were received whose gradients have not been sent."""
        return sum(batch.received for batch in self._batches)


def check_gradients(
    gradients: Sequence[Tensor | None], names: Sequence[str], shapes: Sequence[tuple[int, ...]]
) -> list[Tensor]:
    """One float32 gradient per activation, of its shape; zeros for None.

    Raises:
        ValueError, TypeError: naming the first that does not fit and what was expected.
    """
    if isinstance(gradients, Tensor) or not isinstance(gradients, Sequence):
        raise TypeError(f"gradients must be a sequence of {len(shapes)} tensors, got {type(gradients).__name__}")
    if len(gradients) != len(shapes):
        raise ValueError(f"{len(gradients)} gradients given, but recv returned {len(shapes)}: send one each")
    checked = []
    for gradient, name, shape in zip(gradients, names, shapes, strict=True):
        if gradient is None:
            checked.append(torch.zeros(shape, dtype=torch.float32))
            continue
        if isinstance(gradient, np.ndarray):
            gradient = torch.from_numpy(gradient)
        if not isinstance(gradient, Tensor):
            raise TypeError(f"gradient of {name!r} must be a tensor or None, got {type(gradient).__name__}")
        if tuple(gradient.shape) != shape:
            raise ValueError(f"gradient of {name!r} has shape {list(gradient.shape)}, its activation {list(shape)}")
        if gradient.dtype != torch.float32:
            raise TypeError(f"gradient of {name!r} must be float32, got {gradient.dtype}")
        if gradient.layout is not torch.strided or gradient.is_meta:
            raise TypeError(
                f"gradient of {name!r} must be a dense tensor, got layout {gradient.layout} on {gradient.device}"
            )
        checked.append(gradient.detach())
    return checked


def check_deduplication_data(data: object, batch: Batch, what: str) -> None:
    """Raises unless the data is None or belongs to the batch."""
    if data is None:
        return
    if not isinstance(data, DeduplicationData):
        raise TypeError(f"deduplication_data must be DeduplicationData, got {type(data).__name__}")
    if data.batch != batch.number:
        raise ValueError(
            f"deduplication data of batch {data.batch} given to the {what} of batch {batch.number}: "
            "use the data that was received for that batch"
        )
