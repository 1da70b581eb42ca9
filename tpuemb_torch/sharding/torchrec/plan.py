"""A sharding plan as TorchRec needs it for tables whose shards are those of the hosts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torchrec.distributed.comm import get_topology_group_world_size
from torchrec.distributed.types import (
    ParameterSharding,
    ShardingEnv,
    ShardingType,
    ShardMetadata,
)
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from tpuemb_torch.collection import TPUEmbeddingBagCollection
from tpuemb_torch.config import Table
from tpuemb_torch.kernels import group_key
from tpuemb_torch.optimizers import slots_of
from tpuemb_torch.planning import Exchange, PlannedTable, TablePlan, refusal
from tpuemb_torch.sharding.placement import padded_rows, shard_rows

BY_ROWS = (ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value)
SHARDING_TYPES = (*BY_ROWS, ShardingType.TABLE_WISE.value, ShardingType.COLUMN_WISE.value)


@dataclass
class ExchangingSharding(ParameterSharding):
    """TorchRec's sharding of a table, and what its ranks exchange.

    Attributes:
        exchange: "pooled", sums of bags, as TorchRec does; or "distinct", the rows themselves.
    """

    exchange: Exchange = "pooled"


def exchange_of(sharding: ParameterSharding) -> Exchange:
    """What the ranks of a table exchange."""
    return sharding.exchange if isinstance(sharding, ExchangingSharding) else "pooled"


def with_host_shards(
    module: TPUEmbeddingBagCollection, bag: str, sharding: ParameterSharding, env: ShardingEnv
) -> ParameterSharding:
    """The plan of a table, row-wise shards resized to what DIV and MOD give each host."""
    config = next(t for t in module.config.tables if module.bag_names[t.name] == bag)
    table = config.name
    if sharding.sharding_type not in SHARDING_TYPES:
        raise ValueError(
            f"table {table!r}: sharding type {sharding.sharding_type!r} in the plan is not supported; "
            f"use one of {', '.join(SHARDING_TYPES)}"
        )
    if sharding.sharding_type not in BY_ROWS:
        return sharding
    planned = sharding.sharding_spec.shards
    ranks = list(range(env.world_size))
    if sharding.sharding_type == ShardingType.TABLE_ROW_WISE.value:
        ranks = list(sharding.ranks or [])
        _check_node(config, ranks, env, exchange_of(sharding))
    if len(planned) != len(ranks):
        raise ValueError(
            f"table {table!r}: {sharding.sharding_type} over {len(planned)} of {len(ranks)} ranks; use all"
        )
    strategy = module.config.sharding_strategy
    sizes = [len(shard_rows(config.vocabulary_size, len(ranks), index, strategy)) for index in range(len(ranks))]
    if [list(shard.shard_sizes) for shard in planned] == [[rows, config.dimension] for rows in sizes]:
        return replace(sharding, ranks=ranks)  # one of our plans
    shards = [
        ShardMetadata([end - rows, 0], [rows, config.dimension], shard.placement)
        for shard, rows, end in zip(planned, sizes, accumulate(sizes), strict=True)
    ]
    return replace(sharding, ranks=ranks, sharding_spec=EnumerableShardingSpec(shards))


def _check_node(table: Table, ranks: list[int], env: ShardingEnv, exchange: Exchange) -> None:
    """Refuses a table-row-wise table that TorchRec cannot put on these ranks, or would step wrongly."""
    if env.world_size != dist.get_world_size():
        raise ValueError(
            f"table {table.name!r}: TorchRec's table_row_wise works over all ranks only, not in a subgroup"
        )
    local = get_topology_group_world_size(env.world_size)
    planned = PlannedTable(table.name, table.vocabulary_size, table.dimension, len(slots_of(table.optimizer)))
    problem = refusal(
        TablePlan(planned, "table_row_wise", ranks, exchange),
        env.world_size,
        local,
        table.optimizer.accumulates,
    )
    if problem is not None:
        raise ValueError(f"table {table.name!r}: {problem} (LOCAL_WORLD_SIZE says how many ranks a node has)")


def num_row_shards(sharding: ParameterSharding) -> int:
    """Into how many shards a table is cut by rows."""
    return len(sharding.sharding_spec.shards) if sharding.sharding_type in BY_ROWS else 1


def check_shards(module: TPUEmbeddingBagCollection, plan: Mapping[str, ParameterSharding]) -> None:
    """Refuses, on every rank alike, the one shard that TorchRec's optimizer state cannot describe."""
    for table in module.config.tables:
        shards = plan[module.bag_names[table.name]].sharding_spec.shards
        if len(slots_of(table.optimizer)) > 1 and any(list(shard.shard_sizes) == [1, 1] for shard in shards):
            raise ValueError(
                f"table {table.name!r}: the plan gives a rank one row of dimension 1, and TorchRec takes the slots of "
                f"{table.optimizer.algorithm} there for values of the whole table: use table_wise, or more rows"
            )


def torchrec_twin(module: TPUEmbeddingBagCollection, plan: Mapping[str, ParameterSharding]) -> EmbeddingBagCollection:
    """What TorchRec's sharded module is built from: tables cut by rows padded, and one kernel group per update rule.

    `num_embeddings` sets the block size of the row-wise input dist; `num_embeddings_post_pruning` the rows that
    are stored and that state dicts show.
    """
    configs = []
    for own in module.embedding_bag_configs():
        config = EmbeddingBagConfig(
            name=own.name,
            num_embeddings=own.num_embeddings,
            embedding_dim=own.embedding_dim,
            feature_names=list(own.feature_names),
            pooling=PoolingType.SUM,
            # The kernels have written the initial weights.
            init_fn=_keep,
        )
        if plan[own.name].sharding_type in BY_ROWS:
            config.num_embeddings = padded_rows(own.num_embeddings, num_row_shards(plan[own.name]))
            config.num_embeddings_post_pruning = own.num_embeddings
        configs.append(config)
    twin = EmbeddingBagCollection(tables=configs, is_weighted=True, device=torch.device("meta"))
    optimizers = {module.bag_names[table.name]: table.optimizer for table in module.config.tables}
    for name, bag in twin.embedding_bags.items():
        # Tables with equal values form one TorchRec group; TorchRec passes an "optimizer" it does not know through.
        group = repr(group_key(optimizers[name], 0))
        bag.weight._optimizer_classes = [None]
        bag.weight._optimizer_kwargs = [{"optimizer": group}]
    return twin


def _keep(weights: Tensor) -> Tensor:
    return weights
