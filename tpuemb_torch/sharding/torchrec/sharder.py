"""What DistributedModelParallel and TorchRec's planner ask to shard our collection."""

from __future__ import annotations

import torch
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import ParameterSharding, ShardingEnv, ShardingType

from tpuemb_torch.collection import TPUEmbeddingBagCollection
from tpuemb_torch.sharding.exchange import raise_together
from tpuemb_torch.sharding.torchrec.collection import ShardedTPUEmbeddingBagCollection
from tpuemb_torch.sharding.torchrec.plan import SHARDING_TYPES
from tpuemb_torch.sharding.torchrec.refusals import refusal


class TPUEmbeddingSharder(EmbeddingBagCollectionSharder):
    """Shards `TPUEmbeddingBagCollection` for DistributedModelParallel and TorchRec's planner."""

    def shard(
        self,
        module: TPUEmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedTPUEmbeddingBagCollection:
        device = device or torch.device("cpu")
        names, order = module.bag_names.values(), self._sharded_module_order_overwrite
        problem = refusal(names, params, env, self.fused_params, self.qcomm_codecs_registry, order)
        raise_together(problem, env.process_group)
        return ShardedTPUEmbeddingBagCollection(module, params, env, self.fused_params, device, module_fqn)

    def reshard(self, *args: object, **kwargs: object) -> ShardedTPUEmbeddingBagCollection:
        """Refuses: TorchRec's moving of shards knows neither the hosts' rows nor all slots."""
        raise NotImplementedError(
            "these tables cannot be resharded in place: save them with tpuemb_torch.checkpoint, and load them into a "
            "model that is sharded anew"
        )

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """What TorchRec's planner may choose; table-row-wise, which not every table can have, only by our plans."""
        return [kind for kind in SHARDING_TYPES if kind != ShardingType.TABLE_ROW_WISE.value]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return [EmbeddingComputeKernel.FUSED.value]

    @property
    def module_type(self) -> type[TPUEmbeddingBagCollection]:
        return TPUEmbeddingBagCollection

    @property
    def sharded_module_type(self) -> type[ShardedTPUEmbeddingBagCollection]:
        return ShardedTPUEmbeddingBagCollection
