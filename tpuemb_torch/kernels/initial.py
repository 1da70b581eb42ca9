"""Initial weights that depend on (seed, table, row, column) alone: the same for every sharding and world size."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tpuemb_torch.kernels.tables import TablePart

_CHUNK_ELEMENTS = 1 << 20


def _signed(value: int) -> int:
    """The int64 with the bits of a 64-bit unsigned value."""
    return value - (1 << 64) if value >= 1 << 63 else value


# SplitMix64's finalizer (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
_GAMMA = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of int64 bits."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _uniform(counter: Tensor, key: int) -> Tensor:
    """float64 uniforms in (0, 1) from int64 counters."""
    x = (counter + 1) * _GAMMA + key
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    x = x ^ _shift_right(x, 31)
    return (_shift_right(x, 11).double() + 0.5) * 2.0**-53


def initial_weights(out: Tensor, part: TablePart, seed: int) -> None:
    """Fills `out` `[rows, columns]` float32 with the part's initial weights.

    Truncated normal, mean 0, standard deviation 1/sqrt(dimension) before truncation at two deviations: the default
    initializer of TensorFlow's TPU embedding TableConfig (tensorflow/python/tpu/tpu_embedding_v2_utils.py).
    """
    dimension = part.table.dimension
    digest = hashlib.blake2b(f"{seed}/{part.table.name}".encode(), digest_size=8).digest()
    key = int.from_bytes(digest, "little", signed=True)
    # The standard normal's distribution function at -2 and 2.
    low = 0.5 * (1.0 + torch.erf(torch.tensor(-2.0 / 2.0**0.5, dtype=torch.float64)).item())
    columns = torch.arange(part.columns.start, part.columns.stop, device=out.device)
    step = max(1, _CHUNK_ELEMENTS // max(1, len(part.columns)))
    for start in range(0, len(part.rows), step):
        block = part.rows[start : start + step]
        rows = torch.arange(block.start, block.stop, block.step, device=out.device)
        uniform = _uniform(rows[:, None] * dimension + columns, key)
        probability = low + uniform * (1.0 - 2.0 * low)
        normal = torch.special.ndtri(probability)
        out[start : start + step] = (normal / dimension**0.5).float()
