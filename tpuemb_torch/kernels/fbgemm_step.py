"""The fused update by FBGEMM's own CPU kernels, for the tables where it computes the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tpuemb_torch.config import Table

_ALGORITHMS = ("stochastic_gradient_descent", "adagrad")
_SUM = 0  # FBGEMM's PoolingMode.SUM
_FLOAT32 = 0  # FBGEMM's SparseType.FP32


def fbgemm_refusal(table: Table, columns: int) -> str | None:
    """Returns why FBGEMM's fused optimizers do not compute what a table's configuration says; None if they do.

    Args:
        table: the table.
        columns: number of columns of the part that is stored.
    """
    optimizer = table.optimizer
    reasons = (
        (optimizer.algorithm not in _ALGORITHMS, f"it has no equal of {optimizer.algorithm}"),
        (optimizer.weight_decay_factor != 0, "it decays through the gradient, not the weight"),
        (optimizer.clipping_limits.active, "it does not clip weights"),
        (optimizer.gradient_clipping_limits.active, "it clips each sample's gradient, not the sum"),
        (optimizer.quantization is not None, "it does not simulate quantization"),
        (not optimizer.accumulates, "it always accumulates gradients over the batch"),
        (columns % 4 != 0, f"its dimensions are multiples of 4, not {columns}"),
    )
    found = "; ".join(text for applies, text in reasons if applies)
    return f'table {table.name!r}: kernel "fbgemm" cannot train it: {found}; use "compiled"' if found else None


class FbgemmStep:
    """The update of one group whose tables have the same rate: FBGEMM's exact SGD or Adagrad (epsilon 0).

    Source: fbgemm_gpu's split_embedding_backward_codegen_{sgd,adagrad}_cpu.  Adagrad divides 0 by 0 where accumulator
    and gradient are 0; so accumulators must be positive, which is checked when they have been written to.
    """

    def __init__(self, algorithm: str) -> None:
        import fbgemm_gpu  # noqa: F401  # registers the operators

        self._adagrad = algorithm == "adagrad"
        self._checked: tuple[int, int] | None = None

    def __call__(
        self,
        rate: Tensor,
        state: Sequence[Tensor],
        ids: Tensor,
        offsets: Tensor,
        gains: Tensor | None,
        gradient: Tensor,
    ) -> None:
        """Steps the rows that were looked up, in place.

        Args:
            rate: float32 0-dim.
            state: weights and slots, float32 `[rows, dim]` each.
            ids: int64 `[n]`, rows.
            offsets: int64 `[features * batch + 1]`.
            gains: float32 `[n]` or None for 1.0 each.
            gradient: float32 `[batch, features * dim]`.

        Raises:
            ValueError: for an accumulator that is not positive.
        """
        rows, dim = state[0].shape
        features = gradient.shape[1] // dim
        zeros = torch.zeros(features, dtype=torch.int64)
        placements = torch.zeros(features, dtype=torch.int32)
        ends = torch.arange(0, features * dim + 1, dim, dtype=torch.int32)
        hash_sizes = torch.cat([zeros, torch.tensor([rows])])
        gains = torch.ones(ids.numel(), dtype=torch.float32) if gains is None else gains
        of_lookup = (state[0].view(-1), placements, zeros, ends, dim, hash_sizes, max(1, (rows - 1).bit_length()))
        of_lookup = (*of_lookup, ids, offsets, _SUM, gains, False)  # type: ignore[assignment]
        if self._adagrad:
            self._check(state[1])
            of_optimizer = (state[1].view(-1), placements, zeros, rate, 0.0)
            torch.ops.fbgemm.split_embedding_backward_codegen_adagrad_cpu(gradient, *of_lookup, *of_optimizer, _FLOAT32)
            self._checked = (state[1].data_ptr(), state[1]._version)
        else:
            torch.ops.fbgemm.split_embedding_backward_codegen_sgd_cpu(gradient, *of_lookup, rate, _FLOAT32)

    def _check(self, accumulators: Tensor) -> None:
        if self._checked == (accumulators.data_ptr(), accumulators._version):
            return
        if accumulators.numel() and float(accumulators.min()) <= 0:
            raise ValueError(
                'kernel "fbgemm" divides by the root of the accumulators: they must be positive, got '
                f'{float(accumulators.min())}; use kernel="compiled", which leaves such rows'
            )
