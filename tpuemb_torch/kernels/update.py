"""The fused update of a group: fold the gradients of each distinct row, step the row once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from tpuemb_torch.kernels.numbers import of_rows
from tpuemb_torch.kernels.row_step import RowStep
from tpuemb_torch.optimizers import StepNumbers, UpdateRule
from tpuemb_torch.preprocessing import SortedIds

#: Distinct rows folded and stepped at a time.  Everything at once would allocate (and page in) temporaries of the
#: size of the batch's rows in every step; a few thousand rows stay in cache.
CHUNK_ROWS = 4096
#: On a GPU each chunk is a few launches: there they are large.
GPU_CHUNK_ROWS = 1 << 18


@dataclass(frozen=True, eq=False)
class GradientRows:
    """The gradient of a lookup's output, and which of its rows each sorted id adds.

    Attributes:
        rows: float32 `[bags, dim]`.
        bag: int64 `[n]`, row of `rows` for each sorted id.
        gains: float32 `[n]` in sorted order, or None for 1.0 each.
    """

    rows: Tensor
    bag: Tensor
    gains: Tensor | None

    def fold(self, starts: Tensor) -> Tensor:
        """Gradients of consecutive distinct rows, `[len(starts) - 1, dim]`: sums of gain times gradient row."""
        first, last = int(starts[0]), int(starts[-1])
        return functional.embedding_bag(
            self.bag[first:last],
            self.rows,
            starts - first,
            mode="sum",
            include_last_offset=True,
            per_sample_weights=None if self.gains is None else self.gains[first:last],
        )


class ChunkedStep:
    """Folds and steps a few thousand rows at a time.

    Args:
        rule: the update rule.
        row_step: its step of some rows.
    """

    def __init__(self, rule: UpdateRule, row_step: RowStep) -> None:
        self._sweeps = rule.sweeps_all_rows
        self._row_step = row_step

    def __call__(
        self,
        numbers: StepNumbers,
        row_starts: Tensor,
        state: Sequence[Tensor],
        ids: SortedIds,
        bag: Tensor,
        gains: Tensor | None,
        gradient: Tensor,
    ) -> None:
        """Steps the rows in place.

        Args:
            numbers: float32 `[tables]` each.
            row_starts: int64 `[tables + 1]`, first row of each table in the group's buffer.
            state: weights and slots, float32 `[rows, dim]` each.
            ids: the sorted ids.
            bag: int64 `[n]`, row of `gradient` that each id of the lookup's bag received.
            gains: float32 `[n]` in the order of the lookup, or None for 1.0 each.
            gradient: float32 `[bags, dim]`.
        """
        folded = GradientRows(gradient, bag[ids.order], None if gains is None else gains[ids.order])
        chunks = _all_rows(state[0], ids, folded) if self._sweeps else _touched_rows(ids, folded)
        for rows, chunk in chunks:
            self._row_step(of_rows(numbers, row_starts, rows), state, rows, chunk)


def _touched_rows(ids: SortedIds, gradient: GradientRows) -> Iterator[tuple[Tensor, Tensor]]:
    """Chunks of the distinct rows with their gradients."""
    chunk = _chunk_rows(ids.rows)
    for begin in range(0, ids.rows.numel(), chunk):
        end = begin + chunk
        yield ids.rows[begin:end], gradient.fold(ids.starts[begin : end + 1])


def _all_rows(weights: Tensor, ids: SortedIds, gradient: GradientRows) -> Iterator[tuple[Tensor, Tensor]]:
    """Chunks of all rows, those without a lookup with gradient 0 (non-lazy Adam and Lion)."""
    count, dim = weights.shape
    chunk = _chunk_rows(weights)
    for begin in range(0, count, chunk):
        rows = torch.arange(begin, min(begin + chunk, count), device=weights.device)
        dense = weights.new_zeros(rows.numel(), dim)
        first, last = torch.searchsorted(ids.rows, torch.stack([rows[0], rows[-1] + 1])).tolist()
        if first < last:
            dense.index_copy_(0, ids.rows[first:last] - begin, gradient.fold(ids.starts[first : last + 1]))
        yield rows, dense


def _chunk_rows(tensor: Tensor) -> int:
    return CHUNK_ROWS if tensor.device.type == "cpu" else GPU_CHUNK_ROWS
