"""Simulated quantization of looked-up rows."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tpuemb_torch.optimizers.base import Array


def quantize(x: Tensor, lower: Tensor | float, upper: Tensor | float, num_buckets: Tensor | float) -> Tensor:
    """Returns the nearest of `num_buckets` values, evenly spaced in [lower, upper].

        q = (upper - lower) / (num_buckets - 1)
        y = floor((clip(x, lower, upper) - lower) / q + 1/2) * q + lower

    A value half-way between two goes up. NaN stays NaN. It acts on gathered rows, before weighting and
    combining; the gradient passes as if it were not there.

    Args:
        x: rows, `[rows, dim]` float32.
        lower: smallest value, finite; 0-dim or `[rows, 1]`.
        upper: largest value, finite, > lower; 0-dim or `[rows, 1]`.
        num_buckets: number of values, >= 2; 0-dim or `[rows, 1]`. Rows with 0 are returned as they are.

    Source: SimulatedQuantization in TensorFlow's optimization_parameters.proto.
    """
    lower, upper, num_buckets = (
        torch.as_tensor(n, dtype=x.dtype, device=x.device) for n in (lower, upper, num_buckets)
    )
    q = (upper - lower) / (num_buckets - 1.0)
    bucket = torch.floor((x.clamp(lower, upper) - lower) / q + 0.5)
    return torch.where(num_buckets == 0, x, bucket * q + lower)


def quantize_reference(x: Array, lower: float, upper: float, num_buckets: int) -> Array:
    """The same in float64 NumPy: counts the bucket boundaries at or below each element."""
    levels = np.linspace(lower, upper, num_buckets, dtype=np.float64)
    boundaries = (np.arange(num_buckets - 1) + 0.5) * ((upper - lower) / (num_buckets - 1)) + lower
    nearest = levels[np.searchsorted(boundaries, x, side="right")]
    return np.where(np.isnan(x), np.nan, nearest)
