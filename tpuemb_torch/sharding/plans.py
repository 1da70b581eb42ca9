"""From what a user gives as plan to TorchRec's plan of a collection, and to the sharded collection."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingEnv,
    ShardingPlan,
    ShardMetadata,
)

from tpuemb_torch.collection import TPUEmbeddingBagCollection
from tpuemb_torch.planning import Plan, PlanError, TablePlan, make_plan, read_plan
from tpuemb_torch.planning.files import is_plan_file
from tpuemb_torch.planning.rules import check
from tpuemb_torch.sharding.exchange import raise_together
from tpuemb_torch.sharding.torchrec import ShardedTPUEmbeddingBagCollection, TPUEmbeddingSharder
from tpuemb_torch.sharding.torchrec.plan import ExchangingSharding

#: What `shard` takes: a kind of sharding for all tables or by table name, the path of a plan file, or a plan.
PlanLike: TypeAlias = str | os.PathLike[str] | Mapping[str, str] | Plan | ShardingPlan | EmbeddingModuleShardingPlan


def shard_collection(
    module: TPUEmbeddingBagCollection,
    plan: PlanLike,
    process_group: dist.ProcessGroup | None,
    device: torch.device | None,
    exchange: str | Mapping[str, str] | None = None,
) -> ShardedTPUEmbeddingBagCollection:
    """Shards a collection over a process group (collective); see `tpuemb_torch.shard`."""
    if not dist.is_initialized():
        raise RuntimeError(
            "sharding needs a process group: start the program with torchrun and call "
            "torch.distributed.init_process_group() first"
        )
    group = process_group or dist.group.WORLD
    assert group is not None
    if dist.get_world_size(group) != dist.get_world_size():
        raise NotImplementedError(
            f"a process group of {dist.get_world_size(group)} of the job's {dist.get_world_size()} ranks: TorchRec "
            "shards over all ranks of a job; leave process_group out, or start a job of its own for these ranks"
        )
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else None
    device = torch.device("cpu") if device is None else torch.device(device)
    module_plan = module_sharding_plan(module, plan, group, device, exchange)
    return TPUEmbeddingSharder().shard(module, module_plan, ShardingEnv.from_process_group(group), device)


def module_sharding_plan(
    module: TPUEmbeddingBagCollection,
    plan: PlanLike,
    group: dist.ProcessGroup,
    device: torch.device,
    exchange: str | Mapping[str, str] | None = None,
) -> EmbeddingModuleShardingPlan:
    """Turns what a user gives as plan into TorchRec's plan of the collection (collective).

    Raises:
        ValueError: for an unknown kind of sharding, a table that is missing or unknown, or a plan for other ranks.
    """
    found: EmbeddingModuleShardingPlan | None = None
    error: Exception | None = None
    # Ranks may differ, which is found when they shard: all take part in the same collectives, whatever their plan.
    memory = _least_memory(group, device)
    try:
        # A file may be missing on one rank alone.
        found = _module_plan(module, plan, exchange, dist.get_world_size(group), memory, device)
    except Exception as problem:
        error = problem
    raise_together(error, group)
    assert found is not None
    return found


def _module_plan(
    module: TPUEmbeddingBagCollection,
    plan: PlanLike,
    exchange: str | Mapping[str, str] | None,
    world: int,
    memory: int,
    device: torch.device,
) -> EmbeddingModuleShardingPlan:
    ready = isinstance(plan, EmbeddingModuleShardingPlan | ShardingPlan | Plan | os.PathLike)
    if exchange is not None and (ready or (isinstance(plan, str) and is_plan_file(plan))):
        raise ValueError(f"exchange={exchange!r} with a plan that says what is exchanged: give it to make_plan instead")
    if not isinstance(plan, str | os.PathLike | Mapping | Plan | ShardingPlan):
        raise TypeError(
            f"plan must be a kind of sharding, a mapping of kinds by table, a plan or its file, got {plan!r}"
        )
    if isinstance(plan, EmbeddingModuleShardingPlan):
        return plan
    if isinstance(plan, ShardingPlan):
        modules = list(plan.plan.values())
        if len(modules) != 1 or not isinstance(modules[0], EmbeddingModuleShardingPlan):
            raise ValueError(
                f"the ShardingPlan is for the modules {list(plan.plan)}: give the plan of the one to shard"
            )
        return modules[0]
    auto = plan == "auto" or (isinstance(plan, Mapping) and "auto" in plan.values())
    found = _plan(module, plan, exchange, world, local_world_size(world), memory if auto else None, device)
    return to_torchrec(module, found, device)


def to_torchrec(
    module: TPUEmbeddingBagCollection, plan: Plan, device: str | torch.device = "cpu"
) -> EmbeddingModuleShardingPlan:
    """Returns a plan as TorchRec's plan of a collection.

    Raises:
        PlanError: if the plan is for other tables, or one cannot be sharded so.
    """
    check(plan, module.config)
    kind = torch.device(device).type
    shardings = EmbeddingModuleShardingPlan()
    for table in plan.tables:
        shardings[module.bag_names[table.table.name]] = _parameter_sharding(table, plan.local_world_size, kind)
    return shardings


def model_plan(model: nn.Module, plan: Plan, device: str | torch.device = "cpu") -> ShardingPlan:
    """Returns a plan for `DistributedModelParallel(model, plan=..., sharders=tpuemb_torch.sharders())`.

    Args:
        model: contains `TPUEmbedding` or `TPUEmbeddingBagCollection` modules, which all have the plan's tables.
        plan: from `make_plan` or `read_plan`.
        device: type of the device of the ranks.

    Raises:
        PlanError: if the plan is for other tables.
        ValueError: if the model has no such module.
    """
    modules = {
        path: to_torchrec(module, plan, device)
        for path, module in model.named_modules()
        if isinstance(module, TPUEmbeddingBagCollection)
    }
    if not modules:
        raise ValueError(f"{type(model).__name__} contains no TPUEmbedding and no TPUEmbeddingBagCollection to plan")
    return ShardingPlan(dict(modules))


def local_world_size(world: int) -> int:
    """Ranks on this machine, as torchrun says; all of them without it."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    return local if 0 < local <= world and world % local == 0 else world


