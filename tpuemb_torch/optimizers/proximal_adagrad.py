"""Adagrad with proximal regularisation."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tpuemb_torch.optimizers.base import Array, Slot, UpdateRule, register


@register("proximal_adagrad")
class ProximalAdagrad(UpdateRule):
    """Adagrad with proximal L1 and L2 regularisation.

        a <- a + g^2
        r = lr / sqrt(a)                               (the new a)
        p = w - r * g
        w <- sign(p) * max(|p| - r * l1, 0) / (1 + r * l2)

    There is no epsilon. Where the new a is 0, w stays.

    Source: ApplyProximalAdagrad in TensorFlow's tensorflow/core/kernels/training_ops.cc. That kernel gives NaN
    for a = g = 0; staying is our choice.
    """

    op_name = "ProximalAdagrad"
    slots = (Slot("accumulators", initial=0.1),)

    l1: float = 0.0
    l2: float = 0.0

    def update(self, w: Tensor, g: Tensor, lr: Tensor, *slots: Tensor) -> tuple[Tensor, ...]:
        (a,) = slots
        a = a + g * g
        rate = lr / a.sqrt()
        p = w - rate * g
        if self.l1 > 0:
            p = p.sign() * (p.abs() - rate * self.l1).clamp(min=0.0)
        return torch.where(a == 0, w, p / (1.0 + rate * self.l2)), a

    def reference(self, w: Array, g: Array, lr: Array | float, *slots: Array) -> tuple[Array, ...]:
        accumulators = np.square(g) + slots[0]
        root = np.sqrt(accumulators)
        with np.errstate(divide="ignore", invalid="ignore"):
            # Everything times root / lr would divide by lr = 0; times root is enough to keep one division.
            scaled = w * root - lr * g
            shrunk = scaled - np.clip(scaled, -lr * max(self.l1, 0.0), lr * max(self.l1, 0.0))
            solution = shrunk / (root + lr * self.l2)
        return np.where(root == 0.0, w, solution), accumulators
