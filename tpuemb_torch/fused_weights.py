"""Weights of tables as `parameters()` shows them, and what others do with all parameters of a model.

A table is trained by its own optimizer in the backward pass, and its weight has no gradient.  Optimizers and
`torch.nn.utils.clip_grad_norm_`, given `model.parameters()`, pass over it: that is warned of, once a table.
DistributedDataParallel takes it for a copy of what the other ranks have: that is refused.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary
from torchrec.optim.fused import EmptyFusedOptimizer

from tpuemb_torch.config import Table

#: Modules whose functions clip gradients, and read them for nothing else.
_CLIPPING = ("torch.nn.utils.clip_grad", "torchrec.optim.clipping")


class OutsideUse:
    """Warns, once, that something from outside has no effect on a table."""

    def __init__(self, table: Table) -> None:
        self._table, self._algorithm, self._warned = table.name, table.optimizer.algorithm, False

    def warn(self, by: str) -> None:
        """Warns that `by` has no effect on the table, unless something was warned of before."""
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            f"table {self._table!r}: {by} was given its weight and has no effect on it. It is trained in the backward "
            f"pass by its own fused optimizer ({self._algorithm}): set its rate and gradient_clipping_limits in the "
            "configuration, and give the optimizer what torchrec.optim.optimizers.in_backward_optimizer_filter("
            "model.named_parameters()) leaves",
            stacklevel=3,
        )


class NoticesClipping:
    """Mixed into a parameter: `grad` tells the parameter's `OutsideUse` where it is read to be clipped."""

    @property
    def grad(self) -> Tensor | None:
        if sys._getframe(1).f_globals.get("__name__") in _CLIPPING:
            use = _USES.get(self)
            if use is not None:
                use.warn("gradient clipping")
        gradient: Tensor | None = super().grad  # type: ignore[misc]
        return gradient

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        super(NoticesClipping, type(self)).grad.__set__(self, gradient)  # type: ignore[misc]

    @grad.deleter
    def grad(self) -> None:
        super(NoticesClipping, type(self)).grad.__delete__(self)  # type: ignore[misc]


class FusedWeight(NoticesClipping, nn.Parameter):  # type: ignore[misc]
    """The weight of a table, or what stands for it where the process has no part of it."""

    @property
    def _in_backward_optimizers(self) -> list[EmptyFusedOptimizer]:
        """As TorchRec marks fused weights, so that `in_backward_optimizer_filter` leaves them out."""
        if sys._getframe(1).f_globals.get("__name__") == DistributedDataParallel.__module__:
            # It would hand all of the model's gradients to optimizers that overlap with its own reduction.
            raise AttributeError
        return [EmptyFusedOptimizer()]


#: Weights that the program still holds.
_USES: Any = WeakTensorKeyDictionary()
#: How many parameter groups of an optimizer have been looked through.
_LOOKED_THROUGH: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
#: Tables whose weights a DistributedDataParallel has not been told to ignore.
_REPLICATED: WeakKeyDictionary[DistributedDataParallel, set[OutsideUse]] = WeakKeyDictionary()
_hook: RemovableHandle | None = None


def watch(weight: nn.Parameter, use: OutsideUse) -> None:
    """Has `use` warn when an optimizer with this weight is stepped, or clipping reads its gradient."""
    global _hook
    if _hook is None:
        _hook = register_optimizer_step_pre_hook(_before_step)
    _USES[weight] = use


def check_not_replicated(uses: Iterable[OutsideUse], what: str) -> None:
    """Raises RuntimeError in the forward of a DistributedDataParallel over several ranks that has these tables.

    Args:
        uses: those of one collection.
        what: what DistributedDataParallel does to the tables.
    """
    replicated = DistributedDataParallel._active_ddp_module
    if replicated is not None:
        _check_not_replicated(replicated, uses, what)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _check_not_replicated(replicated: DistributedDataParallel, uses: Iterable[OutsideUse], what: str) -> None:
    if replicated.process_group.size() == 1:
        return
    if replicated not in _REPLICATED:
        found = (_USES.get(parameter) for parameter in replicated._module_parameters)
        _REPLICATED[replicated] = {use for use in found if use is not None}
    if not _REPLICATED[replicated].isdisjoint(uses):
        raise RuntimeError(
            f"the model is in DistributedDataParallel, which {what}: use torchrec.distributed.DistributedModelParallel("
            "model, sharders=tpuemb_torch.sharders()), which shards the tables and keeps the other parameters in step"
        )


def _before_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    """Called by torch before each step of any optimizer; does something before the first."""
    if torch.compiler.is_compiling():
        return
    count = len(optimizer.param_groups)
    if _LOOKED_THROUGH.get(optimizer) == count:
        return
    _LOOKED_THROUGH[optimizer] = count
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            use = _USES.get(parameter)
            if use is not None:
                use.warn(f"the optimizer {type(optimizer).__name__}")