def _plan(
    module: TPUEmbeddingBagCollection,
    plan: str | os.PathLike[str] | Mapping[str, str] | Plan,
    exchange: str | Mapping[str, str] | None,
    world: int,
    local: int,
    memory: int | None,
    device: torch.device,
) -> Plan:
    if isinstance(plan, os.PathLike) or (isinstance(plan, str) and is_plan_file(plan)):
        plan = read_plan(plan)
    if not isinstance(plan, Plan):
        kind = "cuda" if device.type == "cuda" else "cpu"
        return make_plan(
            module.config, world, local, plan, memory, device=kind, exchange="auto" if exchange is None else exchange
        )
    check(plan, module.config)
    if plan.world_size != world:
        raise PlanError("world_size", f"the plan is for {plan.world_size} ranks, the process group has {world}")
    by_node = [table.table.name for table in plan.tables if table.sharding == "table_row_wise"]
    if by_node and plan.local_world_size != local:
        raise PlanError(
            "local_world_size",
            f"the plan is for {plan.local_world_size} ranks on each node, this one has {local} (LOCAL_WORLD_SIZE), and "
            f"tables {by_node} are table_row_wise: plan it anew",
        )
    return plan


def _parameter_sharding(table: TablePlan, local: int, device: str) -> ParameterSharding:
    shards, offset = [], 0
    for index, rank in enumerate(table.ranks):
        place = f"rank:{rank}/cuda:{rank % local}" if device == "cuda" else f"rank:{rank}/{device}"
        rows = table.rows(index)
        first = [offset, 0] if table.by_rows else [0, index * table.columns]
        shards.append(ShardMetadata(first, [rows, table.columns], place))
        offset += rows
    return ExchangingSharding(
        exchange=table.exchange,
        sharding_type=table.sharding,
        compute_kernel="fused",
        ranks=list(table.ranks),
        sharding_spec=EnumerableShardingSpec(shards),
    )


def _least_memory(group: dist.ProcessGroup, device: torch.device) -> int:
    """The memory of the rank that has least (collective)."""
    every: list[int] = [0] * dist.get_world_size(group)
    dist.all_gather_object(every, _own_memory(device, len(every)), group=group)
    return min(every)


def _own_memory(device: torch.device, world: int) -> int:
    """Bytes of this rank's GPU, or its part of the machine's memory."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // local_world_size(world)
