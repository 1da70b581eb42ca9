"""The fused update of a group: fold the gradients of each distinct row, step the row once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from tpuemb_torch.kernels.numbers import TableNumbers
from tpuemb_torch.kernels.row_step import RowStep
from tpuemb_torch.optimizers import StepNumbers
from tpuemb_torch.preprocessing import SortedIds

#: Distinct rows folded and stepped at a time.  Everything at once would allocate (and page in) temporaries of the
#: size of the batch's rows in every step; a few thousand rows stay in cache.
CHUNK_ROWS = 4096


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


def update_rows(
    row_step: RowStep,
    numbers: TableNumbers,
    step: StepNumbers,
    row_starts: Tensor,
    state: Sequence[Tensor],
    ids: SortedIds,
    gradient: GradientRows,
) -> None:
    """Steps every distinct row once, in place.

    Args:
        row_step: the group's step of some rows.
        numbers: the group's numbers, and `step` those of this step.
        step: from `numbers.step`.
        row_starts: int64 `[tables + 1]`.
        state: weights and slots, each `[rows, dim]`.
        ids: the sorted ids.
        gradient: the gradients to fold.
    """
    for begin in range(0, ids.rows.numel(), CHUNK_ROWS):
        rows = ids.rows[begin : begin + CHUNK_ROWS]
        folded = gradient.fold(ids.starts[begin : begin + CHUNK_ROWS + 1])
        row_step(numbers.of_rows(step, row_starts, rows), state, rows, folded)


def sweep_rows(
    row_step: RowStep,
    numbers: TableNumbers,
    step: StepNumbers,
    row_starts: Tensor,
    state: Sequence[Tensor],
    ids: SortedIds,
    gradient: GradientRows,
) -> None:
    """Steps every row of the group once, those without a lookup with gradient 0 (non-lazy Adam and Lion)."""
    for begin, rows in _all_rows(state[0].shape[0], state[0].device):
        dense = state[0].new_zeros(rows.numel(), state[0].shape[1])
        first, last = torch.searchsorted(ids.rows, torch.stack([rows[0], rows[-1] + 1])).tolist()
        if first < last:
            dense.index_copy_(0, ids.rows[first:last] - begin, gradient.fold(ids.starts[first : last + 1]))
        row_step(numbers.of_rows(step, row_starts, rows), state, rows, dense)


def _all_rows(count: int, device: torch.device) -> Iterator[tuple[int, Tensor]]:
    for begin in range(0, count, CHUNK_ROWS):
        yield begin, torch.arange(begin, min(begin + CHUNK_ROWS, count), device=device)
