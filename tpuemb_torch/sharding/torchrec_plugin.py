"""The plug into TorchRec: our kernel under its sharded EmbeddingBagCollection.

Every private name of TorchRec that the package relies on is in this file.  The plan keeps TorchRec's compute kernel
"fused"; the classes below put `TableBatchedEmbedding` where TorchRec would build FBGEMM's.  A step goes:

    KeyedJaggedTensor -> input_dist (checks, gains, id placement, then TorchRec's all-to-all)
                      -> lookup (TableBatchedEmbedding) -> output_dist (TorchRec's) -> KeyedTensor
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torchrec.distributed.batched_embedding_kernel import BaseBatchedEmbeddingBag, EmbeddingFusedOptimizer
from torchrec.distributed.comm import get_topology_group_world_size
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.composable.table_batched_embedding_slice import TableBatchedEmbeddingSlice
from torchrec.distributed.embedding_lookup import GroupedPooledEmbeddingsLookup
from torchrec.distributed.embedding_sharding import EmbeddingSharding, EmbeddingShardingContext, EmbeddingShardingInfo
from torchrec.distributed.embedding_types import (
    EmbeddingComputeKernel,
    GroupedEmbeddingConfig,
    KJTList,
    ShardedEmbeddingTable,
)
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionAwaitable,
    EmbeddingBagCollectionContext,
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingSharding
from torchrec.distributed.sharding.twrw_sharding import TwRwPooledEmbeddingSharding
from torchrec.distributed.types import (
    Awaitable,
    LazyAwaitable,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingEnv,
    ShardingType,
    ShardMetadata,
)
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.fused import EmptyFusedOptimizer, FusedOptimizerModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from tpuemb_torch.collection import TPUEmbeddingBagCollection
from tpuemb_torch.config import Table
from tpuemb_torch.kernels import StepSource, StoredPart, TableBatchedEmbedding, TablePart, group_key
from tpuemb_torch.optimizers import slots_of
from tpuemb_torch.optimizers.trainability import may_differentiate
from tpuemb_torch.planning import PlannedTable, TablePlan, refusal
from tpuemb_torch.preprocessing import InputError, PreparedInput, over_slots
from tpuemb_torch.sent_steps import StepQueue, drain_before
from tpuemb_torch.sharding.exchange import Piece, move
from tpuemb_torch.sharding.placement import RowPlacement, padded_rows, shard_rows
from tpuemb_torch.statistics.recorder import CountsInput

_BY_ROWS = (ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value)
SHARDING_TYPES = (*_BY_ROWS, ShardingType.TABLE_WISE.value, ShardingType.COLUMN_WISE.value)


class FusedTables(BaseBatchedEmbeddingBag[Tensor], FusedOptimizerModule):
    """TorchRec's wrapper of a kernel, around a `TableBatchedEmbedding`."""

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        collection: TPUEmbeddingBagCollection,
        steps: StepSource,
        row_shard: tuple[int, int] | None,
        pg: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        super().__init__(config, pg, device, None)
        tables = {collection.bag_names[table.name]: table for table in collection.config.tables}
        strategy = collection.config.sharding_strategy
        parts = []
        for local in config.embedding_tables:
            table = tables[local.name]
            rows = range(table.vocabulary_size)
            if row_shard is not None:
                shard, shards = row_shard
                rows = shard_rows(table.vocabulary_size, shards, shard, strategy)
            assert local.local_metadata is not None
            first_column = local.local_metadata.shard_offsets[1]
            parts.append(TablePart(table, rows, range(first_column, first_column + local.local_cols)))
        self._emb_module = TableBatchedEmbedding(
            parts, self._feature_table_map, device, collection.seed, steps, collection.kernel_kind
        )
        self._optim = EmbeddingFusedOptimizer(config, self._emb_module, pg)

    @property
    def emb_module(self) -> TableBatchedEmbedding:
        return self._emb_module

    @property
    def fused_optimizer(self) -> EmbeddingFusedOptimizer:
        return self._optim

    @property
    def _param_per_table(self) -> dict[str, TableBatchedEmbeddingSlice]:
        """One flat slice per table, over all its parts on this rank (several if column-wise)."""
        kernel = self._emb_module
        weights, state = kernel.split_embedding_weights(), kernel.get_optimizer_state()
        slices: dict[str, TableBatchedEmbeddingSlice] = {}
        stored = [
            (group.flat("parameters"), first * group.dim, part)
            for group in kernel.table_groups()
            for first, part in zip(group.first_rows, group.parts, strict=False)
        ]
        names = [table.name for table in self._config.embedding_tables]
        places = [(name, *place) for name, place in zip(names, stored, strict=True)]
        for name, data, start, part in places:
            if name in slices:
                continue
            parts = [(s, p) for n, d, s, p in places if n == name and d is data]
            last, last_part = parts[-1]
            end = last + len(last_part.rows) * len(last_part.columns)
            weight = TableBatchedEmbeddingSlice(
                data=data, start_offset=start, end_offset=end, num_embeddings=-1, embedding_dim=len(part.columns)
            )
            weight._in_backward_optimizers = [
                EmbeddingFusedOptimizer(
                    config=self._config,
                    emb_module=kernel,
                    pg=self._pg,
                    create_for_table=name,
                    param_weight_for_table=weight,
                    embedding_weights_by_table=weights,
                    all_optimizer_states=state,
                )
            ]
            slices[name] = weight
        return slices

    @_param_per_table.setter
    def _param_per_table(self, value: dict[str, Any]) -> None:
        """The base class assigns an empty dict before there are tables."""

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        yield from ()

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        for name, weight in self.named_split_embedding_weights(prefix, recurse, remove_duplicate):
            parameter = nn.Parameter(weight)
            parameter._in_backward_optimizers = [EmptyFusedOptimizer()]  # type: ignore[attr-defined]
            yield name, parameter


