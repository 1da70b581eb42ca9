"""TPUEmbeddingBagCollection: a TorchRec EmbeddingBagCollection made from a TPUEmbeddingConfiguration."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from tpuemb_torch.config import Config, Table, load_config
from tpuemb_torch.fused_weights import FusedWeight, OutsideUse, check_not_replicated, watch
from tpuemb_torch.kernels import StepSource, StoredPart, TableBatchedEmbedding, TablePart, check_kernel, group_key
from tpuemb_torch.optimizers.trainability import check_experimental, may_differentiate, training_refusal
from tpuemb_torch.preprocessing import (
    COMBINERS,
    ID_POLICIES,
    BatchPreparation,
    InputError,
    Key,
    KeyedPreparation,
    PreparedInput,
    SlotLayout,
)
from tpuemb_torch.sent_steps import StepQueue, drain_before
from tpuemb_torch.statistics.recorder import CountsInput, InputStatistics

GRADIENT_REDUCTIONS = ("sum", "mean")
#: Optimizers that TorchRec's planner knows, by their number of slots (`_get_optimizer_multipler` in its
#: distributed/planner/shard_estimators.py); it knows none with more.
_WITH_SLOTS = (torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam)
Combiners = Sequence[str] | Mapping[str, str] | None


class TPUEmbeddingBagCollection(CountsInput, EmbeddingBagCollection):
    """Pooled embedding tables with the proto's optimizers fused into the backward pass.

    A drop-in `torchrec.EmbeddingBagCollection`: KeyedJaggedTensor in, KeyedTensor out.  Keys are the feature names;
    a feature with several samples per batch entry has several keys, `name#0`, `name#1`, ... (see `SlotLayout`).
    `backward()` steps every row that the forward looked up; weights are float32 and frozen for other optimizers.

    Args:
        config: a `Config`, or anything `load_config` takes.
        combiners: "sum", "mean" or "sqrtn" per table: a sequence in table order, or a mapping by table name (tables
            left out: "sum"); None is "sum" for all.  They are not part of the proto.
        device: where the tables live; "meta" allocates nothing, for sharding.
        kernel: "compiled" (the step in C++ on the CPU, through Triton on a GPU; needs a C++ compiler); "eager" (op by
            op); "auto" (compiled once there is enough work, eager where it cannot be); or "fbgemm" (FBGEMM's own update
            on the CPU, only for tables where it computes the same).
        id_policy: what happens to ids outside the table: "error" | "drop" | "clamp".
        gradient_reduction: "sum" over ranks (as on TPU) or "mean"; means nothing before sharding.
        seed: seed of the initial weights.
        experimental: algorithms to train with although their formula is not known: "mdl_adagrad_light".

    Raises:
        ConfigError: for a config that cannot be used.
        ValueError: for a bad option.
        NotImplementedError: for an optimizer that is not implemented.  The forward raises it in training mode where a
            table does not train (`experimental`).
    """

    def __init__(
        self,
        config: Config | Any,
        combiners: Combiners = None,
        *,
        device: str | torch.device = "cpu",
        kernel: str = "auto",
        id_policy: str = "error",
        gradient_reduction: str = "sum",
        seed: int = 0,
        experimental: Collection[str] = (),
    ) -> None:
        config = config if isinstance(config, Config) else load_config(config)
        check_kernel(kernel)
        _check_option("id_policy", id_policy, ID_POLICIES)
        _check_option("gradient_reduction", gradient_reduction, GRADIENT_REDUCTIONS)
        combiner_of = resolve_combiners(config, combiners)
        layout = SlotLayout(config)
        keys_of: dict[str, list[Key]] = {table.name: [] for table in config.tables}
        for feature, names in zip(config.features, layout.keys, strict=True):
            table = feature.table
            keys_of[table.name] += [
                Key(name, feature.name, table.name, table.vocabulary_size, combiner_of[table.name]) for name in names
            ]
        tables = in_group_order(config.tables)
        bag_names = module_names([table.name for table in config.tables])
        super().__init__(
            tables=[
                EmbeddingBagConfig(
                    name=bag_names[table.name],
                    num_embeddings=table.vocabulary_size,
                    embedding_dim=table.dimension,
                    feature_names=[key.name for key in keys_of[table.name]],
                    # Gains make every combiner a weighted sum.
                    pooling=PoolingType.SUM,
                )
                for table in tables
            ],
            is_weighted=True,
            device=torch.device("meta"),
        )
        self.config = config
        self.layout = layout
        #: Names of the tables' modules in `embedding_bags`: those of the tables wherever torch takes them.
        self.bag_names = bag_names
        self.id_policy = id_policy
        self.gradient_reduction = gradient_reduction
        self.seed = seed
        self.kernel_kind = kernel
        self.experimental = check_experimental(experimental)
        self.training_refusal = training_refusal(config, self.experimental)
        self.keys = [key for table in tables for key in keys_of[table.name]]
        self.preparation = KeyedPreparation(self.keys, id_policy)
        self.feature_preparation = BatchPreparation(config, self.keys, id_policy)
        self.steps = StepSource(config.num_learning_rates)
        self.step_queue = StepQueue(self.steps)
        feature_parts = [index for index, table in enumerate(tables) for _ in keys_of[table.name]]
        self._device = torch.device(device)
        self.kernel = TableBatchedEmbedding(
            [TablePart.whole(table) for table in tables], feature_parts, self._device, seed, self.steps, kernel
        )
        self._dims = self.kernel.feature_dims
        part_of = {table.name: index for index, table in enumerate(tables)}
        self._lookup_features = self.kernel.lookup_features(
            [part_of[config.features[index].table.name] for index in self.feature_preparation.order]
        )
        self._statistics = InputStatistics(config, self.keys)
        self._outside_uses = {table.name: OutsideUse(table) for table in tables}
        self._link_weights()
        self.register_load_state_dict_post_hook(_take_assigned_weights)
        self.register_state_dict_pre_hook(drain_before)
        self.register_load_state_dict_pre_hook(drain_before)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Looks up a batch.

        Args:
            features: raw ids and (optional) weights by key; keys beyond the collection's are ignored.

        Returns:
            `[batch, sum of dims]` float32 by key, in the order of `self.keys`.

        Raises:
            InputError: for a malformed batch; nothing is looked up then.
        """
        self._check_allocated()
        self.check_not_replicated()
        prepared = self.statistics.record(self.preparation.of_kjt(features))
        with torch.set_grad_enabled(may_differentiate(self.training_refusal, self.training)):
            values = self.kernel(prepared.ids, prepared.offsets, prepared.gains, prepared.ordered)
        return KeyedTensor(self.preparation.names, self._dims, values)

    def start(self, prepared: PreparedInput, *, compare_rates: bool = False) -> PreparedInput:
        """Begins the lookup of features that are prepared; there is nothing to send anywhere, and no one's rates."""
        return self.statistics.record(prepared)

    def finish(self, started: PreparedInput) -> list[Tensor]:
        """Looks features up.

        Args:
            started: from `start`.

        Returns:
            float32 `[samples, dim]` per feature, in the order of `feature_preparation`.
        """
        self._check_allocated()
        self.check_not_replicated()
        with torch.set_grad_enabled(may_differentiate(self.training_refusal, self.training)):
            return self.kernel.look_up_bags(
                self._lookup_features, started.ids, started.offsets, started.gains, started.bags, started.ordered
            )

    def reject(self, error: InputError) -> None:
        """Raises an error found in a batch before it reached the collection."""
        raise error

    def confirm(self) -> None:
        """Agrees with the other ranks that a batch is good; there are none."""

    def end(self) -> None:
        """Tells the other ranks that this one has no more batches; there are none."""

    def agree_on_step(self, error: Exception | None, rates: Tensor | None) -> None:
        """Raises the error found in a step's gradients or rates, if there is one."""
        if error is not None:
            raise error

    def set_learning_rates(self, rates: Sequence[float | Tensor]) -> None:
        """Sets the dynamic learning rates by tag, for all backwards until the next call."""
        self.steps.set_rates(rates)

    def stored(self) -> list[StoredPart]:
        """The parts of the tables held in this process, with live views, after all steps that were sent."""
        self._check_allocated()
        self.step_queue.drain()
        return self.kernel.stored()

    def check_not_replicated(self) -> None:
        """Raises RuntimeError in training inside a wrapper whose ranks would each train tables of their own."""
        if not (self.training and torch.is_grad_enabled()) or torch.compiler.is_compiling():
            return
        uses = self._outside_uses.values()
        check_not_replicated(uses, "has a copy of the tables on each rank, each trained by its own rank alone")
        bag = next(iter(self.embedding_bags.values()))
        if not isinstance(bag.weight, FusedWeight):
            raise RuntimeError(
                "something has put other parameters in place of the tables' weights, as fully_shard (FSDP) does: each "
                "rank would train tables of its own. Shard the layer first (tpuemb_torch.shard, or "
                "DistributedModelParallel with tpuemb_torch.sharders()), and let other wrappers leave it out"
            )

    def _check_allocated(self) -> None:
        if self._device.type == "meta":
            raise RuntimeError(
                'the tables are on device "meta": shard the layer (tpuemb_torch.shard), or allocate them with '
                '.to_empty(device="cpu") and reset_parameters()'
            )

    @property
    def process_group(self) -> None:
        """None: the tables are not sharded."""
        return None

    def reset_parameters(self) -> None:
        """Writes the initial weights and slots again (and allocates nothing)."""
        if self._device.type != "meta":
            self.step_queue.drain()
            self.kernel.reset_parameters(self.seed)

    def __getstate__(self) -> dict[str, Any]:
        self.step_queue.drain()
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Copies and pickles: their parameters become views of their own buffers."""
        super().__setstate__(state)
        self._link_weights()

    def _link_weights(self) -> None:
        """Makes `embedding_bags.<table>.weight` views of the kernel's buffers."""
        for stored in self.kernel.stored():
            table = stored.part.table.name
            bag = self.embedding_bags[self.bag_names[table]]
            bag.weight = FusedWeight(stored.tensors["parameters"], requires_grad=False)
            # TorchRec's planner takes from it how many numbers are stored beside each weight.
            bag.weight._optimizer_classes = [_WITH_SLOTS[min(len(stored.tensors) - 1, len(_WITH_SLOTS) - 1)]]
            watch(bag.weight, self._outside_uses[table])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TPUEmbeddingBagCollection:
        if fn(torch.empty(0)).dtype != torch.float32:
            raise TypeError("tables and slots of the TPU embedding layer are float32; they cannot change dtype")
        super()._apply(fn, recurse)
        self._device = self.kernel.device
        self._link_weights()
        return self


