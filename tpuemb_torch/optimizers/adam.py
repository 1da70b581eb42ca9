"""Adam."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from tpuemb_torch.optimizers.base import Array, Slot, UpdateRule, register


@register("adam")
class Adam(UpdateRule):
    """Adam without bias correction and without a step counter.

        m <- beta1 * m + (1 - beta1) * g
        v <- beta2 * v + (1 - beta2) * g^2
        w <- w - lr * m / (sqrt(v) + epsilon)          use_sum_inside_sqrt = false
        w <- w - lr * m / sqrt(v + epsilon^2)          use_sum_inside_sqrt = true

    Epsilon is added outside the root, or, with use_sum_inside_sqrt, squared and added inside it. Where the
    denominator is 0 (epsilon = 0 and v = 0) w stays. To follow an Adam with bias correction, pass the dynamic
    learning rate lr * sqrt(1 - beta2^t) / (1 - beta1^t).

    With use_non_lazy_adam every row of the table is stepped, those without a lookup with g = 0.

    Source: optimization_parameters.proto (both denominators, the learning rate above, laziness); ApplyAdam in
    TensorFlow's tensorflow/core/kernels/training_ops.cc with beta1_power = beta2_power = 0. That kernel gives
    NaN for a zero denominator; staying is our choice.
    """

    op_name = "ADAM"
    slots = (Slot("momenta", initial=0.0), Slot("velocities", initial=0.0))

    beta1: float = 0.0
    beta2: float = 0.0
    epsilon: float = 0.0
    use_non_lazy_adam: bool = False
    use_sum_inside_sqrt: bool = False

    def __init__(self, hyperparameters: Mapping[str, float | bool] | None = None) -> None:
        super().__init__(hyperparameters)
        self.sweeps_all_rows = self.use_non_lazy_adam

    def update(self, w: Tensor, g: Tensor, lr: Tensor, *slots: Tensor) -> tuple[Tensor, ...]:
        m, v = slots
        m = self.beta1 * m + (1.0 - self.beta1) * g
        v = self.beta2 * v + (1.0 - self.beta2) * (g * g)
        if self.use_sum_inside_sqrt:
            denominator = (v + self.epsilon * self.epsilon).sqrt()
        else:
            denominator = v.sqrt() + self.epsilon
        step = torch.where(denominator == 0, 0.0, lr * m / denominator)
        return w - step, m, v

    def reference(self, w: Array, g: Array, lr: Array | float, *slots: Array) -> tuple[Array, ...]:
        momenta = slots[0] + (1.0 - self.beta1) * (g - slots[0])
        velocities = slots[1] + (1.0 - self.beta2) * (np.square(g) - slots[1])
        rms = np.sqrt(velocities)
        scale = np.hypot(rms, self.epsilon) if self.use_sum_inside_sqrt else rms + self.epsilon
        with np.errstate(divide="ignore", invalid="ignore"):
            moved = w - momenta / scale * lr
        return np.where(scale == 0.0, w, moved), momenta, velocities