class FusedLookups(GroupedPooledEmbeddingsLookup):
    """TorchRec's lookup of one sharding type, with our kernels.

    `row_shard` is this rank's shard, and how many there are, of tables that are cut by rows; None for other tables.
    """

    def __init__(
        self,
        collection: TPUEmbeddingBagCollection,
        steps: StepSource,
        row_shard: tuple[int, int] | None,
        grouped_configs: list[GroupedEmbeddingConfig],
        device: torch.device,
        pg: dist.ProcessGroup,
        env: ShardingEnv,
    ) -> None:
        # The base class builds the kernels in its constructor.
        object.__setattr__(self, "_build", (collection, steps, row_shard))
        super().__init__(grouped_configs=grouped_configs, device=device, pg=pg, env=env)
        object.__delattr__(self, "_build")

    def _create_embedding_kernel(
        self,
        config: GroupedEmbeddingConfig,
        device: torch.device | None,
        pg: dist.ProcessGroup | None,
        sharding_type: ShardingType | None,
        env: ShardingEnv | None,
    ) -> FusedTables:
        if config.compute_kernel != EmbeddingComputeKernel.FUSED:
            names = [table.name for table in config.embedding_tables]
            raise ValueError(f"tables {names}: compute kernel {config.compute_kernel} in the plan; use 'fused'")
        assert pg is not None and device is not None
        collection, steps, row_shard = object.__getattribute__(self, "_build")
        return FusedTables(config, collection, steps, row_shard, pg, device)


class NodeRowWiseSharding(TwRwPooledEmbeddingSharding):
    """TorchRec's table-row-wise sharding, whose sharded tensors have the stored rows (its own have the padded ones)."""

    def _shard(self, sharding_infos: list[EmbeddingShardingInfo]) -> list[list[ShardedEmbeddingTable]]:
        tables_per_rank = super()._shard(sharding_infos)
        for table in (table for tables in tables_per_rank for table in tables):
            assert table.global_metadata is not None
            rows = sum(shard.shard_sizes[0] for shard in table.global_metadata.shards_metadata)
            table.global_metadata.size = torch.Size([rows, table.embedding_dim])
        return tables_per_rank


class BatchesEndedError(InputError):
    """Another rank has come to the end of its batches."""


class StartedLookup(NamedTuple):
    """A lookup whose ids are on their way to the ranks that hold the rows."""

    context: EmbeddingBagCollectionContext
    bags: tuple[int, ...]
    distributed: Awaitable[Awaitable[KJTList]]


