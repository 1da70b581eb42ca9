"""The sharded collection: TorchRec's EmbeddingBagCollection with our input, kernels and outputs.

A step goes:

    KeyedJaggedTensor -> input_dist (checks, gains, id placement, then TorchRec's all-to-all)
                      -> lookup (TableBatchedEmbedding) -> output_dist (TorchRec's) -> KeyedTensor
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.embedding_sharding import EmbeddingSharding, EmbeddingShardingContext, EmbeddingShardingInfo
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionAwaitable,
    EmbeddingBagCollectionContext,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.types import (
    Awaitable,
    LazyAwaitable,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingEnv,
    ShardingType,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from tpuemb_torch.collection import TPUEmbeddingBagCollection
from tpuemb_torch.fused_weights import FusedWeight, OutsideUse, check_not_replicated, watch
from tpuemb_torch.kernels import StepSource, StoredPart, TableBatchedEmbedding
from tpuemb_torch.optimizers.trainability import may_differentiate
from tpuemb_torch.preprocessing import InputError, PreparedInput, over_slots, rejecting
from tpuemb_torch.sent_steps import StepQueue, drain_before
from tpuemb_torch.sharding.agreement import check_same_layer
from tpuemb_torch.sharding.exchange import Piece, move
from tpuemb_torch.sharding.placement import RowPlacement
from tpuemb_torch.sharding.step_agreement import StepAgreement, rate_words
from tpuemb_torch.sharding.torchrec.distinct import DISTINCT_SHARDINGS, DistinctLookups, DistinctSharding
from tpuemb_torch.sharding.torchrec.kernels import FusedLookups, FusedSlice, NodeRowWiseSharding, row_shard_of
from tpuemb_torch.sharding.torchrec.plan import (
    check_shards,
    exchange_of,
    num_row_shards,
    torchrec_twin,
    with_host_shards,
)
from tpuemb_torch.sharding.torchrec.state import check_mod_shards, refuse_assignment, write_mod_shards
from tpuemb_torch.statistics.recorder import CountsInput


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
        assert env.process_group is not None
        check_same_layer(module, plan, device, env.process_group)
        # TorchRec's constructor calls `_create_lookups`, which needs these; nn.Module's own has not run yet.
        object.__setattr__(self, "_source", module)
        object.__setattr__(self, "_steps", _step_source(module, env))
        plan = {name: with_host_shards(module, name, sharding, env) for name, sharding in plan.items()}
        check_shards(module, plan)
        super().__init__(
            module=torchrec_twin(module, plan),
            table_name_to_parameter_sharding=plan,
            env=env,
            fused_params=fused_params,
            device=device,
            module_fqn=module_fqn,
        )
        object.__delattr__(self, "_source")
        self._watch_weights(module)
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
        self._agreement = StepAgreement(env.process_group, device, self.steps)
        self._statistics = module.statistics.on_ranks(env.process_group, device)
        self.register_state_dict_pre_hook(drain_before)
        self.register_load_state_dict_pre_hook(drain_before)
        self._register_load_state_dict_pre_hook(refuse_assignment, with_module=True)
        shards_of = {table: num_row_shards(plan[bag]) for table, bag in module.bag_names.items()}
        self._placement = RowPlacement(
            [key.vocabulary_size for key in self.keys],
            [shards_of[key.table] for key in self.keys],
            module.config.sharding_strategy,
        )
        self.mod_shards = torch.tensor([shards_of[table.name] for table in module.config.tables])
        if module.config.sharding_strategy == "mod" and not self._placement.is_identity:
            self._register_state_dict_hook(write_mod_shards)
            self._register_load_state_dict_pre_hook(check_mod_shards, with_module=True)
        if module.kernel.device.type != "meta":
            move([Piece.of(s) for s in module.stored()], [Piece.of(s) for s in self.stored()], None)

    def _watch_weights(self, module: TPUEmbeddingBagCollection) -> None:
        # DistributedDataParallel takes it for imported where weights are marked as fused: it would fail before its
        # refusal.  Here, since it takes a third of a second.
        import_module("torch.distributed.optim")

        self._outside_uses = {table.name: OutsideUse(table) for table in module.config.tables}
        for table in module.config.tables:
            bag = self.embedding_bags[module.bag_names[table.name]]
            if not isinstance(bag.weight, FusedSlice):  # TorchRec's empty one, on a rank without a part of the table
                bag.weight = FusedWeight(bag.weight.detach(), requires_grad=False)
            watch(bag.weight, self._outside_uses[table.name])

    def check_not_replicated(self) -> None:
        """Raises RuntimeError inside a DistributedDataParallel, which takes the shards for copies."""
        check_not_replicated(self._outside_uses.values(), "overwrites the rows of all ranks with those of the first")

    def _create_lookups(self) -> None:
        module = object.__getattribute__(self, "_source")
        steps: StepSource = object.__getattribute__(self, "_steps")
        for sharding in self._embedding_shardings:
            rank = dist.get_rank(sharding._pg)
            configs = sharding._grouped_embedding_configs_per_rank[rank]
            distinct = isinstance(sharding, DistinctSharding)
            kind = DistinctLookups if distinct else FusedLookups
            # TorchRec may divide gradients on their way, the exchange of distinct rows does not.
            inputs = steps.undivided if distinct else steps
            lookups = kind(
                module, inputs, row_shard_of(sharding, rank), configs, sharding._device, sharding._pg, sharding._env
            )
            if isinstance(sharding, DistinctSharding):
                sharding.prepare(module, lookups)
            self._lookups.append(lookups)

    @classmethod
    def create_grouped_sharding_infos(cls, *args: Any, **kwargs: Any) -> dict[str, list[EmbeddingShardingInfo]]:
        """TorchRec's groups by kind of sharding, each cut in two by what its tables exchange."""
        groups = super().create_grouped_sharding_infos(*args, **kwargs)
        found: dict[str, list[EmbeddingShardingInfo]] = {}
        for kind, infos in groups.items():
            for info in infos:
                exchange = exchange_of(info.param_sharding)
                found.setdefault(kind if exchange == "pooled" else f"{kind}, {exchange} rows", []).append(info)
        return found

    @classmethod
    def create_embedding_bag_sharding(
        cls,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        permute_embeddings: bool = False,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> EmbeddingSharding[EmbeddingShardingContext, KeyedJaggedTensor, Tensor, Tensor]:
        kind = sharding_infos[0].param_sharding.sharding_type
        if exchange_of(sharding_infos[0].param_sharding) == "distinct":
            return DISTINCT_SHARDINGS[kind](sharding_infos, env, device)
        if kind == ShardingType.TABLE_ROW_WISE.value:
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
        self._agreement.on_batch(error)

    def confirm(self) -> None:
        """Agrees with the other ranks that this rank's part of a batch is good (collective); raises if one's is not."""
        self._agreement.on_batch()

    def agree_on_step(self, error: Exception | None, rates: Tensor | None) -> None:
        """Agrees with the other ranks that a step may be applied (collective); see `StepAgreement.on_step`."""
        self._agreement.on_step(error, rates)

    def input_dist(
        self, ctx: EmbeddingBagCollectionContext, features: KeyedJaggedTensor | PreparedInput
    ) -> Awaitable[Awaitable[KJTList]]:
        """Prepares the batch, agrees with the other ranks on a common size, and distributes it.

        Raises:
            InputError: for a malformed batch, here or on another rank.
            ValueError: if the ranks' learning rates differ, or those of the backwards since the last lookup did.
        """
        self.check_not_replicated()
        compare_rates = not isinstance(ctx, _Context) or ctx.compare_rates
        with torch.no_grad():
            with rejecting(self.reject):
                prepared = features if isinstance(features, PreparedInput) else self.preparation.of_kjt(features)
                rates = rate_words(self.steps) if compare_rates else None
            slots = self.feature_preparation.slots if prepared.by_feature else [1] * len(self.keys)
            ctx.own_stride = max((-(-bags // n) for bags, n in zip(prepared.bags, slots, strict=True)), default=0)
            stride, weighted = self._agreement.on_batch(None, ctx.own_stride, prepared.gains is not None, rates=rates)
            self.statistics.record(prepared)
            by_key = over_slots(prepared, slots, stride)
            return super().input_dist(ctx, self._to_distribute(by_key, stride, weighted))

    def end(self) -> None:
        """Tells the other ranks, which may begin a lookup, that this one has no more batches (collective)."""
        with suppress(InputError):  # theirs, not this rank's
            self._agreement.on_batch(ended=True)

    def _to_distribute(self, prepared: PreparedInput, stride: int, weighted: bool) -> KeyedJaggedTensor:
        """Places ids; with weights if any rank has them."""
        ids = self._placement.place(prepared.ids, prepared.ids_per_key())
        if self._placement.largest_id < torch.iinfo(torch.int32).max:
            ids = ids.int()  # half the bytes to send
        weights = prepared.gains
        if weighted and weights is None:
            weights = torch.ones(ids.numel(), dtype=torch.float32, device=ids.device)
        return KeyedJaggedTensor(self.preparation.names, ids, weights=weights, lengths=prepared.lengths, stride=stride)

    def start(self, prepared: PreparedInput, *, compare_rates: bool = False) -> StartedLookup:
        """Begins the lookup of features that are prepared: agrees with the other ranks and starts the input dist.

        Args:
            prepared: what to look up.
            compare_rates: whether to compare the ranks' learning rates: not where steps go through `agree_on_step`.
        """
        context = self.create_context()
        context.compare_rates = compare_rates
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

    def create_context(self) -> _Context:
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

    def register_post_lookup_tracker_fn(self, record_fn: object) -> None:
        """Refuses TorchRec's model trackers: ids are those of placed rows here, which they would take for others."""
        raise NotImplementedError(
            "TorchRec's model trackers do not know where the rows of these tables lie: name the module in fqns_to_skip"
        )

    @property
    def unsharded_module_type(self) -> type[TPUEmbeddingBagCollection]:
        return TPUEmbeddingBagCollection


class _Context(EmbeddingBagCollectionContext):
    """TorchRec's context of one batch, this rank's own number of samples, and whether ranks compare their rates."""

    own_stride: int = 0
    compare_rates: bool = True


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


def _step_source(module: TPUEmbeddingBagCollection, env: ShardingEnv) -> StepSource:
    world = env.world_size

    def divisor() -> float:
        # TorchRec divides by the world size in its collectives if its global switch says so.
        return float(world) if get_gradient_division() else 1.0

    scale = 1.0 if module.gradient_reduction == "sum" else 1.0 / world
    return StepSource(module.config.num_learning_rates, cores=world, scale=scale, divisor=divisor)
