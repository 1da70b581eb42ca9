"""Adagrad with learning rates that grow for rare ids."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tpuemb_torch.optimizers.base import Array, Slot, UpdateRule, register


@register("frequency_aware_adagrad")
class FrequencyAwareAdagrad(UpdateRule):
    """Adagrad whose learning rate is larger for ids that occur rarely.

        n <- n + 1                                     (counters: steps that touched the row)
        a <- max(accumulator_decay * a + g^2, initial_accumulator_value)
        scale = min((max(step, 1) / n)^probability_exponent, max_lr_multiplier)
        w <- w - lr * (scale * g / sqrt(a) + l1 * sign(w) + l2 * w)      (the old w; sign(0) = 0)

    There is no epsilon: initial_accumulator_value is the floor of the accumulator. Where the new a is 0 the
    gradient's part of the step is 0. `step` comes from the dynamic input that step_counter names. Unset fields
    are literal zeros: accumulator_decay = 0 keeps no memory, max_lr_multiplier = 0 takes no gradient step.

    Source: the comment in optimization_parameters.proto for decay, floor, cap and regularisation. Its ratio
    (step over accumulator) and last line (multiplying twice) cannot be meant; there we follow the F2A optimizer
    of jax-tpu-embedding (step over counter, one learning rate, step at least 1). Slots start as in the latter.
    The combination is our choice.
    """

    slots = (Slot("accumulators", initial=0.1), Slot("counters", initial=0.0))
    dynamic_inputs = ("lr", "step")

    l1_regularization_strength: float = 0.0
    l2_regularization_strength: float = 0.0
    max_lr_multiplier: float = 0.0
    probability_exponent: float = 0.0
    accumulator_decay: float = 0.0
    initial_accumulator_value: float = 0.0

    def update(
        self, w: Tensor, g: Tensor, lr: Tensor, *slots: Tensor, step: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        a, n = slots
        if step is None:
            raise TypeError("frequency_aware_adagrad needs the value of its step counter: pass step=")
        n = n + 1.0
        a = (self.accumulator_decay * a + g * g).clamp(min=self.initial_accumulator_value)
        scale = (step.clamp(min=1.0) / n).pow(self.probability_exponent).clamp(max=self.max_lr_multiplier)
        direction = torch.where(a == 0, 0.0, scale * g / a.sqrt())
        if self.l1_regularization_strength > 0:
            direction = direction + self.l1_regularization_strength * w.sign()
        if self.l2_regularization_strength > 0:
            direction = direction + self.l2_regularization_strength * w
        return w - lr * direction, a, n

    def reference(
        self, w: Array, g: Array, lr: Array | float, *slots: Array, step: Array | float | None = None
    ) -> tuple[Array, ...]:
        if step is None:
            raise TypeError("frequency_aware_adagrad needs the value of its step counter: pass step=")
        counters = 1.0 + slots[1]
        accumulators = np.maximum(self.initial_accumulator_value, np.square(g) + slots[0] * self.accumulator_decay)
        rarity = np.exp(self.probability_exponent * (np.log(np.maximum(1.0, step)) - np.log(counters)))
        with np.errstate(divide="ignore", invalid="ignore"):
            adaptive = np.minimum(self.max_lr_multiplier, rarity) * np.power(accumulators, -0.5) * g
        moved = w - lr * np.where(accumulators == 0.0, 0.0, adaptive)
        shrink = max(self.l1_regularization_strength, 0.0) * np.sign(w) + max(self.l2_regularization_strength, 0.0) * w
        return moved - lr * shrink, accumulators, counters