class ShardedTPUEmbeddingBagCollection(CountsInput, ShardedEmbeddingBagCollection):
    """The sharded twin of `TPUEmbeddingBagCollection`.

    Row-wise tables are stored so that rank i holds exactly the rows of host i under DIV or MOD.  Ranks may have
    batches of different sizes.  A malformed batch on one rank raises on all of them.
    """

    def __init__(
        self,
        module: TPUEmbeddingBagCollection,
        plan: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        fused_params: dict[str, Any] | None,
        device: torch.device,
        module_fqn: str | None = None,
    ) -> None:
        # TorchRec's constructor calls `_create_lookups`, which needs these; nn.Module's own has not run yet.
        object.__setattr__(self, "_source", module)
        object.__setattr__(self, "_steps", _step_source(module, env))
        plan = {name: _with_host_shards(module, name, sharding, env) for name, sharding in plan.items()}
        _check_shards(module, plan)
        super().__init__(
            module=_torchrec_twin(module, plan),
            table_name_to_parameter_sharding=plan,
            env=env,
            fused_params=fused_params,
            device=device,
            module_fqn=module_fqn,
        )
        object.__delattr__(self, "_source")
        self.config = module.config
        self.layout = module.layout
        self.keys = module.keys
        self.preparation = module.preparation
        self.feature_preparation = module.feature_preparation
        self._columns_of: dict[tuple[str, ...], tuple[list[str], list[int]]] = {}
        self.id_policy = module.id_policy
        self.gradient_reduction = module.gradient_reduction
        self.seed = module.seed
        self.training_refusal = module.training_refusal
        self.steps: StepSource = object.__getattribute__(self, "_steps")
        self.steps.take_over(module.steps)
        self.step_queue = StepQueue(self.steps)
        assert env.process_group is not None
        self._statistics = module.statistics.on_ranks(env.process_group, device)
        self.register_state_dict_pre_hook(drain_before)
        self.register_load_state_dict_pre_hook(drain_before)
        row_shards = {table: _row_shards(plan[bag]) for table, bag in module.bag_names.items()}
        self._placement = RowPlacement(
            [key.vocabulary_size for key in self.keys],
            [row_shards[key.table] for key in self.keys],
            module.config.sharding_strategy,
        )
        self._mod_shards = torch.tensor([row_shards[table.name] for table in module.config.tables])
        if module.config.sharding_strategy == "mod" and not self._placement.is_identity:
            self._register_state_dict_hook(_write_mod_shards)
            self._register_load_state_dict_pre_hook(_check_mod_shards, with_module=True)
        if module.kernel.device.type != "meta":
            move([Piece.of(s) for s in module.stored()], [Piece.of(s) for s in self.stored()], None)

    def _create_lookups(self) -> None:
        for sharding in self._embedding_shardings:
            rank, row_shard = dist.get_rank(sharding._pg), None
            if isinstance(sharding, NodeRowWiseSharding):
                configs = sharding._grouped_embedding_configs_per_rank[rank]
                row_shard = rank % sharding._local_size, sharding._local_size
            else:
                configs = sharding._grouped_embedding_configs
                if isinstance(sharding, RwPooledEmbeddingSharding):
                    row_shard = rank, dist.get_world_size(sharding._pg)
            self._lookups.append(
                FusedLookups(
                    object.__getattribute__(self, "_source"),
                    object.__getattribute__(self, "_steps"),
                    row_shard,
                    configs,
                    sharding._device,
                    sharding._pg,
                    sharding._env,
                )
            )

    @classmethod
    def create_embedding_bag_sharding(
        cls,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        permute_embeddings: bool = False,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> EmbeddingSharding[EmbeddingShardingContext, KeyedJaggedTensor, Tensor, Tensor]:
        if sharding_infos[0].param_sharding.sharding_type == ShardingType.TABLE_ROW_WISE.value:
            return NodeRowWiseSharding(sharding_infos, env, device, qcomm_codecs_registry=qcomm_codecs_registry)
        return super().create_embedding_bag_sharding(
            sharding_infos, env, device, permute_embeddings, qcomm_codecs_registry
        )

    def _initialize_torch_state(self, skip_registering: bool = False) -> None:
        # State dicts have the stored rows; the input dist's blocks (and its check of ids) need the padded ones.
        padded = [config.num_embeddings for config in self._embedding_bag_configs]
        for config in self._embedding_bag_configs:
            config.num_embeddings = config.num_embeddings_post_pruning or config.num_embeddings
        super()._initialize_torch_state(skip_registering)
        for config, rows in zip(self._embedding_bag_configs, padded, strict=True):
            config.num_embeddings = rows

    def reject(self, error: InputError) -> None:
        """Raises an error found before the collection, on this and on every other rank's input dist."""
        self._agree(error)

    def confirm(self) -> None:
        """Agrees with the other ranks that this rank's part of a batch is good (collective); raises if one's is not."""
        self._agree(None)

    def agree_on_step(self, error: Exception | None, rates: Tensor | None) -> None:
        """Agrees with the other ranks that a step may be applied (collective).

        Args:
            error: what is wrong with this rank's gradients or rates; raised after the others know.
            rates: float32 `[num_learning_rates]`; must be the same on all ranks.

        Raises:
            InputError: if another rank has an error.
            ValueError: if the ranks' rates differ.
        """
        count = self.config.num_learning_rates
        mine = torch.zeros(count) if rates is None else rates
        state = torch.cat([torch.tensor([float(error is not None)]), mine, -mine]).double()
        state = state.to(self._device or torch.device("cpu"))
        dist.all_reduce(state, op=dist.ReduceOp.MAX, group=self._env.process_group)
        failed, highest, lowest = bool(state[0]), state[1 : 1 + count].tolist(), (-state[1 + count :]).tolist()
        if error is not None:
            raise error
        if failed:
            raise InputError("another rank refused its gradients or learning rates; its message says why")
        for tag, (high, low) in enumerate(zip(highest, lowest, strict=True)):
            if high != low:
                raise ValueError(
                    f"learning rate of tag {tag} is {low:g} on one rank and {high:g} on another: send the same on all"
                )

    def input_dist(
        self, ctx: EmbeddingBagCollectionContext, features: KeyedJaggedTensor | PreparedInput
    ) -> Awaitable[Awaitable[KJTList]]:
        """Prepares the batch, agrees with the other ranks on a common size, and distributes it."""
        with torch.no_grad():
            try:
                prepared = features if isinstance(features, PreparedInput) else self.preparation.of_kjt(features)
            except Exception as error:
                with suppress(InputError):
                    self.reject(error if isinstance(error, InputError) else InputError(str(error)))
                raise
            slots = self.feature_preparation.slots if prepared.by_feature else [1] * len(self.keys)
            ctx.own_stride = max((-(-bags // n) for bags, n in zip(prepared.bags, slots, strict=True)), default=0)
            stride, weighted = self._agree(None, ctx.own_stride, prepared.gains is not None)
            self.statistics.record(prepared)
            by_key = over_slots(prepared, slots, stride)
            return super().input_dist(ctx, self._to_distribute(by_key, stride, weighted))

    def end(self) -> None:
        """Tells the other ranks, which may begin a lookup, that this one has no more batches (collective)."""
        with suppress(InputError):  # theirs, not this rank's
            self._agree(None, ended=True)

    def _agree(
        self, error: InputError | None, stride: int = 0, weighted: bool = False, ended: bool = False
    ) -> tuple[int, bool]:
        """The largest batch of all ranks, and whether any has weights (collective).

        Raises:
            InputError: if any rank has an error, or has no more batches while this one has.
        """
        device = self._device or torch.device("cpu")
        state = torch.tensor([stride, error is not None, weighted, ended], dtype=torch.int64, device=device)
        dist.all_reduce(state, op=dist.ReduceOp.MAX, group=self._env.process_group)
        largest, failed, any_weighted, any_ended = state.tolist()
        if error is not None:
            raise error
        if any_ended and not ended:
            raise BatchesEndedError("another rank has no more batches: give all ranks the same number of batches")
        if failed:
            raise InputError("another rank rejected its part of the batch; its message says why")
        return int(largest), bool(any_weighted)

    def _to_distribute(self, prepared: PreparedInput, stride: int, weighted: bool) -> KeyedJaggedTensor:
        """Places ids; with weights if any rank has them."""
        ids = self._placement.place(prepared.ids, prepared.ids_per_key())
        if self._placement.largest_id < torch.iinfo(torch.int32).max:
            ids = ids.int()  # half the bytes to send
        weights = prepared.gains
        if weighted and weights is None:
            weights = torch.ones(ids.numel(), device=ids.device)
        return KeyedJaggedTensor(self.preparation.names, ids, weights=weights, lengths=prepared.lengths, stride=stride)

    def start(self, prepared: PreparedInput) -> StartedLookup:
        """Begins the lookup of features that are prepared: agrees with the other ranks and starts the input dist."""
        context = self.create_context()
        return StartedLookup(context, prepared.bags, self.input_dist(context, prepared))

    def finish(self, started: StartedLookup) -> list[Tensor]:
        """The rest of the lookup; see `TPUEmbeddingBagCollection.finish`."""
        arrived = started.distributed.wait().wait()
        keyed = self.compute_and_output_dist(started.context, arrived).wait()
        names, widths = self._feature_columns(tuple(keyed.keys()))
        columns = dict(zip(names, torch.unsafe_split_with_sizes(keyed.values(), widths, dim=1), strict=True))
        activations = []
        for index, bags in zip(self.feature_preparation.order, started.bags, strict=True):
            feature = self.config.features[index]
            activations.append(columns[feature.name].reshape(-1, feature.table.dimension)[:bags])
        return activations

    def _feature_columns(self, keys: tuple[str, ...]) -> tuple[list[str], list[int]]:
        """Features in the order of the result's columns, and how many columns each has."""
        if keys not in self._columns_of:
            feature_of = {key.name: key.feature for key in self.keys}
            dimension = {feature.name: feature.table.dimension for feature in self.config.features}
            widths: dict[str, int] = {}
            for key in keys:
                feature = feature_of[key]
                widths[feature] = widths.get(feature, 0) + dimension[feature]
            self._columns_of[keys] = list(widths), list(widths.values())
        return self._columns_of[keys]

    def output_dist(self, ctx: EmbeddingBagCollectionContext, output: list[Tensor]) -> LazyAwaitable[KeyedTensor]:
        return _cut(super().output_dist(ctx, output), ctx.own_stride)

    def compute_and_output_dist(self, ctx: EmbeddingBagCollectionContext, input: KJTList) -> LazyAwaitable[KeyedTensor]:
        with torch.set_grad_enabled(may_differentiate(self.training_refusal, self.training)):
            return _cut(super().compute_and_output_dist(ctx, input), ctx.own_stride)

    def create_context(self) -> EmbeddingBagCollectionContext:
        return _Context()

    def set_learning_rates(self, rates: Sequence[float | Tensor]) -> None:
        """Sets the dynamic learning rates by tag; every rank must give the same."""
        self.steps.set_rates(rates)

    def stored(self) -> list[StoredPart]:
        """The parts of the tables held on this rank, with live views, after all steps that were sent (collective)."""
        self.step_queue.drain()
        kernels = [m for lookup in self._lookups for m in lookup.modules() if isinstance(m, TableBatchedEmbedding)]
        return [stored for kernel in kernels for stored in kernel.stored()]

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks that the tables are sharded over."""
        assert self._env.process_group is not None
        return self._env.process_group

    @property
    def unsharded_module_type(self) -> type[TPUEmbeddingBagCollection]:
        return TPUEmbeddingBagCollection


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
        return ShardedTPUEmbeddingBagCollection(module, params, env, self.fused_params, device, module_fqn)

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


class _Context(EmbeddingBagCollectionContext):
    """TorchRec's context of one batch, and this rank's own number of samples."""

    own_stride: int = 0


def _cut(awaitable: LazyAwaitable[KeyedTensor], stride: int) -> LazyAwaitable[KeyedTensor]:
    """Drops the samples that only padded the batch to the largest one."""

    def cut(out: KeyedTensor) -> KeyedTensor:
        values = out.values()
        if values.shape[0] == stride:
            return out
        return KeyedTensor(out.keys(), out.length_per_key(), values[:stride])

    assert isinstance(awaitable, EmbeddingBagCollectionAwaitable)
    awaitable.callbacks.append(cut)
    return awaitable


def _write_mod_shards(
    module: ShardedTPUEmbeddingBagCollection, state: dict[str, Any], prefix: str, _metadata: dict[str, Any]
) -> None:
    """Marks a state dict whose tables are ordered shard by shard (MOD has no contiguous blocks): shards by table."""
    state[f"{prefix}mod_shards"] = module._mod_shards.clone()


def _check_mod_shards(
    module: ShardedTPUEmbeddingBagCollection, state: dict[str, Any], prefix: str, *_args: object
) -> None:
    """Refuses rows in another order: they would land in the wrong places without a word."""
    shards = state.pop(f"{prefix}mod_shards", None)
    own = module._mod_shards
    if any(key.startswith(prefix) for key in state) and (shards is None or shards.tolist() != own.tolist()):
        found = (
            "rows in another order" if shards is None else f"rows ordered for {shards.tolist()} shards of each table"
        )
        raise RuntimeError(
            f"state dict with {found}; these tables are MOD-sharded over {own.tolist()}. "
            "Use tpuemb_torch.checkpoint or load_parameters(), which do not depend on the sharding"
        )


def _step_source(module: TPUEmbeddingBagCollection, env: ShardingEnv) -> StepSource:
    world = env.world_size
    total = module.gradient_reduction == "sum"

    def scale() -> float:
        # TorchRec divides by the world size in its collectives if its global switch says so.
        divided = get_gradient_division()
        if total:
            return float(world) if divided else 1.0
        return 1.0 if divided else 1.0 / world

    return StepSource(module.config.num_learning_rates, cores=world, scale=scale)


def _with_host_shards(
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
    if sharding.sharding_type not in _BY_ROWS:
        return sharding
    planned = sharding.sharding_spec.shards
    ranks = list(range(env.world_size))
    if sharding.sharding_type == ShardingType.TABLE_ROW_WISE.value:
        ranks = list(sharding.ranks or [])
        _check_node(config, ranks, env)
    if len(planned) != len(ranks):
        raise ValueError(
            f"table {table!r}: {sharding.sharding_type} over {len(planned)} of {len(ranks)} ranks; use all"
        )
    shards, offset = [], 0
    for index, shard in enumerate(planned):
        rows = len(shard_rows(config.vocabulary_size, len(ranks), index, module.config.sharding_strategy))
        shards.append(ShardMetadata([offset, 0], [rows, config.dimension], shard.placement))
        offset += rows
    return ParameterSharding(
        sharding_type=sharding.sharding_type,
        compute_kernel=sharding.compute_kernel,
        ranks=ranks,
        sharding_spec=EnumerableShardingSpec(shards),
    )


def _check_node(table: Table, ranks: list[int], env: ShardingEnv) -> None:
    """Refuses a table-row-wise table that TorchRec cannot put on these ranks, or would step wrongly."""
    if env.world_size != dist.get_world_size():
        raise ValueError(
            f"table {table.name!r}: TorchRec's table_row_wise works over all ranks only, not in a subgroup"
        )
    local = get_topology_group_world_size(env.world_size)
    planned = PlannedTable(table.name, table.vocabulary_size, table.dimension, len(slots_of(table.optimizer)))
    problem = refusal(
        TablePlan(planned, "table_row_wise", ranks), env.world_size, local, table.optimizer.accumulation != "disabled"
    )
    if problem is not None:
        raise ValueError(f"table {table.name!r}: {problem} (LOCAL_WORLD_SIZE says how many ranks a node has)")


def _row_shards(sharding: ParameterSharding) -> int:
    """Into how many shards a table is cut by rows."""
    return len(sharding.sharding_spec.shards) if sharding.sharding_type in _BY_ROWS else 1


def _check_shards(module: TPUEmbeddingBagCollection, plan: Mapping[str, ParameterSharding]) -> None:
    """Refuses, on every rank alike, the one shard that TorchRec's optimizer state cannot describe."""
    for table in module.config.tables:
        shards = plan[module.bag_names[table.name]].sharding_spec.shards
        if len(slots_of(table.optimizer)) > 1 and any(list(shard.shard_sizes) == [1, 1] for shard in shards):
            raise ValueError(
                f"table {table.name!r}: the plan gives a rank one row of dimension 1, and TorchRec takes the slots of "
                f"{table.optimizer.algorithm} there for values of the whole table: use table_wise, or more rows"
            )


def _torchrec_twin(module: TPUEmbeddingBagCollection, plan: Mapping[str, ParameterSharding]) -> EmbeddingBagCollection:
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
        if plan[own.name].sharding_type in _BY_ROWS:
            config.num_embeddings = padded_rows(own.num_embeddings, _row_shards(plan[own.name]))
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
