"""One optimizer step of some distinct rows, in place: eager, or compiled by torch.compile."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Sequence
from os import environ

import torch
from torch import Tensor

from tpuemb_torch.optimizers import StepNumbers, UpdateRule, apply_step

_log = logging.getLogger("tpuemb_torch.kernels")

#: `(numbers, state, rows, gradient)`: steps `rows` (int64 `[n]`, distinct) of `state` (weights and slots,
#: `[buffer rows, dim]` each) with the summed gradients `[n, dim]`.
RowStep = Callable[[StepNumbers, Sequence[Tensor], Tensor, Tensor], None]


def eager_row_step(rule: UpdateRule) -> RowStep:
    """The step op by op."""

    def step(numbers: StepNumbers, state: Sequence[Tensor], rows: Tensor, gradient: Tensor) -> None:
        old = [values.index_select(0, rows) for values in state]
        new = apply_step(rule, numbers, old[0], gradient, *old[1:])
        for values, value in zip(state, new, strict=True):
            values.index_copy_(0, rows, value)

    return step


def compiled_row_step(rule: UpdateRule) -> RowStep:
    """The step as one compiled function: gather, formula and scatter in a pass over memory.

    One compilation serves all numbers of rows, rates and limits.  The first call compiles (torch keeps the result
    on disk, so that other processes do not) and says so.
    """
    compiled = torch.compile(eager_row_step(rule), dynamic=True, fullgraph=True)
    seen: set[tuple[object, ...]] = set()

    def step(numbers: StepNumbers, state: Sequence[Tensor], rows: Tensor, gradient: Tensor) -> None:
        if rows.numel() == 1:
            # torch.compile specialises on size 1; a row stepped twice from the same numbers is the same row.
            rows, gradient = rows.expand(2).contiguous(), gradient.expand(2, -1).contiguous()
            numbers = StepNumbers(*(v if v is None or v.dim() == 0 else v.expand(2, 1) for v in numbers))  # type: ignore[arg-type]
        kind = (state[0].device.type, state[0].shape[1] == 1, *(None if v is None else v.dim() for v in numbers))
        if kind in seen:
            compiled(numbers, state, rows, gradient)
            return
        start = time.perf_counter()
        compiled(numbers, state, rows, gradient)
        seen.add(kind)
        _log.info("compiled the %s update in %.1f s", rule.algorithm, time.perf_counter() - start)

    return step


def compiler_found() -> bool:
    """Whether there is a C++ compiler for torch.compile."""
    return any(shutil.which(name) for name in (environ.get("CXX", ""), "g++", "clang++", "c++") if name)
