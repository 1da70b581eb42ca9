"""FTRL-proximal."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tpuemb_torch.optimizers.base import Array, Slot, UpdateRule, register


@register("ftrl")
class Ftrl(UpdateRule):
    """FTRL-proximal. With p = -lr_power and b = a + g^2:

        multiply_linear_by_lr = false                  multiply_linear_by_lr = true
        z <- z + g - (b^p - a^p) / lr * w              z <- z + lr * g - (b^p - a^p) * w
        threshold = l1                                 threshold = lr * l1
        d = (b^p + beta) / lr + 2 * l2                 d = b^p + beta + 2 * lr * l2

        w <- (sign(z) * threshold - z) / d             where |z| > threshold, else 0
        a <- b

    There is no epsilon; beta is its nearest relative and the same as beta / (2 * lr) more l2. l2 counts twice
    (2 * l2), once; there is no l2 shrinkage. Where d is 0, w becomes 0.

    w is computed anew from (a, z), not stepped: the first touch of a row with z = 0 and g = 0 sets it to 0,
    whatever it was. With lr = 0 the left form divides by 0 as TensorFlow does: g = 0 makes z NaN and w 0,
    another g makes z infinite and w NaN. The right form stays finite and is the one for a warm-up from 0.
    `allow_zero_accumulator` is deprecated and has no effect: a zero accumulator always works.

    Source: ApplyFtrlV2 in TensorFlow's tensorflow/core/kernels/training_ops.cc; beta and the multiplied form
    also in optimization_parameters.proto and in the FTRL kernel of tensorflow/core/tpu/kernels/
    sparse_core_xla_ops.cc. These two differ where there is a NaN: with d = 0 the latter gives NaN where select
    and w = 0 is our choice; with z NaN (from a NaN gradient) the former gives 0, and NaN is our choice.
    """

    op_name = "FTRL"
    slots = (Slot("accumulators", initial=0.1), Slot("linears", initial=0.0))

    l1: float = 0.0
    l2: float = 0.0
    lr_power: float = 0.0
    multiply_linear_by_lr: bool = False
    beta: float = 0.0
    allow_zero_accumulator: bool = False

    def update(self, w: Tensor, g: Tensor, lr: Tensor, *slots: Tensor) -> tuple[Tensor, ...]:
        a, z = slots
        b = a + g * g
        a_power, b_power = self._power(a), self._power(b)
        if self.multiply_linear_by_lr:
            z = z + lr * g - (b_power - a_power) * w
            threshold: Tensor | float = lr * self.l1
            denominator = b_power + self.beta + 2.0 * self.l2 * lr
        else:
            z = z + g - (b_power - a_power) / lr * w
            threshold = self.l1
            denominator = (b_power + self.beta) / lr + 2.0 * self.l2
        zero = (z.abs() <= threshold) | (denominator == 0)
        if not self.multiply_linear_by_lr:
            zero = zero | ((lr == 0) & z.isnan())  # as in TensorFlow; every other NaN must show in w
        return torch.where(zero, 0.0, (z.sign() * threshold - z) / denominator), b, z

    def _power(self, a: Tensor) -> Tensor:
        return a.sqrt() if self.lr_power == -0.5 else a.pow(-self.lr_power)

    def reference(self, w: Array, g: Array, lr: Array | float, *slots: Array) -> tuple[Array, ...]:
        accumulators, linears = slots
        total = accumulators + np.square(g)
        with np.errstate(divide="ignore", invalid="ignore"):
            growth = np.power(total, -self.lr_power) - np.power(accumulators, -self.lr_power)
            # Both forms are one in units where the linear term has the factor `unit`.
            unit, rate = (lr, 1.0) if self.multiply_linear_by_lr else (1.0, lr)
            linears = linears + (unit * g - growth * w / rate)
            quadratic = (np.power(total, -self.lr_power) + self.beta) / rate + 2.0 * self.l2 * unit
            shrunk = np.where(linears > 0.0, linears - self.l1 * unit, linears + self.l1 * unit)
            solution = -shrunk / quadratic
        # With rate = 0 TensorFlow's comparison |z| > l1 is false for the NaN that 0 / 0 left in z.
        zero = (np.abs(linears) <= self.l1 * unit) | (quadratic == 0.0) | ((rate == 0.0) & np.isnan(linears))
        return np.where(zero, 0.0, solution), total, linears
