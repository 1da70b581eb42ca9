"""Adagrad."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tpuemb_torch.optimizers.base import Array, Slot, UpdateRule, register


@register("adagrad")
class Adagrad(UpdateRule):
    """Adagrad.

        a <- a + g^2
        w <- w - lr * g / sqrt(a)                      (the new a)

    There is no epsilon: the initial accumulator keeps the root away from 0. Where the new a is 0 (only without
    any gradient so far) w stays.

    Source: ApplyAdagrad in TensorFlow's tensorflow/core/kernels/training_ops.cc. That kernel gives NaN for
    a = g = 0; staying is our choice, since optimization_parameters.proto calls a zero gradient a no-op here.
    """

    op_name = "Adagrad"
    slots = (Slot("accumulators", initial=0.1),)

    def update(self, w: Tensor, g: Tensor, lr: Tensor, *slots: Tensor) -> tuple[Tensor, ...]:
        (a,) = slots
        a = a + g * g
        step = torch.where(a == 0, 0.0, lr * g / a.sqrt())  # == 0, not > 0: a NaN must show in w
        return w - step, a

    def reference(self, w: Array, g: Array, lr: Array | float, *slots: Array) -> tuple[Array, ...]:
        accumulators = np.square(g) + slots[0]
        with np.errstate(divide="ignore", invalid="ignore"):
            scale = lr * np.power(accumulators, -0.5)
            moved = w - scale * g
        return np.where(accumulators == 0.0, w, moved), accumulators
