"""Momentum."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from tpuemb_torch.optimizers.base import Array, Slot, UpdateRule, register


@register("momentum")
class Momentum(UpdateRule):
    """Gradient descent with momentum.

        m <- momentum * m + g
        w <- w - lr * m                                use_nesterov = false
        w <- w - lr * (g + momentum * m)               use_nesterov = true (the new m)

    The learning rate is not part of m. No epsilon.

    Source: ApplyMomentum in TensorFlow's tensorflow/core/kernels/training_ops.cc.
    """

    op_name = "Momentum"
    slots = (Slot("momenta", initial=0.0),)

    momentum: float = 0.0
    use_nesterov: bool = False

    def update(self, w: Tensor, g: Tensor, lr: Tensor, *slots: Tensor) -> tuple[Tensor, ...]:
        (m,) = slots
        m = self.momentum * m + g
        return w - lr * (g + self.momentum * m if self.use_nesterov else m), m

    def reference(self, w: Array, g: Array, lr: Array | float, *slots: Array) -> tuple[Array, ...]:
        momenta = np.add(g, np.multiply(slots[0], self.momentum))
        if self.use_nesterov:  # g + mu * (mu * m + g), expanded
            return w - lr * ((1.0 + self.momentum) * g + self.momentum**2 * slots[0]), momenta
        return w - momenta * lr, momenta
