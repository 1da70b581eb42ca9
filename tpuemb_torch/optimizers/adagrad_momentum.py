"""Adagrad with momentum."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from tpuemb_torch.optimizers.base import Array, Slot, UpdateRule, register


@register("adagrad_momentum")
class AdagradMomentum(UpdateRule):
    """Adagrad with momentum, a decaying accumulator and a free exponent.

        a <- a + g^2                                   beta2 = 1
        a <- beta2 * a + (1 - beta2) * g^2             otherwise
        s = g * (a + epsilon)^(-1 / exponent)          (the new a)
        m <- momentum * m + s
        w <- w - lr * m                                use_nesterov = false
        w <- w - lr * (momentum * m + s)               use_nesterov = true (the new m)

    Epsilon is added to the accumulator inside the power, and only there: it is not stored. Where a + epsilon is
    0, s is 0.

    Source: the AdagradMomentum kernel of TensorFlow's tensorflow/core/tpu/kernels/sparse_core_xla_ops.cc and the
    one of jax-tpu-embedding. The comment in optimization_parameters.proto has the gradient outside of the
    momentum; both kernels and TensorFlow's tpu_embedding_base_test.py have it inside. s = 0 for 0 / 0 is our choice.
    """

    op_name = "AdagradMomentum"
    slots = (Slot("accumulators", initial=0.1), Slot("momenta", initial=0.0))

    momentum: float = 0.0
    use_nesterov: bool = False
    exponent: float = 0.0
    beta2: float = 0.0
    epsilon: float = 0.0

    def __init__(self, hyperparameters: Mapping[str, float | bool] | None = None) -> None:
        super().__init__(hyperparameters)
        if not self.exponent > 0.0:
            raise ValueError(f"adagrad_momentum: exponent is {self.exponent}, must be > 0; 2 gives the square root")

    def update(self, w: Tensor, g: Tensor, lr: Tensor, *slots: Tensor) -> tuple[Tensor, ...]:
        a, m = slots
        a = a + g * g if self.beta2 == 1.0 else self.beta2 * a + (1.0 - self.beta2) * (g * g)
        shifted = a + self.epsilon
        root = shifted.sqrt() if self.exponent == 2.0 else shifted.pow(1.0 / self.exponent)
        s = torch.where(shifted == 0, 0.0, g / root)
        m = self.momentum * m + s
        return w - lr * (self.momentum * m + s if self.use_nesterov else m), a, m

    def reference(self, w: Array, g: Array, lr: Array | float, *slots: Array) -> tuple[Array, ...]:
        old_weight, new_weight = (1.0, 1.0) if self.beta2 == 1.0 else (self.beta2, 1.0 - self.beta2)
        accumulators = slots[0] * old_weight + np.square(g) * new_weight
        base = accumulators + self.epsilon
        with np.errstate(divide="ignore", invalid="ignore"):
            scaled = np.where(base == 0.0, 0.0, np.power(base, -1.0 / self.exponent) * g)
        momenta = scaled + slots[1] * self.momentum
        direction = scaled + momenta * self.momentum if self.use_nesterov else momenta
        return w - direction * lr, accumulators, momenta
