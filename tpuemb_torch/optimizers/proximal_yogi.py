"""Yogi with proximal regularisation."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tpuemb_torch.optimizers.base import Array, Slot, UpdateRule, register


@register("proximal_yogi")
class ProximalYogi(UpdateRule):
    """Yogi with proximal L1 and L2 regularisation, without bias correction.

        m <- beta1 * m + (1 - beta1) * g
        v <- v + (1 - beta2) * s * g^2                 s = 1 where g^2 >= v, else -1 (the old v)
        r = lr / (sqrt(v) + epsilon)                   (the new v)
        x = w - r * m                                  (the new m)
        w <- 0 where |x| <= r * l1, else (x - sign(x) * r * l1) / (1 + r * l2)

    Epsilon is added outside the root. The slots are in the order v, m. Where the denominator of r is 0 (epsilon =
    0 and v = 0) w stays. Only touched rows are stepped.

    Source: Yogi in TensorFlow Addons' tensorflow_addons/optimizers/yogi.py, less its bias correction, which
    optimization_parameters.proto leaves to a dynamic learning rate. That the TPU's program is the same is not
    proven. s(0) = 1 follows an early form of the proto (copysign; Addons: 0); the zero denominator is our choice.
    """

    op_name = "ProximalYogi"
    slots = (Slot("v", initial=0.1), Slot("m", initial=0.0))

    l1: float = 0.0
    l2: float = 0.0
    beta1: float = 0.0
    beta2: float = 0.0
    epsilon: float = 0.0

    def update(self, w: Tensor, g: Tensor, lr: Tensor, *slots: Tensor) -> tuple[Tensor, ...]:
        v, m = slots
        square = g * g
        m = self.beta1 * m + (1.0 - self.beta1) * g
        v = v + (1.0 - self.beta2) * torch.where(square >= v, square, -square)
        denominator = v.sqrt() + self.epsilon
        rate = lr / denominator
        x = w - rate * m
        if self.l1 > 0:
            x = torch.where(x.abs() <= rate * self.l1, 0.0, x - x.sign() * (rate * self.l1))
        if self.l2 > 0:
            x = x / (1.0 + rate * self.l2)
        return torch.where(denominator == 0, w, x), v, m

    def reference(self, w: Array, g: Array, lr: Array | float, *slots: Array) -> tuple[Array, ...]:
        second, first = slots
        first = first + (1.0 - self.beta1) * (g - first)
        square = np.square(g)
        sign = np.where(square - second < 0.0, -1.0, 1.0)
        second = second + sign * square * (1.0 - self.beta2)
        scale = np.sqrt(second) + self.epsilon
        with np.errstate(divide="ignore", invalid="ignore"):
            scaled = w * scale - lr * first
            threshold = lr * max(self.l1, 0.0)
            shrunk = np.maximum(scaled - threshold, 0.0) + np.minimum(scaled + threshold, 0.0)
            solution = shrunk / (scale + lr * max(self.l2, 0.0))
        return np.where(scale == 0.0, w, solution), second, first
