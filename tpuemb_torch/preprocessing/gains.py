"""Combiners: the gain of every id of every bag, computed once before ids are distributed.

With the gains as per-sample weights, sum, mean and sqrtn are all the same weighted sum, whatever the sharding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

COMBINERS = ("sum", "mean", "sqrtn")


def combiner_codes(combiners: Sequence[str]) -> Tensor:
    """int8 `[n]` codes of combiner names, for `gains`."""
    return torch.tensor([COMBINERS.index(name) for name in combiners], dtype=torch.int8)


def gains(weights: Tensor | None, lengths: Tensor, codes: Tensor) -> Tensor:
    """Gains of ids laid out bag by bag.

    For one bag with weights w_1..w_k: sum has gain w_j, mean w_j / sum(w), sqrtn w_j / sqrt(sum(w^2)); where the
    denominator is 0, the gain is 0.  Denominators use the raw weights, before any deduplication.  Source:
    TensorFlow's ConvertToCooTensor kernel (tensorflow/core/tpu/kernels/sparse_core_preprocess_ops.cc).

    Args:
        weights: float32 `[n]`, or None for 1.0 each.
        lengths: int64 `[bags]`, their sum is n.
        codes: int8 `[bags]`, combiner of each bag, from `combiner_codes`.

    Returns:
        float32 `[n]`.
    """
    count = int(lengths.sum()) if weights is None else weights.numel()
    bag = torch.repeat_interleave(torch.arange(lengths.numel(), device=lengths.device), lengths, output_size=count)
    # float64: a bag's squares may overflow float32, and k equal weights must cancel exactly.
    if weights is None:
        weight = torch.ones(count, dtype=torch.float64, device=lengths.device)
        total = squares = lengths.double()
    else:
        weight = weights.double()
        total = weight.new_zeros(lengths.numel()).index_add_(0, bag, weight)
        squares = weight.new_zeros(lengths.numel()).index_add_(0, bag, weight * weight)
    one = torch.ones_like(total)
    denominator = torch.where(codes == 1, total, torch.where(codes == 2, squares.sqrt(), one))
    denominator = denominator[bag]
    return torch.where(denominator == 0, 0.0, weight / denominator).float()
