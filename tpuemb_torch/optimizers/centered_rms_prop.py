"""Centered RMSProp."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from tpuemb_torch.optimizers.base import Array, Slot, UpdateRule, register


@register("centered_rms_prop")
class CenteredRmsProp(UpdateRule):
    """RMSProp with the variance in place of the mean square.

        ms <- rho * ms + (1 - rho) * g^2
        mg <- rho * mg + (1 - rho) * g
        mom <- momentum * mom + lr * g / sqrt(ms - mg^2 + epsilon)      (the new ms and mg)
        w <- w - mom                                                    (the new mom)

    Epsilon is added inside the root, not squared. The slots are in the order ms, mom, mg. There is no guard:
    a variance that is not positive, possible only in inconsistent loaded state or with epsilon = 0, gives NaN or
    an infinite step.

    Source: ApplyCenteredRMSProp in TensorFlow's tensorflow/core/kernels/training_ops.cc.
    """

    op_name = "CenteredRMSProp"
    slots = (Slot("ms", initial=1.0), Slot("mom", initial=0.0), Slot("mg", initial=0.0))

    rho: float = 0.0
    momentum: float = 0.0
    epsilon: float = 0.0

    def update(self, w: Tensor, g: Tensor, lr: Tensor, *slots: Tensor) -> tuple[Tensor, ...]:
        ms, mom, mg = slots
        ms = self.rho * ms + (1.0 - self.rho) * (g * g)
        mg = self.rho * mg + (1.0 - self.rho) * g
        mom = self.momentum * mom + lr * g / (ms - mg * mg + self.epsilon).sqrt()
        return w - mom, ms, mom, mg

    def reference(self, w: Array, g: Array, lr: Array | float, *slots: Array) -> tuple[Array, ...]:
        mean_square = slots[0] + (1.0 - self.rho) * (np.square(g) - slots[0])
        mean = slots[2] + (1.0 - self.rho) * (g - slots[2])
        with np.errstate(divide="ignore", invalid="ignore"):
            momentum = slots[1] * self.momentum + g / np.sqrt(self.epsilon - np.square(mean) + mean_square) * lr
        return w - momentum, mean_square, momentum, mean
