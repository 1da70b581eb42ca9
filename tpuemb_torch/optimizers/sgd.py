"""Stochastic gradient descent."""

from __future__ import annotations

from torch import Tensor

from tpuemb_torch.optimizers.base import Array, UpdateRule, register


@register("stochastic_gradient_descent")
class StochasticGradientDescent(UpdateRule):
    """Stochastic gradient descent: w <- w - lr * g. No slots, no epsilon.

    Source: ApplyGradientDescent in TensorFlow's tensorflow/core/kernels/training_ops.cc.
    """

    op_name = "StochasticGradientDescent"

    def update(self, w: Tensor, g: Tensor, lr: Tensor, *slots: Tensor) -> tuple[Tensor, ...]:
        return (w - lr * g,)

    def reference(self, w: Array, g: Array, lr: Array | float, *slots: Array) -> tuple[Array, ...]:
        return (w + (-g) * lr,)
