"""An approximation of MDL Adagrad Light, whose formula is not public."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tpuemb_torch.optimizers.base import Array, Slot, UpdateRule, register


@register("mdl_adagrad_light")
class MdlAdagradLight(UpdateRule):
    """Experimental: an approximation of MDL Adagrad Light.  Nothing should depend on its numbers.

        a <- a + g^2;  r = lr * a^lr_power
        v <- v - r * (g + 2 * l2 * v)                                   (slot "weights")
        e = clamp(g * w - r * g^2 / 2, -max_event_benefit, max_event_benefit)              (the old w)
        b <- clamp(b + e, -max_total_benefit, max_total_benefit)        (slot "benefits")
        w <- v * max(mdl_min_weight, sigmoid(mdl_benefit_rampup_coeff * (b - min_servable_mdl_benefit)))

    With lr_power < 0, r is 0 where the new a is 0.  There is no epsilon.  mdl_mix_in_margin, benefit_revisit_scale,
    mdl_hard_limit, hard_limit_min_benefit and mdl_regularize are not used.

    Source: none gives the formula.  The slots are those of TensorFlow's
    tensorflow/core/tpu/tpu_embedding_optimization_parameters_utils.cc, the options those of
    optimization_parameters.proto, which calls the algorithm a variant of Shamir, "Minimum Description Length (MDL)
    Regularization for Online Learning" (PMLR 44, 2015): a weight is scaled by the benefit that its feature has shown,
    bounded per event and in total.  The benefit there is a difference of losses, which an embedding does not see; the
    second-order estimate e, and all else above, is our choice.
    """

    op_name = "MDLAdagradLight"
    slots = (Slot("accumulators", initial=0.1), Slot("weights", initial=0.0), Slot("benefits", initial=0.0))
    untrainable_reason = "no public text gives the formula of its update"

    l2: float = 0.0
    lr_power: float = 0.0
    min_servable_mdl_benefit: float = 0.0
    mdl_mix_in_margin: float = 0.0
    mdl_benefit_rampup_coeff: float = 0.0
    mdl_min_weight: float = 0.0
    benefit_revisit_scale: float = 0.0
    max_event_benefit: float = 0.0
    max_total_benefit: float = 0.0
    mdl_hard_limit: float = 0.0
    hard_limit_min_benefit: bool = False
    mdl_regularize: bool = False

    def update(self, w: Tensor, g: Tensor, lr: Tensor, *slots: Tensor) -> tuple[Tensor, ...]:
        a, v, b = slots
        a = a + g * g
        rate = lr * a.pow(self.lr_power)
        if self.lr_power < 0:
            rate = torch.where(a == 0, 0.0, rate)
        event = (g * w - 0.5 * rate * g * g).clamp(-self.max_event_benefit, self.max_event_benefit)
        v = v - rate * (g + 2.0 * self.l2 * v)
        b = (b + event).clamp(-self.max_total_benefit, self.max_total_benefit)
        shown = torch.sigmoid(self.mdl_benefit_rampup_coeff * (b - self.min_servable_mdl_benefit))
        return v * shown.clamp(min=self.mdl_min_weight), a, v, b

    def reference(self, w: Array, g: Array, lr: Array | float, *slots: Array) -> tuple[Array, ...]:
        accumulators, weights, benefits = np.square(g) + slots[0], slots[1], slots[2]
        rate = lr * np.exp(self.lr_power * np.log(np.where(accumulators == 0.0, 1.0, accumulators)))
        rate = np.where((accumulators == 0.0) & (self.lr_power != 0.0), 0.0, rate)
        gain = np.minimum(np.maximum((w - rate * g / 2.0) * g, -self.max_event_benefit), self.max_event_benefit)
        benefits = np.minimum(np.maximum(gain + benefits, -self.max_total_benefit), self.max_total_benefit)
        weights = weights * (1.0 - 2.0 * self.l2 * rate) - rate * g
        odds = np.exp(-self.mdl_benefit_rampup_coeff * (benefits - self.min_servable_mdl_benefit))
        return weights * np.maximum(1.0 / (1.0 + odds), self.mdl_min_weight), accumulators, weights, benefits
