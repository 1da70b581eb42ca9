"""One feature's input -> bags: the ids of the feature's samples, back to back, with a length for each sample.

A feature whose `input_shape` is `[B, ...]` has `product(input_shape)` samples, numbered row-major.  Whatever is
fed, it becomes `FeatureBags` over those samples.  An input that is looked up element by element (a sequence, or
a dense tensor) becomes bags of at most one id, so that the lookup knows nothing but weighted bags.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from tpuemb_torch.config import Feature
from tpuemb_torch.preprocessing.inputs import (
    Ragged,
    Sparse,
    check_batch_size,
    check_row_splits,
    fail,
    integers,
    tensor,
    weights,
)


@dataclass(frozen=True, eq=False)
class FeatureBags:
    """One feature of one batch.

    Attributes:
        ids: int64 `[n]`.
        lengths: int64 `[samples]`, number of ids of each sample.
        weights: float32 `[n]`, or None for 1.0 each.
        shape: the samples' shape, `product(shape) == samples`; the activations' shape without the last axis.
    """

    ids: Tensor
    lengths: Tensor
    weights: Tensor | None
    shape: tuple[int, ...]

    def full_weights(self) -> Tensor:
        """The weights, written out where they are 1.0 each."""
        return (
            torch.ones(self.ids.numel(), dtype=torch.float32, device=self.ids.device)
            if self.weights is None
            else self.weights
        )


def leading_size(feature: Feature, value: object) -> int | None:
    """The size of the leading axis where the input states it, else None (sparse and most ragged inputs)."""
    if isinstance(value, Sparse | Ragged):
        check_batch_size(feature.name, value.batch_size)
        return value.batch_size
    array = value if isinstance(value, Tensor) else tensor(feature.name, "the input", value)
    if array.is_nested:
        return None
    return int(array.shape[0]) if array.dim() else None


def is_jagged(value: Tensor) -> bool:
    """Whether `value` is a torch nested tensor of jagged layout."""
    return value.is_nested and value.layout is torch.jagged


def to_bags(feature: Feature, value: object, leading: int | None) -> FeatureBags:
    """Turns one feature's input into bags.

    Args:
        feature: the feature; `input_shape` says how many axes are samples.
        value: a dense id tensor, `Sparse`, `Ragged`, torch sparse COO tensor or torch jagged nested tensor.
        leading: size of the leading axis if other features of the batch tell it.

    Raises:
        InputError: for any malformed input.
    """
    if isinstance(value, Sparse):
        return _from_sparse(feature, value, leading)
    if isinstance(value, Ragged):
        return _from_ragged(feature, value, leading)
    array = tensor(feature.name, "the input", value)
    if array.is_nested and not is_jagged(array):
        fail(feature.name, "a nested tensor must have the layout torch.jagged")
    if not isinstance(value, Tensor) and array.numel() == 0:
        array = array.long()  # an empty list or array has no dtype that was chosen
    if array.layout not in (torch.strided, torch.sparse_coo, torch.jagged) or array.is_meta:
        fail(feature.name, f"a tensor of layout {array.layout} on {array.device} is none of the inputs that there are")
    if is_jagged(array):
        return _from_ragged(feature, _ragged_of_nested(feature, array), leading)
    if array.layout is torch.sparse_coo:
        indices, ids = array._indices().t(), array._values()
        return _from_sparse(feature, Sparse(indices, ids, batch_size=int(array.shape[0])), leading)
    return _from_dense(feature, array)


def _ragged_of_nested(feature: Feature, array: Tensor) -> Ragged:
    values, offsets = array.values(), array.offsets()  # type: ignore[attr-defined]
    if values.dim() != 1:
        fail(feature.name, f"a nested tensor must be one row of ids a sample, got values of shape {list(values.shape)}")
    lengths = array.lengths()  # type: ignore[attr-defined]
    if lengths is not None:  # rows with holes between them
        splits = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).long()
        place = torch.repeat_interleave(offsets[:-1] - splits[:-1], lengths)
        return Ragged(splits, values[place + torch.arange(place.numel(), device=place.device)])
    return Ragged(offsets, values)


def _from_dense(feature: Feature, array: Tensor) -> FeatureBags:
    ids = integers(feature.name, "a dense input", array)
    shape, axes = feature.input_shape, len(feature.input_shape)
    combine = ids.dim() == axes + 1
    if ids.dim() not in (axes, axes + 1):
        fail(
            feature.name,
            f"a dense input must have the axes of input_shape {list(shape)}, or one more that is combined; "
            f"got shape {list(ids.shape)}",
        )
    if tuple(ids.shape[1:axes]) != shape[1:]:
        fail(feature.name, f"axes after the batch must be {list(shape[1:])}, got shape {list(ids.shape)}")
    samples = tuple(ids.shape[:axes])
    width = int(ids.shape[-1]) if combine else 1
    lengths = torch.full((prod(samples),), width, dtype=torch.int64, device=ids.device)
    return FeatureBags(ids.reshape(-1), lengths, None, samples)


def _from_sparse(feature: Feature, value: Sparse, leading: int | None) -> FeatureBags:
    name, axes = feature.name, len(feature.input_shape)
    indices = integers(name, "indices", value.indices, rank=2)
    ids = integers(name, "ids", value.ids, rank=1)
    if indices.shape[0] != ids.shape[0]:
        fail(name, f"{indices.shape[0]} rows of indices for {ids.shape[0]} ids")
    columns = int(indices.shape[1])
    if ids.numel() and columns not in (axes, axes + 1):
        fail(
            name,
            f"indices must have {axes} columns (one id a place) or {axes + 1} (bags) "
            f"for input_shape {list(feature.input_shape)}, got {columns}",
        )
    if value.batch_size is not None and leading is not None and value.batch_size != leading:
        fail(name, f"batch_size is {value.batch_size}, but the batch has {leading} samples")
    size = value.batch_size if value.batch_size is not None else leading
    shape = (feature.input_shape[0] if size is None else size, *feature.input_shape[1:])
    weight = weights(name, value.weights, ids.numel())
    if columns == axes and ids.numel():
        if weight is not None:
            fail(name, "weights are not used where ids are looked up one by one (a sequence): leave them out")
        return _places(name, indices, ids, shape)
    samples = _sample_numbers(name, indices[:, :axes], shape)
    unsorted = samples[1:] < samples[:-1]
    if bool(unsorted.any()):
        row = int(unsorted.nonzero()[0]) + 1
        fail(name, f"indices[{row}] is {indices[row].tolist()} after {indices[row - 1].tolist()}: order ids by sample")
    lengths = torch.bincount(samples, minlength=prod(shape))
    return FeatureBags(ids, lengths, weight, shape)


def _places(name: str, indices: Tensor, ids: Tensor, shape: tuple[int, ...]) -> FeatureBags:
    """Ids looked up one by one; those beyond the last axis (a sequence's length) are dropped first."""
    unsorted = indices[1:, 0] < indices[:-1, 0]
    if bool(unsorted.any()):
        row = int(unsorted.nonzero()[0]) + 1
        fail(name, f"indices[{row}] is {indices[row].tolist()} after {indices[row - 1].tolist()}: order ids by sample")
    rows = torch.arange(ids.numel(), device=ids.device)
    if len(shape) > 1:
        rows = rows[indices[:, -1] < shape[-1]]
        ids = ids[rows]
    samples = _sample_numbers(name, indices[rows], shape, rows)
    samples, order = torch.sort(samples, stable=True)
    repeated = samples[1:] == samples[:-1]
    if bool(repeated.any()):
        row = int(rows[order[int(repeated.nonzero()[0]) + 1]])
        fail(name, f"indices[{row}]: a second id at {indices[row].tolist()}: a place of a sequence holds one id")
    return FeatureBags(ids[order], torch.bincount(samples, minlength=prod(shape)), None, shape)


def _sample_numbers(name: str, coordinates: Tensor, shape: tuple[int, ...], rows: Tensor | None = None) -> Tensor:
    """Row-major sample numbers of `[n, len(shape)]` coordinates, each checked against its axis.

    `rows` are their numbers in the input, where some were left out.
    """
    number = torch.zeros(coordinates.shape[0], dtype=torch.int64, device=coordinates.device)
    if coordinates.shape[0] == 0:
        return number
    for axis, size in enumerate(shape):
        column = coordinates[:, axis]
        bad = (column < 0) | (column >= size)
        if bool(bad.any()):
            place = int(bad.nonzero()[0])
            row = place if rows is None else int(rows[place])
            fail(name, f"indices[{row}][{axis}] is {int(column[place])}: that axis has size {size}")
        number = number * size + column
    return number


def _from_ragged(feature: Feature, value: Ragged, leading: int | None) -> FeatureBags:
    name = feature.name
    row_splits = integers(name, "row_splits", value.row_splits, rank=1)
    ids = integers(name, "ids", value.ids, rank=1)
    check_row_splits(name, row_splits, ids.numel())
    weight = weights(name, value.weights, ids.numel())
    shape, steps = ragged_shape(feature, row_splits.numel() - 1, leading)
    lengths = row_splits.diff()
    if steps is None:
        return FeatureBags(ids, lengths, weight, shape)
    return _sequences(row_splits, ids, steps, shape)


def sequence_bags(name: str, value: Ragged, batch: int, steps: int) -> FeatureBags:
    """Reads a ragged input as `batch` sequences of `steps` steps.

    Raises:
        InputError: for another number of rows.
    """
    row_splits = integers(name, "row_splits", value.row_splits, rank=1)
    ids = integers(name, "ids", value.ids, rank=1)
    check_row_splits(name, row_splits, ids.numel())
    weights(name, value.weights, ids.numel())
    if row_splits.numel() - 1 != batch:
        fail(name, f"{row_splits.numel() - 1} rows for a batch of {batch} sequences")
    return _sequences(row_splits, ids, steps, (batch, steps))


def _sequences(row_splits: Tensor, ids: Tensor, steps: int, shape: tuple[int, ...]) -> FeatureBags:
    """Id p of a row is at step p; what lies beyond the last step is dropped before the lookup."""
    lengths = row_splits.diff()
    kept = lengths.clamp(max=steps)
    row = torch.repeat_interleave(torch.arange(lengths.numel(), device=ids.device), lengths)
    step = torch.arange(ids.numel(), device=ids.device) - row_splits[:-1][row]
    places = torch.arange(steps, device=ids.device) < kept[:, None]
    return FeatureBags(ids[step < steps], places.reshape(-1).long(), None, shape)


def ragged_shape(feature: Feature, rows: int, leading: int | None) -> tuple[tuple[int, ...], int | None]:
    """Decides what the rows of a ragged input are.

    As in TensorFlow's TPUEmbedding, rows are bags if there are as many as samples, and sequences of k steps if
    there are k times fewer.  A batch may also be smaller or larger than the config says; then the rows are
    the leading samples (`input_shape` of one axis) or one sequence each (of two).

    Returns:
        The samples' shape, and the number of steps of a row (None for bags).

    Raises:
        InputError: if no reading fits.
    """
    shape = feature.input_shape
    rest = prod(shape[1:])
    batch = shape[0] if leading is None else leading
    samples = batch * rest
    full = (batch, *shape[1:])
    if rows == samples:
        return full, None
    # Fewer rows than the config's batch, and nothing that says the batch is whole: a small batch, not a sequence.
    small = leading is None and rows < batch
    if rows and not small and samples % rows == 0:
        return full, samples // rows
    if leading is None:
        if len(shape) == 1:
            return (rows,), None
        if len(shape) == 2:
            return (rows, shape[1]), shape[1]
        if rows % rest == 0:
            return (rows // rest, *shape[1:]), None
        if rows % prod(shape[1:-1]) == 0:
            return (rows // prod(shape[1:-1]), *shape[1:]), shape[-1]
    fail(
        feature.name,
        f"{rows} ragged rows do not fit shape {list(full)}: give {samples} rows (bags) "
        f"or a number that divides it (sequences)",
    )
    return None
