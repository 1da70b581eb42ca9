"""The numbers of a step (rates, decay, limits) as tensors: tables that differ only in them share one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tpuemb_torch.config import Limits, Optimizer
from tpuemb_torch.kernels.constants import Constant
from tpuemb_torch.optimizers import StepNumbers


class TableNumbers:
    """Per-table numbers of a group; `step` turns them into those of one step."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        #: Whether the same numbers hold for all tables of the group.
        self.uniform = len({_numbers_of(o) for o in optimizers}) == 1
        self.dynamic = any(o.learning_rate.tag is not None or o.step_counter_tag is not None for o in optimizers)
        self.clips_gradients = any(o.gradient_clipping_limits.active for o in optimizers)
        self.clips_weights = any(o.clipping_limits.active for o in optimizers)
        self.decays = any(o.weight_decay_factor != 0 for o in optimizers)
        self.counts_steps = any(o.step_counter_tag is not None for o in optimizers)
        # -1: a constant rate.
        tags = [-1 if o.learning_rate.tag is None else o.learning_rate.tag for o in optimizers]
        self._constant_rates = Constant([o.learning_rate.constant or 0.0 for o in optimizers])
        self._rate_tags = Constant(tags, torch.int64)
        self._step_tags = Constant([o.step_counter_tag or 0 for o in optimizers], torch.int64)
        self._decay = Constant([o.weight_decay_factor for o in optimizers])
        self._decay_by_rate = Constant(
            [o.multiply_weight_decay_factor_by_learning_rate for o in optimizers], torch.bool
        )
        self._gradient_limits = Constant([_bounds(o.gradient_clipping_limits) for o in optimizers])
        self._weight_limits = Constant([_bounds(o.clipping_limits) for o in optimizers])

    def step(self, rates: Tensor) -> StepNumbers:
        """Numbers of one step, float32 `[tables]` each.

        Args:
            rates: float32 `[num_learning_rates]`, the dynamic inputs by tag, on the group's device.
        """
        device = rates.device
        lr = self._constant_rates.on(device)
        if self.dynamic:
            tags = self._rate_tags.on(device)
            lr = torch.where(tags >= 0, rates[tags.clamp(min=0)], lr)
        decay = None
        if self.decays:
            decay = self._decay.on(device)
            decay = torch.where(self._decay_by_rate.on(device), decay * lr, decay)
        gradient, weight = self._gradient_limits.on(device), self._weight_limits.on(device)
        return StepNumbers(
            lr=lr,
            decay=decay,
            gradient_lower=gradient[:, 0] if self.clips_gradients else None,
            gradient_upper=gradient[:, 1] if self.clips_gradients else None,
            weight_lower=weight[:, 0] if self.clips_weights else None,
            weight_upper=weight[:, 1] if self.clips_weights else None,
            step=rates[self._step_tags.on(device)] if self.counts_steps else None,
        )


def of_rows(numbers: StepNumbers, row_starts: Tensor, rows: Tensor) -> StepNumbers:
    """The numbers for some rows of the group: 0-dim if there is one table, else `[rows, 1]`.

    Args:
        numbers: float32 `[tables]` each.
        row_starts: int64 `[tables + 1]`, first row of each table in the group's buffer.
        rows: int64 `[n]`, rows of the buffer.
    """
    if row_starts.numel() == 2:
        return _map(numbers, lambda value: value[0])
    table = torch.searchsorted(row_starts[1:], rows, right=True)
    return _map(numbers, lambda value: value[table][:, None])


def _numbers_of(optimizer: Optimizer) -> tuple[object, ...]:
    return (
        optimizer.learning_rate,
        optimizer.step_counter_tag,
        optimizer.weight_decay_factor,
        optimizer.multiply_weight_decay_factor_by_learning_rate,
        optimizer.gradient_clipping_limits,
        optimizer.clipping_limits,
    )


def _bounds(limits: Limits) -> tuple[float, float]:
    return limits.lower, limits.upper


def _map(numbers: StepNumbers, function: Callable[[Tensor], Tensor]) -> StepNumbers:
    return StepNumbers(*(None if value is None else function(value) for value in numbers))  # type: ignore[arg-type]
