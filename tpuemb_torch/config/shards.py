"""How many rows, and which, each shard of a table has under DIV and MOD.

Source: `partition_strategy` of TensorFlow's tf.nn.embedding_lookup, and the shard sizes of
tensorflow/core/tpu/ops/tpu_embedding_shape_util.cc.
"""

from __future__ import annotations

from typing import Literal

Strategy = Literal["div", "mod"]


def shard_rows(vocabulary_size: int, num_shards: int, shard_id: int, strategy: Strategy) -> range:
    """The rows of one shard, in the order in which the shard stores them.

    Raises:
        ValueError: for a shard number out of range.
    """
    if num_shards < 1:
        raise ValueError(f"num_shards must be at least 1, got {num_shards}")
    if not 0 <= shard_id < num_shards:
        raise ValueError(f"shard_id must be in [0, {num_shards}), got {shard_id}")
    if strategy == "mod":
        return range(shard_id, vocabulary_size, num_shards) if shard_id < vocabulary_size else range(0)
    quotient, remainder = divmod(vocabulary_size, num_shards)
    begin = shard_id * quotient + min(shard_id, remainder)
    return range(begin, begin + quotient + (shard_id < remainder))
