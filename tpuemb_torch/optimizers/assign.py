"""Assignment."""

from __future__ import annotations

from torch import Tensor

from tpuemb_torch.optimizers.base import Array, UpdateRule, register


@register("assign")
class Assign(UpdateRule):
    """The summed gradient becomes the weight: w <- g. The learning rate is not used. No slots, no epsilon.

    Source: optimization_parameters.proto. That the sum over several occurrences is assigned, not an arbitrary
    one of them, is our choice.
    """

    def update(self, w: Tensor, g: Tensor, lr: Tensor, *slots: Tensor) -> tuple[Tensor, ...]:
        return (g.clone(),)

    def reference(self, w: Array, g: Array, lr: Array | float, *slots: Array) -> tuple[Array, ...]:
        return (g.copy(),)
