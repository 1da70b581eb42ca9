"""Adagrad with a bounded update and a bounded accumulator."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tpuemb_torch.optimizers.base import Array, Slot, UpdateRule, register


@register("bounded_adagrad")
class BoundedAdagrad(UpdateRule):
    """Adagrad with bounds on the update and on the accumulator.

        b = min(a + g^2, max_accumulator)              (no bound where max_accumulator = 0)
        u = lr * g / sqrt(update_accumulator_first ? b : a)
        w <- w - clamp(u, -max_var_update, max_var_update)    (no bound where max_var_update = 0)
        a <- b

    There is no epsilon. Where the root is 0, u is 0 for g = 0; for another g it is infinite and so takes the
    bound, or is 0 where there is no bound.

    Source: the options and their meanings are the comments of optimization_parameters.proto; no public kernel
    has the formula. That max_var_update bounds the final update (and not the gradient) is our reading of its
    name; the zero root is our choice.
    """

    slots = (Slot("accumulators", initial=0.1),)

    update_accumulator_first: bool = False
    max_var_update: float = 0.0
    max_accumulator: float = 0.0

    def update(self, w: Tensor, g: Tensor, lr: Tensor, *slots: Tensor) -> tuple[Tensor, ...]:
        (a,) = slots
        b = a + g * g
        if self.max_accumulator > 0:
            b = b.clamp(max=self.max_accumulator)
        scale = b if self.update_accumulator_first else a
        step = lr * g
        stays = scale == 0
        if self.max_var_update > 0:
            step = torch.where(stays & (step == 0), 0.0, step / scale.sqrt())
            step = step.clamp(-self.max_var_update, self.max_var_update)
        else:
            step = torch.where(stays, 0.0 * step, step / scale.sqrt())  # 0, but NaN for a NaN gradient
        return w - step, b

    def reference(self, w: Array, g: Array, lr: Array | float, *slots: Array) -> tuple[Array, ...]:
        accumulators = np.minimum(np.square(g) + slots[0], self.max_accumulator if self.max_accumulator > 0 else np.inf)
        root = np.sqrt(accumulators if self.update_accumulator_first else slots[0])
        bound = self.max_var_update if self.max_var_update > 0 else np.inf
        with np.errstate(divide="ignore", invalid="ignore"):
            size = np.minimum(np.abs(g) / root * lr, bound)
        at_zero = 0.0 if np.isinf(bound) else bound * np.sign(np.abs(g) * lr)
        return w - np.sign(g) * np.where(root == 0.0, at_zero, size), accumulators
