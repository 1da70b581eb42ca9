"""One optimizer step of some distinct rows, in place: eager, or compiled by torch.compile."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx.experimental import _config as shape_config
from torch.overrides import TorchFunctionMode

from tpuemb_torch.optimizers import StepNumbers, UpdateRule, apply_step

_log = logging.getLogger("tpuemb_torch.kernels")

#: `(numbers, state, rows, gradient)`: steps `rows` (int64 `[n]`, distinct) of `state` (weights and slots,
#: `[buffer rows, dim]` each) with the summed gradients `[n, dim]`.
RowStep = Callable[[StepNumbers, Sequence[Tensor], Tensor, Tensor], None]


class RowStepOf:
    """The step as plain torch operations."""

    def __init__(self, rule: UpdateRule) -> None:
        self.rule = rule

    def __call__(self, numbers: StepNumbers, state: Sequence[Tensor], rows: Tensor, gradient: Tensor) -> None:
        old = [values.index_select(0, rows) for values in state]
        new = apply_step(self.rule, numbers, old[0], gradient, *old[1:])
        for values, value in zip(state, new, strict=True):
            values.index_copy_(0, rows, value)


class EagerRowStep(RowStepOf):
    """The step op by op."""

    def __call__(self, numbers: StepNumbers, state: Sequence[Tensor], rows: Tensor, gradient: Tensor) -> None:
        with RoundedRoots(), np.errstate(invalid="ignore"):
            super().__call__(numbers, state, rows, gradient)


class RoundedRoots(TorchFunctionMode):
    """Square roots on the CPU rounded as IEEE says, and as every compiler has them.

    torch's are MKL's, which may be off in the last bit: eager and compiled steps would differ.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.sqrt and args[0].device.type == "cpu":
            return torch.as_tensor(np.sqrt(args[0].numpy()))
        return func(*args, **(kwargs or {}))


class CompiledRowStep:
    """The step as one compiled function: gather, formula and scatter in a pass over memory.

    One compilation serves all numbers of rows, rates and limits.  The first call compiles (torch keeps the result
    on disk, so that other processes do not) and says so.
    """

    def __init__(self, rule: UpdateRule) -> None:
        self.rule = rule
        self._compiled: RowStep | None = None
        self._seen: set[tuple[object, ...]] = set()

    def __call__(self, numbers: StepNumbers, state: Sequence[Tensor], rows: Tensor, gradient: Tensor) -> None:
        if rows.numel() == 1:
            # torch.compile specialises on size 1; a row stepped twice from the same numbers is the same row.
            rows, gradient = rows.expand(2).contiguous(), gradient.expand(2, -1).contiguous()
            numbers = StepNumbers(*(v if v is None or v.dim() == 0 else v.expand(2, 1) for v in numbers))  # type: ignore[arg-type]
        kind = (state[0].device.type, state[0].shape[1] == 1, *(None if v is None else v.dim() for v in numbers))
        if self._compiled is not None and kind in self._seen:
            self._compiled(numbers, state, rows, gradient)
            return
        start = time.perf_counter()
        if self._compiled is None:
            self._compiled = torch.compile(_own_code(RowStepOf(self.rule)), dynamic=True, fullgraph=True)
        # Sizes that are equal in the first call (rows and columns, say) need not be so in the next.
        with shape_config.patch(use_duck_shape=False):  # type: ignore[attr-defined]
            self._compiled(numbers, state, rows, gradient)
        self._seen.add(kind)
        _log.warning("compiled the %s update in %.1f s", self.rule.algorithm, time.perf_counter() - start)

    def __getstate__(self) -> dict[str, object]:
        # Copies and pickles compile for themselves.
        return {"rule": self.rule, "_compiled": None, "_seen": set()}


def _own_code(step: RowStepOf) -> RowStep:
    """The step's call as a function with a code object of its own.

    torch.compile keeps its results by code object, and only a few: one for all rules would run out of them.
    """
    call = type(step).__call__
    own = FunctionType(call.__code__.replace(), call.__globals__, call.__name__)
    return MethodType(own, step)
