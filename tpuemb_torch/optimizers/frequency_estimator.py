"""An estimator of how often an id occurs."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tpuemb_torch.optimizers.base import Array, Slot, UpdateRule, register


@register("frequency_estimator")
class FrequencyEstimator(UpdateRule):
    """Estimates the number of steps between two occurrences of an id. D is the weight, h is last_hit_step:

        delta = step - h
        D <- min(delta, max_delta)                               where delta >= outlier_threshold * D
        D <- (1 - tau) * D + tau * min(delta, max_delta)         otherwise
        h <- step

    `step`, the global step, is the value of the learning-rate input. The gradient is not used. Nor is
    weight_exponent: it describes how a reader turns D into a weight, (D / max_delta)^weight_exponent.

    Source: the comment in optimization_parameters.proto. That lookups return D, not that weight, is our choice.
    """

    op_name = "FrequencyEstimator"
    slots = (Slot("last_hit_step", initial=0.0),)

    tau: float = 0.0
    max_delta: float = 0.0
    outlier_threshold: float = 0.0
    weight_exponent: float = 0.0

    def update(self, w: Tensor, g: Tensor, lr: Tensor, *slots: Tensor) -> tuple[Tensor, ...]:
        (h,) = slots
        step = lr.expand_as(h)
        delta = step - h
        capped = delta.clamp(max=self.max_delta)
        outlier = delta >= self.outlier_threshold * w
        return torch.where(outlier, capped, (1.0 - self.tau) * w + self.tau * capped), step.clone()

    def reference(self, w: Array, g: Array, lr: Array | float, *slots: Array) -> tuple[Array, ...]:
        step = np.zeros_like(w) + lr
        elapsed = step - slots[0]
        capped = np.where(elapsed > self.max_delta, self.max_delta, elapsed)
        rate = np.where(elapsed - self.outlier_threshold * w >= 0.0, 1.0, self.tau)
        return w + rate * (capped - w), step
