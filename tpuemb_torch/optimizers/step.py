"""The step around an update rule: gradient clipping, weight decay, the rule, weight clipping."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tpuemb_torch.config.schema import Limits, Optimizer
from tpuemb_torch.optimizers.base import Array, UpdateRule, create_rule


class StepNumbers(NamedTuple):
    """The numbers of a step, each float32, 0-dim or `[rows, 1]` where the rows belong to several tables.

    They are tensors so that a compiled step serves every value. None leaves a stage out for all rows; a single
    row goes without by a bound that is infinite or a decay of 0.
    """

    lr: Tensor
    #: Weight decay factor, already multiplied by the learning rate where the configuration asks for it.
    decay: Tensor | None = None
    gradient_lower: Tensor | None = None
    gradient_upper: Tensor | None = None
    weight_lower: Tensor | None = None
    weight_upper: Tensor | None = None
    #: The step counter of frequency_aware_adagrad.
    step: Tensor | None = None


def apply_step(rule: UpdateRule, numbers: StepNumbers, w: Tensor, g: Tensor, *slots: Tensor) -> tuple[Tensor, ...]:
    """Returns the weights and slots of the rows after one step.

    The order is: clip the summed gradient, decay the weights (w <- w - decay * w), apply the rule, clip the
    weights. NaN gradients and weights pass through both clippings.

    Args:
        rule: the optimizer's rule.
        numbers: learning rate, weight decay and limits.
        w: weights, `[rows, dim]` float32.
        g: gradients, `[rows, dim]` float32, summed over the global batch.
        slots: slot values, each `[rows, dim]` float32, in the order of `rule.slots`.

    Source: the stages are the fields of optimization_parameters.proto. Decay before the rule and without the
    learning rate is DecoupledWeightDecayExtension of weight_decay_optimizers.py, which the proto refers to.
    """
    g = _clip(g, numbers.gradient_lower, numbers.gradient_upper)
    if numbers.decay is not None:
        # Selected, so that rows without decay keep every bit: -0.0 - 0 * -0.0 is +0.0, and 0 * inf is NaN.
        w = torch.where(numbers.decay == 0, w, w - numbers.decay * w)
    update: Callable[..., tuple[Tensor, ...]] = rule.update
    if "step" in rule.dynamic_inputs:
        w, *slots_new = update(w, g, numbers.lr, *slots, step=numbers.step)
    else:
        w, *slots_new = update(w, g, numbers.lr, *slots)
    return _clip(w, numbers.weight_lower, numbers.weight_upper), *slots_new


def _clip(x: Tensor, lower: Tensor | None, upper: Tensor | None) -> Tensor:
    return x if lower is None and upper is None else torch.clamp(x, min=lower, max=upper)


def reference_step(
    optimizer: Optimizer, w: Array, g: Array, lr: Array | float, *slots: Array, step: Array | float | None = None
) -> tuple[Array, ...]:
    """The oracle of `apply_step`: the same in float64 NumPy, straight from the configuration.

    Args:
        optimizer: the table's optimizer; limits, decay and hyper-parameters come from here.
        w: weights, `[rows, dim]`.
        g: gradients, `[rows, dim]`, summed over the global batch.
        lr: learning rate of this step.
        slots: slot values in the order of the algorithm's slots.
        step: step counter, where the algorithm has one.
    """
    rule = create_rule(optimizer)
    w, g, lr, *slots_old = (np.asarray(x, dtype=np.float64) for x in (w, g, lr, *slots))
    g = _reference_clip(g, optimizer.gradient_clipping_limits)
    factor = optimizer.weight_decay_factor
    if factor != 0.0:
        w = w * (1.0 - (factor * lr if optimizer.multiply_weight_decay_factor_by_learning_rate else factor))
    extra = {"step": np.asarray(step, dtype=np.float64)} if "step" in rule.dynamic_inputs else {}
    reference: Callable[..., tuple[Array, ...]] = rule.reference
    w, *slots_new = reference(w, g, lr, *slots_old, **extra)
    return _reference_clip(w, optimizer.clipping_limits), *slots_new


def _reference_clip(x: Array, limits: Limits) -> Array:
    x = np.where(x < limits.lower, limits.lower, x)
    return np.where(x > limits.upper, limits.upper, x)
