"""What preprocessing hands to the lookup."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tpuemb_torch.preprocessing.distinct import SortedIds


@dataclass(frozen=True, eq=False)
class PreparedInput:
    """Bags of checked ids with their gains, key after key (or feature after feature) in the collection's order.

    Attributes:
        ids: int64 `[n]`, rows of each key's table.
        offsets: int64 `[sum of bags + 1]`, where each bag's ids begin.
        gains: float32 `[n]`, or None for 1.0 each: all combiners are "sum" and no weights were given.
        bags: number of bags of each key.
        by_feature: whether the keys are the config's features, instead of the collection's keys, which are as many
            for every feature as it has samples in a batch entry.
        ordered: the ids sorted by row, all tables' rows back to back, if that was done ahead.
    """

    ids: Tensor
    offsets: Tensor
    gains: Tensor | None
    bags: tuple[int, ...]
    by_feature: bool
    ordered: SortedIds | None = None

    @property
    def lengths(self) -> Tensor:
        """int64 `[sum of bags]`, number of ids of each bag."""
        return self.offsets.diff()

    def ids_per_key(self) -> Tensor:
        """int64 `[keys]`."""
        return self.offsets[first_bags(self.bags).to(self.offsets.device)].diff()

    def map(self, change: Callable[[Tensor], Tensor]) -> PreparedInput:
        """The same input with every tensor changed (moved, pinned, ...)."""
        ordered = None if self.ordered is None else self.ordered.map(change)
        gains = None if self.gains is None else change(self.gains)
        return PreparedInput(change(self.ids), change(self.offsets), gains, self.bags, self.by_feature, ordered)


@dataclass(frozen=True, eq=False)
class PreparedBatch:
    """The features of one batch, checked and ready for the lookup; a `TPUEmbedding` takes it in their place.

    It is made by `TPUEmbedding.preparation`, in a data-loading worker or on another thread, if wanted with its ids
    sorted, so that the step does not.  It can be pickled, pinned and moved between devices.

    Attributes:
        input: all features' bags.
        shapes: shape of each feature's samples, in the config's order: that of its activations without the last axis.
        origin: which config and combiners it was prepared for; another layer refuses it.
    """

    input: PreparedInput
    shapes: tuple[tuple[int, ...], ...]
    origin: str

    def to(self, device: str | torch.device, non_blocking: bool = False) -> PreparedBatch:
        """The same batch on a device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> PreparedBatch:
        """The same batch in page-locked memory, from where it can be copied to a GPU without waiting."""
        return self._map(Tensor.pin_memory)

    def record_stream(self, stream: torch.Stream) -> None:
        """Keeps the batch's memory until a CUDA stream is done with it."""

        def record(tensor: Tensor) -> Tensor:
            tensor.record_stream(stream)
            return tensor

        self._map(record)

    def _map(self, change: Callable[[Tensor], Tensor]) -> PreparedBatch:
        return PreparedBatch(self.input.map(change), self.shapes, self.origin)


def first_bags(bags: tuple[int, ...]) -> Tensor:
    """int64 `[keys + 1]`: number of the first bag of each key, and of all bags."""
    return torch.cat([torch.zeros(1, dtype=torch.int64), torch.tensor(bags, dtype=torch.int64).cumsum(0)])
