"""Lion."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from tpuemb_torch.optimizers.base import Array, Slot, UpdateRule, register


@register("lion")
class Lion(UpdateRule):
    """Lion.

        c = beta1 * m + (1 - beta1) * g                (the old m)
        w <- w - lr * sign(c)                          (sign(0) = 0)
        m <- beta2 * m + (1 - beta2) * g               (the old m)

    No epsilon. With use_non_lazy_lion every row of the table is stepped, those without a lookup with g = 0.

    Source: optimization_parameters.proto. sign(0) = 0 is our choice, as in Keras; so is that the sweep works as
    Adam's.
    """

    slots = (Slot("momenta", initial=0.0),)

    beta1: float = 0.0
    beta2: float = 0.0
    use_non_lazy_lion: bool = False

    def __init__(self, hyperparameters: Mapping[str, float | bool] | None = None) -> None:
        super().__init__(hyperparameters)
        self.sweeps_all_rows = self.use_non_lazy_lion

    def update(self, w: Tensor, g: Tensor, lr: Tensor, *slots: Tensor) -> tuple[Tensor, ...]:
        (m,) = slots
        c = self.beta1 * m + (1.0 - self.beta1) * g
        direction = torch.where(c.isnan(), c, c.sign())  # torch's sign of NaN is 0
        return w - lr * direction, self.beta2 * m + (1.0 - self.beta2) * g

    def reference(self, w: Array, g: Array, lr: Array | float, *slots: Array) -> tuple[Array, ...]:
        momenta = slots[0]
        direction = np.sign(momenta * self.beta1 + g * (1.0 - self.beta1))
        return w - direction * lr, g + (momenta - g) * self.beta2
