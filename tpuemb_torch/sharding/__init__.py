"""DIV and MOD placement, plans, and the plug into TorchRec."""

from tpuemb_torch.planning import Plan, make_plan, read_plan, save_plan
from tpuemb_torch.sharding.placement import padded_rows, shard_rows
from tpuemb_torch.sharding.plans import PlanLike, model_plan, shard_collection
from tpuemb_torch.sharding.torchrec import ShardedTPUEmbeddingBagCollection, TPUEmbeddingSharder

__all__ = [
    "Plan",
    "PlanLike",
    "ShardedTPUEmbeddingBagCollection",
    "TPUEmbeddingSharder",
    "make_plan",
    "model_plan",
    "padded_rows",
    "read_plan",
    "save_plan",
    "shard_collection",
    "shard_rows",
]
