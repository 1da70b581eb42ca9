"""What a caller may feed: the input types, and the checks that need nothing but the input itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor


class InputError(ValueError):
    """A batch that cannot be looked up; the message names the feature, the position, the value and the limit."""


@dataclass(frozen=True, eq=False)
class Sparse:
    """A sparse batch in coordinate form, like `tf.SparseTensor` without its dense shape.

    Attributes:
        indices: int32/int64 `[n, rank]`, one coordinate a row.  With one column more than the feature's
            `input_shape` has axes, the last column only separates the ids of a bag; with as many, each id is
            looked up at its own place (a sequence).  Rows must be ordered by sample.
        ids: int32/int64 `[n]`.
        weights: float32/float64 `[n]` or a scalar; None means 1.0 each.
        batch_size: size of the leading axis, where it is not the one of the config (trailing samples may be
            empty, so the indices alone do not tell).
    """

    indices: Tensor
    ids: Tensor
    weights: Tensor | None = None
    batch_size: int | None = None


@dataclass(frozen=True, eq=False)
class Ragged:
    """A batch of variable-length rows, like `tf.RaggedTensor`.

    Attributes:
        row_splits: int32/int64 `[rows + 1]`, from 0 to `len(ids)`, never decreasing.
        ids: int32/int64 `[n]`.
        weights: float32/float64 `[n]` or a scalar; None means 1.0 each.
        batch_size: size of the leading axis, where it is not the one of the config.  Needed only where the rows
            alone do not tell: a feature of two or more axes in a batch without a feature of one.
    """

    row_splits: Tensor
    ids: Tensor
    weights: Tensor | None = None
    batch_size: int | None = None


@contextmanager
def rejecting(reject: Callable[[InputError], None]) -> Iterator[None]:
    """Tells the other ranks of an error inside, by `reject`; they wait in their part of the same call."""
    try:
        yield
    except Exception as error:
        with suppress(InputError):
            reject(error if isinstance(error, InputError) else InputError(str(error)))
        raise


_INTEGERS = (torch.int32, torch.int64)


def fail(feature: str, problem: str) -> NoReturn:
    """Raises `InputError` for a feature."""
    raise InputError(f"feature {feature!r}: {problem}")


def tensor(feature: str, what: str, value: object) -> Tensor:
    """`value` as a tensor (NumPy arrays and lists of numbers included)."""
    if isinstance(value, Tensor):
        return value
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        fail(feature, f"{what} must be a tensor, got {type(value).__name__} ({error})")


def integers(feature: str, what: str, value: object, rank: int | None = None) -> Tensor:
    """`value` as an int64 tensor of the given rank."""
    result = tensor(feature, what, value)
    if result.dtype not in _INTEGERS:
        if result.numel() == 0 and not isinstance(value, Tensor):
            result = result.long()  # an empty list has no dtype of its own
        else:
            fail(feature, f"{what} must be int32 or int64, got {result.dtype}")
    if rank is not None and result.dim() != rank:
        fail(feature, f"{what} must have rank {rank}, got shape {list(result.shape)}")
    return result.long()


def weights(feature: str, value: object | None, count: int) -> Tensor | None:
    """Aggregation weights as float32 `[count]`; None (all 1.0) for None or an empty tensor beside ids.

    A scalar is broadcast.  NaN and infinite weights are refused.
    """
    if value is None:
        return None
    result = tensor(feature, "weights", value)
    if not result.dtype.is_floating_point or result.dtype not in (torch.float32, torch.float64):
        fail(feature, f"weights must be float32 or float64, got {result.dtype}")
    result = result.detach().float()
    if result.dim() == 0:
        result = result.expand(count)
    elif result.dim() != 1:
        fail(feature, f"weights must have rank 0 or 1, got shape {list(result.shape)}")
    if result.numel() == 0 and count:
        return None
    if result.numel() != count:
        fail(feature, f"{result.numel()} weights for {count} ids: give one weight an id, a scalar or none")
    finite = torch.isfinite(result)
    if not bool(finite.all()):
        position = int((~finite).nonzero()[0])
        fail(feature, f"weight {position} is {float(result[position])}: weights must be finite")
    return result


def check_batch_size(feature: str, batch_size: object) -> None:
    """A stated batch size is a number of samples."""
    if batch_size is not None and (not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 0):
        fail(feature, f"batch_size is {batch_size!r}: it must be an int of at least 0, or None")


def check_row_splits(feature: str, row_splits: Tensor, count: int) -> None:
    """Row splits start at 0, never decrease and end at the number of ids."""
    if row_splits.numel() == 0:
        fail(feature, "row_splits is empty: it needs one entry more than there are rows")
    first, last = int(row_splits[0]), int(row_splits[-1])
    if first != 0:
        fail(feature, f"row_splits[0] is {first}: row splits start at 0")
    decreasing = row_splits[1:] < row_splits[:-1]
    if bool(decreasing.any()):
        position = int(decreasing.nonzero()[0])
        fail(
            feature,
            f"row_splits[{position + 1}] is {int(row_splits[position + 1])} after {int(row_splits[position])}: "
            "row splits never decrease",
        )
    if last != count:
        fail(feature, f"row_splits ends at {last}, but there are {count} ids")