def _take_assigned_weights(module: TPUEmbeddingBagCollection, _incompatible: object) -> None:
    """After `load_state_dict(assign=True)`, which replaces parameters: their values go into the kernel's buffers."""
    for stored in module.kernel.stored():
        own, weight = (
            stored.tensors["parameters"],
            module.embedding_bags[module.bag_names[stored.part.table.name]].weight,
        )
        if weight.data_ptr() != own.data_ptr():
            own.copy_(weight.detach())
    module._link_weights()


def resolve_combiners(config: Config, combiners: Combiners) -> dict[str, str]:
    """Combiner of every table by name.

    Raises:
        ValueError: for an unknown combiner or table, or a wrong number.
    """
    names = [table.name for table in config.tables]
    if combiners is None:
        combiners = {}
    if isinstance(combiners, str):
        raise ValueError(f"combiners must be one per table (sequence or mapping), got the string {combiners!r}")
    if not isinstance(combiners, Mapping):
        if len(combiners) != len(names):
            raise ValueError(f"{len(combiners)} combiners for {len(names)} tables ({', '.join(names)}): give one each")
        combiners = dict(zip(names, combiners, strict=True))
    unknown = [name for name in combiners if name not in names]
    if unknown:
        raise ValueError(f"combiners for unknown tables {unknown}: the config has {names}")
    for name, combiner in combiners.items():
        if combiner not in COMBINERS:
            raise ValueError(f"table {name!r}: combiner {combiner!r} is not one of {', '.join(COMBINERS)}")
    return {name: combiners.get(name, "sum") for name in names}


def module_names(tables: Sequence[str]) -> dict[str, str]:
    """A module name for each table: its own, or one made from it where torch refuses that (dots, "items", ...)."""
    refused = nn.ModuleDict()
    names: dict[str, str] = {}
    taken = set(tables)
    for index, table in enumerate(tables):
        name = table
        if "." in table or hasattr(refused, table):
            name = f"{table.replace('.', '_')}_table{index}"
            while name in taken:
                name += "_"
            taken.add(name)
        names[table] = name
    return names


def in_group_order(tables: Sequence[Table]) -> list[Table]:
    """Tables ordered so that those which can share a kernel group are neighbours; otherwise as given."""
    first: dict[object, int] = {}
    for index, table in enumerate(tables):
        first.setdefault(group_key(table.optimizer, table.dimension), index)
    return sorted(tables, key=lambda table: first[group_key(table.optimizer, table.dimension)])


def _check_option(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r}: choose one of {', '.join(choices)}")
