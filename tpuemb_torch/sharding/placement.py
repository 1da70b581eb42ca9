"""DIV and MOD: which shard holds a row, and where.

Both split V rows over n shards of floor(V/n) rows, the first V mod n with one more.  DIV gives each shard a block
of consecutive rows, MOD every n-th row.  Source: `partition_strategy` of TensorFlow's tf.nn.embedding_lookup, and
the shard sizes of tensorflow/core/tpu/ops/tpu_embedding_shape_util.cc.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tpuemb_torch.config.shards import Strategy, shard_rows
from tpuemb_torch.kernels.constants import Constant

__all__ = ["RowPlacement", "Strategy", "padded_rows", "shard_rows"]


class RowPlacement:
    """Maps ids so that TorchRec's input dist sends those of tables cut by rows to the shard that DIV or MOD says.

    TorchRec cuts a table into blocks of ceil(rows/n) ids.  With a table declared `padded_rows` long, the block of
    shard s are the ids `s * block .. (s + 1) * block`, and `place` turns id into `shard * block + local row`.

    Args:
        vocabulary_sizes: rows of the table of each key.
        num_shards: n of the table of each key; 1 where it is not cut by rows: those keys keep their ids.
        strategy: "div" or "mod".
    """

    def __init__(self, vocabulary_sizes: Sequence[int], num_shards: Sequence[int], strategy: Strategy) -> None:
        self.strategy = strategy
        sizes, shards = (torch.tensor(numbers, dtype=torch.int64) for numbers in (vocabulary_sizes, num_shards))
        remainder = sizes % shards
        self._shards = _constant(shards)
        self._quotient = _constant((sizes // shards).clamp(min=1))
        # Under DIV, ids before this one are in shards with one row more, whose place does not change.
        self._first_short = _constant(remainder * (sizes // shards + 1))
        self._block = _constant(-(-sizes // shards))
        self._shift = _constant((remainder > 0).long())
        #: No placed id is larger.
        self.largest_id = max(map(padded_rows, vocabulary_sizes, num_shards), default=1) - 1
        moved = remainder > 0 if strategy == "div" else shards > 1
        self.is_identity = not bool(moved.any())

    def place(self, ids: Tensor, ids_per_key: Tensor) -> Tensor:
        """int64 `[n]` ids, key-major with `ids_per_key` `[keys]` -> ids of TorchRec's padded tables."""
        if self.is_identity:
            return ids
        count = ids.numel()

        def spread(values: Constant) -> Tensor:
            return torch.repeat_interleave(values.on(ids.device), ids_per_key, output_size=count)

        if self.strategy == "mod":
            shards = spread(self._shards)
            return (ids % shards) * spread(self._block) + ids // shards
        # A short shard's block ends with one unused row: each short shard before id moves it up by one.
        short_rows = (ids - spread(self._first_short)).clamp(min=0)
        return ids + torch.div(short_rows, spread(self._quotient), rounding_mode="floor") * spread(self._shift)


def _constant(values: Tensor) -> Constant:
    return Constant(values.tolist(), torch.int64)


def padded_rows(vocabulary_size: int, num_shards: int) -> int:
    """Rows of the table that TorchRec is told of: n blocks of ceil(V/n)."""
    return num_shards * -(-vocabulary_size // num_shards)
