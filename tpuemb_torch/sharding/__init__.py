"""DIV and MOD placement, plans, and the plug into TorchRec."""

from tpuemb_torch.sharding.placement import padded_rows, shard_rows
from tpuemb_torch.sharding.plans import Plan, shard_collection
from tpuemb_torch.sharding.torchrec_plugin import ShardedTPUEmbeddingBagCollection, TPUEmbeddingSharder

__all__ = [
    "Plan",
    "ShardedTPUEmbeddingBagCollection",
    "TPUEmbeddingSharder",
    "padded_rows",
    "shard_collection",
    "shard_rows",
]
