"""Adadelta."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tpuemb_torch.optimizers.base import Array, Slot, UpdateRule, register


@register("adadelta")
class Adadelta(UpdateRule):
    """Adadelta.

        a <- rho * a + (1 - rho) * g^2
        u = sqrt(d + epsilon) / sqrt(a + epsilon) * g            (the new a, the old d)
        w <- w - lr * u
        d <- rho * d + (1 - rho) * u^2

    Epsilon is added inside both roots, not squared. d is the slot `updates`. Where a + epsilon is 0, u is 0.

    Source: ApplyAdadelta in TensorFlow's tensorflow/core/kernels/training_ops.cc. That kernel gives NaN for
    0 / 0; u = 0 is our choice.
    """

    op_name = "Adadelta"
    slots = (Slot("accumulators", initial=0.0), Slot("updates", initial=0.0))

    rho: float = 0.0
    epsilon: float = 0.0

    def update(self, w: Tensor, g: Tensor, lr: Tensor, *slots: Tensor) -> tuple[Tensor, ...]:
        a, d = slots
        a = self.rho * a + (1.0 - self.rho) * (g * g)
        square = a + self.epsilon
        u = torch.where(square == 0, 0.0, (d + self.epsilon).sqrt() * g / square.sqrt())
        return w - lr * u, a, self.rho * d + (1.0 - self.rho) * (u * u)

    def reference(self, w: Array, g: Array, lr: Array | float, *slots: Array) -> tuple[Array, ...]:
        accumulators = slots[0] + (1.0 - self.rho) * (np.square(g) - slots[0])
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.sqrt((slots[1] + self.epsilon) / (accumulators + self.epsilon))
            change = np.where(accumulators + self.epsilon == 0.0, 0.0, ratio * g)
        return w - change * lr, accumulators, slots[1] + (1.0 - self.rho) * (np.square(change) - slots[1])
