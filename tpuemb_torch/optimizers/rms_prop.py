"""RMSProp."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tpuemb_torch.optimizers.base import Array, Slot, UpdateRule, register


@register("rms_prop")
class RmsProp(UpdateRule):
    """RMSProp with momentum.

        ms <- rho * ms + (1 - rho) * g^2
        mom <- momentum * mom + lr * g / sqrt(ms + epsilon)      (the new ms)
        w <- w - mom                                             (the new mom)

    Epsilon is added inside the root, not squared. The learning rate is part of mom. Where ms + epsilon is 0 the
    gradient's part of mom is 0.

    Source: ApplyRMSProp in TensorFlow's tensorflow/core/kernels/training_ops.cc. That kernel gives NaN for
    0 / 0; a step of 0 is our choice.
    """

    op_name = "RMSProp"
    slots = (Slot("ms", initial=1.0), Slot("mom", initial=0.0))

    rho: float = 0.0
    momentum: float = 0.0
    epsilon: float = 0.0

    def update(self, w: Tensor, g: Tensor, lr: Tensor, *slots: Tensor) -> tuple[Tensor, ...]:
        ms, mom = slots
        ms = self.rho * ms + (1.0 - self.rho) * (g * g)
        square = ms + self.epsilon
        mom = self.momentum * mom + torch.where(square == 0, 0.0, lr * g / square.sqrt())
        return w - mom, ms, mom

    def reference(self, w: Array, g: Array, lr: Array | float, *slots: Array) -> tuple[Array, ...]:
        mean_square = slots[0] + (1.0 - self.rho) * (np.square(g) - slots[0])
        with np.errstate(divide="ignore", invalid="ignore"):
            normalised = np.power(mean_square + self.epsilon, -0.5) * g
        momentum = slots[1] * self.momentum + lr * np.where(mean_square + self.epsilon == 0.0, 0.0, normalised)
        return w - momentum, mean_square, momentum
