"""Which rank holds what: plans by name, by table, or TorchRec's own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingEnv, ShardingPlan

from tpuemb_torch.collection import TPUEmbeddingBagCollection
from tpuemb_torch.optimizers import slots_of
from tpuemb_torch.sharding.torchrec_plugin import SHARDING_TYPES, ShardedTPUEmbeddingBagCollection, TPUEmbeddingSharder

Plan: TypeAlias = str | Mapping[str, str] | ShardingPlan | EmbeddingModuleShardingPlan


def shard_collection(
    module: TPUEmbeddingBagCollection,
    plan: Plan,
    process_group: dist.ProcessGroup | None,
    device: torch.device | None,
) -> ShardedTPUEmbeddingBagCollection:
    """Shards a collection over a process group (collective); see `tpuemb_torch.shard`."""
    if not dist.is_initialized():
        raise RuntimeError(
            "sharding needs a process group: start the program with torchrun and call "
            "torch.distributed.init_process_group() first"
        )
    group = process_group or dist.group.WORLD
    assert group is not None
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else None
    device = torch.device("cpu") if device is None else torch.device(device)
    module_plan = module_sharding_plan(module, plan, group, device)
    return TPUEmbeddingSharder().shard(module, module_plan, ShardingEnv.from_process_group(group), device)


def module_sharding_plan(
    module: TPUEmbeddingBagCollection, plan: Plan, group: dist.ProcessGroup, device: torch.device
) -> EmbeddingModuleShardingPlan:
    """Turns what a user gives as plan into TorchRec's plan of the collection.

    Raises:
        ValueError: for an unknown kind of sharding, or a table that is missing or unknown.
    """
    if isinstance(plan, EmbeddingModuleShardingPlan):
        return plan
    if isinstance(plan, ShardingPlan):
        modules = list(plan.plan.values())
        if len(modules) != 1 or not isinstance(modules[0], EmbeddingModuleShardingPlan):
            raise ValueError(
                f"the ShardingPlan is for the modules {list(plan.plan)}: give the plan of the one to shard"
            )
        return modules[0]
    tables = [table.name for table in module.config.tables]
    world, local = dist.get_world_size(group), _local_world_size(dist.get_world_size(group))
    if plan == "auto":
        topology = Topology(world_size=world, local_world_size=local, compute_device=device.type)
        planner = EmbeddingShardingPlanner(topology=topology)
        found = planner.collective_plan(module, [TPUEmbeddingSharder()], group).plan[""]
        assert isinstance(found, EmbeddingModuleShardingPlan)
        return found
    kinds = dict.fromkeys(tables, plan) if isinstance(plan, str) else dict(plan)
    if set(kinds) != set(tables):
        raise ValueError(f"the plan names tables {sorted(kinds)}, the config has {sorted(tables)}: give each one kind")
    for name, kind in kinds.items():
        if kind not in SHARDING_TYPES:
            raise ValueError(f"table {name!r}: sharding {kind!r} is not one of auto, {', '.join(SHARDING_TYPES)}")
    ranks = balanced_ranks(module, [name for name in tables if kinds[name] == "table_wise"], world)

    table_of_bag = {bag: table for table, bag in module.bag_names.items()}

    def generator(bag: str) -> Any:
        name = table_of_bag[bag]
        if kinds[name] == "row_wise":
            return row_wise(compute_kernel="fused")
        if kinds[name] == "table_wise":
            return table_wise(rank=ranks[name], compute_kernel="fused")
        dimension = next(t.dimension for t in module.config.tables if t.name == name)
        if dimension % world:
            raise ValueError(
                f"table {name!r}: dimension {dimension} does not divide into {world} equal columns: "
                "use row_wise or table_wise"
            )
        return column_wise(ranks=list(range(world)), compute_kernel="fused")

    return construct_module_sharding_plan(
        module,
        {bag: generator(bag) for bag in module.embedding_bags},
        sharder=TPUEmbeddingSharder(),
        local_size=local,
        world_size=world,
        device_type=device.type,
    )


def balanced_ranks(module: TPUEmbeddingBagCollection, tables: list[str], world: int) -> dict[str, int]:
    """A rank for each table: the largest first, always to the rank with the least numbers to store."""
    size = {t.name: t.vocabulary_size * t.dimension * (1 + len(slots_of(t.optimizer))) for t in module.config.tables}
    load = [0] * world
    ranks: dict[str, int] = {}
    for name in sorted(tables, key=lambda name: (-size[name], name)):
        ranks[name] = min(range(world), key=lambda rank: (load[rank], rank))
        load[ranks[name]] += size[name]
    return ranks


def _local_world_size(world: int) -> int:
    """Ranks on this machine, as torchrun says; all of them without it."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    return local if 0 < local <= world and world % local == 0 else world
