"""FTRL with the second moment of Yogi."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tpuemb_torch.optimizers.base import Array, Slot, UpdateRule, register


@register("online_yogi")
class OnlineYogi(UpdateRule):
    """FTRL-proximal with Yogi's second moment as the accumulator.

        u = v + (1 - beta2) * s * g^2                  s = 1 where g^2 >= v, else -1
        z <- z + g - (sqrt(u) - sqrt(v)) / lr * w
        d = sqrt(u) / lr + 2 * l2
        w <- (sign(z) * l1 - z) / d                    where |z| > l1, else 0
        v <- u

    There is no epsilon. Where d is 0, w becomes 0. As in FTRL, w is computed anew from (v, z), l2 counts once as
    2 * l2, and lr = 0 divides by 0 (NaN shows in w).

    Source: optimization_parameters.proto says only that this extends FTRL with the second moment of Yogi's
    algorithm 2, with l1 and l2 as in FTRL. The formula is our choice of what that means; no public code has it.
    """

    slots = (Slot("vs", initial=0.1), Slot("linears", initial=0.0))

    l1: float = 0.0
    l2: float = 0.0
    beta2: float = 0.0

    def update(self, w: Tensor, g: Tensor, lr: Tensor, *slots: Tensor) -> tuple[Tensor, ...]:
        v, z = slots
        square = g * g
        u = v + (1.0 - self.beta2) * torch.where(square >= v, square, -square)
        z = z + g - (u.sqrt() - v.sqrt()) / lr * w
        denominator = u.sqrt() / lr + 2.0 * self.l2
        zero = (z.abs() <= self.l1) | (denominator == 0)
        return torch.where(zero, 0.0, (z.sign() * self.l1 - z) / denominator), u, z

    def reference(self, w: Array, g: Array, lr: Array | float, *slots: Array) -> tuple[Array, ...]:
        old, linears = slots
        square = np.square(g)
        new = old + np.where(square < old, -1.0, 1.0) * (1.0 - self.beta2) * square
        with np.errstate(divide="ignore", invalid="ignore"):
            linears = linears + g - w * (np.sqrt(new) - np.sqrt(old)) / lr
            quadratic = np.sqrt(new) / lr + 2.0 * self.l2
            solution = (np.clip(linears, -self.l1, self.l1) - linears) / quadratic
        return np.where((np.abs(linears) <= self.l1) | (quadratic == 0.0), 0.0, solution), new, linears
