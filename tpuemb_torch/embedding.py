"""TPUEmbedding: the embedding layer of a TPUEmbeddingConfiguration as a torch module."""

from __future__ import annotations

from collections.abc import Collection as AbstractCollection
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpuemb_torch.collection import Combiners, TPUEmbeddingBagCollection, resolve_combiners
from tpuemb_torch.config import Config, load_config
from tpuemb_torch.kernels.step_inputs import check_rates
from tpuemb_torch.preprocessing import DeduplicationData, PreparedBatch, rejecting
from tpuemb_torch.sent_steps import SentStep
from tpuemb_torch.sharding import PlanLike, ShardedTPUEmbeddingBagCollection, TPUEmbeddingSharder, shard_collection
from tpuemb_torch.sharding import parameters as parameter_io
from tpuemb_torch.sharding.parameters import Parameters
from tpuemb_torch.statistics.recorder import CountsInput, InputStatistics
from tpuemb_torch.step_protocol import BatchQueue, check_deduplication_data, check_gradients, resolve_mode
from tpuemb_torch.supplied import SuppliedActivations

__all__ = ["TPUEmbedding", "TPUEmbeddingBagCollection", "shard", "sharders"]

Collection = TPUEmbeddingBagCollection | ShardedTPUEmbeddingBagCollection


class TPUEmbedding(CountsInput, nn.Module):
    """The embedding layer that a TPUEmbeddingConfiguration describes.

    Called on features, it returns activations by feature name, and `loss.backward()` applies the config's
    optimizers to the rows looked up.  A program written for TensorFlow's ops uses the step protocol instead:
    `enqueue`, `recv_activations`, `send_gradients`.

    Args:
        config: a `Config`, or anything `load_config` takes.
        combiners: see `TPUEmbeddingBagCollection`, as the others.
        device: where the tables live.
        kernel: "auto" | "compiled" | "eager".
        id_policy: "error" | "drop" | "clamp".
        gradient_reduction: "sum" | "mean" over ranks.
        seed: seed of the initial weights.
        experimental: algorithms to train with although their formula is not known: "mdl_adagrad_light".
    """

    collection: Collection

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
        experimental: AbstractCollection[str] = (),
    ) -> None:
        super().__init__()
        config = config if isinstance(config, Config) else load_config(config)
        self._use(
            TPUEmbeddingBagCollection(
                config,
                combiners,
                device=device,
                kernel=kernel,
                id_policy=id_policy,
                gradient_reduction=gradient_reduction,
                seed=seed,
                experimental=experimental,
            )
        )

    def _use(self, collection: Collection) -> None:
        self.collection = collection
        self.config = collection.config
        #: Checks and lays out features; it needs no tables, and can be pickled to data-loading workers.
        self.preparation = collection.feature_preparation
        self._queue = BatchQueue()
        #: Set by `TrainPipeline` while the model runs.
        self._supplied: SuppliedActivations | None = None

    @property
    def statistics(self) -> InputStatistics:
        """Those of the collection, which TorchRec may replace by its sharded twin."""
        return self.collection.statistics

    # The module: features in, activations out.

    def forward(self, features: object) -> dict[str, Tensor]:
        """Looks up a batch.

        Args:
            features: one input per feature: a mapping by feature name, a sequence in the config's order, or a
                `KeyedJaggedTensor`.  An input is a dense int32/int64 tensor, `Sparse`, `Ragged`, a torchrec
                `JaggedTensor`, a torch sparse COO or a torch jagged nested tensor.  With one axis more than the
                feature's `input_shape`, its last axis is combined (bags); with as many, each id is looked up by
                itself (sequences: what is missing is zero, what lies beyond the last step is dropped).  In a
                config without feature_descriptor, the samples of a table are its output rows
                `b * num_features + f`; a list of `num_features` inputs does too.  Or a `PreparedBatch`.

        Returns:
            float32 activations by feature name, `[batch, *input_shape[1:], dim]`.  Their backward applies the
            optimizers, unless the module is in eval mode, gradients are off or the config's mode is INFERENCE.

        Raises:
            InputError: for a malformed batch; it changes nothing.
            TypeError: if it is traced.
            NotImplementedError: in training, for tables that do not train (see `experimental`).
        """
        if _is_traced(features):
            raise TypeError(
                "TPUEmbedding cannot be traced, as TorchRec's train pipelines do with a model: use "
                "tpuemb_torch.TrainPipeline, or a TPUEmbeddingBagCollection in the model"
            )
        if self._supplied is not None:
            self.collection.check_not_replicated()
            return self._supplied.take(features)
        self.collection.step_queue.drain()
        train = self._trains()
        if train:
            self._check_trainable()
        with self.rejecting():
            batch = self.preparation(features)
        return self._by_name(self._look_up(batch, train, compare_rates=True))

    def masks(self, features: object) -> dict[str, Tensor]:
        """Which samples have an id.

        Args:
            features: as for `forward`.

        Returns:
            bool by feature name, of the shape of its activations without the last axis: for a sequence feature
            `[batch, steps]`, False where a step is missing (its activation is zero) or its id was dropped.

        Raises:
            InputError: for a malformed batch.
        """
        return self.preparation.masks(self.preparation(features))

    def set_learning_rates(self, learning_rates: Sequence[float | Tensor]) -> None:
        """Sets the dynamic learning rates, one scalar per tag, for the backwards from here on.

        Raises:
            ValueError: for a wrong number, or one that is not a finite scalar.
        """
        self.collection.set_learning_rates(learning_rates)

    # The step protocol: what the ops do.

    def enqueue(self, features: object, mode: str = "unspecified") -> None:
        """Adds a batch to the queue.

        Args:
            features: as for `forward`.
            mode: "unspecified" (the config's) | "train" | "training" | "inference" | "backward_pass_only".

        In a job of several ranks, all must call it: a part that one rejects is in no rank's queue.

        Raises:
            InputError: for a malformed batch, here or on another rank.
            ValueError: for an unknown mode, or training of an INFERENCE config.
            NotImplementedError: in a training mode, for tables that do not train (see `experimental`).
            RuntimeError: if too many batches wait already.
        """
        self.enqueue_with_combiners(features, mode, None)

    def enqueue_with_combiners(self, features: object, mode: str, combiners: Sequence[str] | None) -> None:
        """`enqueue`, with combiners per table for this batch (None: those of the module), as the ops give them."""
        with self.rejecting():
            mode = resolve_mode(mode, self.config.mode)
            if mode != "inference":
                self._check_trainable()
            if combiners is not None and isinstance(features, PreparedBatch):
                raise ValueError("a PreparedBatch has its combiners already: give none with it")
            by_table = None if combiners is None else resolve_combiners(self.config, combiners)
            batch = self.preparation(features, combiners=by_table)
            self._queue.check_room()
        # A batch that one rank rejects must be in no rank's queue.
        self.collection.confirm()
        self._queue.enqueue(mode, batch)

    def rejecting(self) -> AbstractContextManager[None]:
        """Tells the other ranks of an error inside, which wait in their part of the same call."""
        return rejecting(self.collection.reject)

    def recv_activations(self, deduplication_data: DeduplicationData | None = None) -> list[Tensor]:
        """Activations of the next batch, in the config's order; float32, without gradient.

        Args:
            deduplication_data: that of the batch, if at hand.

        Raises:
            RuntimeError: if no batch waits.
            ValueError: for the deduplication data of another batch.
        """
        with self.rejecting():
            batch = self._queue.to_receive()
            check_deduplication_data(deduplication_data, batch, "recv")
            train = batch.mode == "training"
            pipelined = train and self.config.pipeline_execution_with_tensor_core
            if pipelined and self._queue.waiting_for_gradients() > 1:
                raise RuntimeError(
                    "two training batches wait for their gradients: with pipeline_execution_with_tensor_core, the "
                    "lookup of a batch follows the update of the last but one; send the gradients of the oldest first"
                )
        if not pipelined:
            self.collection.step_queue.drain()
        activations = self._look_up(batch.prepared, train)
        self._queue.mark_received(batch, activations)
        # When pipelined, the update of the batch before follows this lookup.
        self.collection.step_queue.release()
        # Copies: what the caller does to them must not reach the graph that send goes back through.
        return [activation.detach().clone() for activation in activations]

    def recv_deduplication_data(self) -> DeduplicationData:
        """Deduplication data of the batch that the next `recv_activations` returns.

        The layer keeps the sorted ids that it is made of: recv and send do not sort again (unless the tables are
        sharded: then each rank sorts, once, the ids that it receives from all).
        """
        batch = self._queue.to_receive()
        batch.prepared = self.preparation.deduplicated(batch.prepared)
        return self.preparation.deduplication_data(batch.prepared, batch.number)

    def send_gradients(
        self,
        gradients: Sequence[Tensor | None],
        learning_rates: Sequence[float | Tensor] = (),
        deduplication_data: DeduplicationData | None = None,
    ) -> None:
        """Applies the optimizers with the gradients of the oldest received batch.

        Args:
            gradients: one float32 tensor per activation, of its shape, in the same order; None is a zero gradient,
                which is applied (momentum moves rows, for instance).
            learning_rates: one scalar per dynamic tag.
            deduplication_data: that of the batch, if at hand.

        Raises:
            ValueError, TypeError: for a wrong count, shape, dtype or batch, or learning rates that differ between
                ranks; no table changes then, on any rank.
            RuntimeError: if no batch waits for gradients.
        """
        rates: Tensor | None = None
        error: Exception | None = None
        try:
            batch = self._queue.to_send()
            check_deduplication_data(deduplication_data, batch, "send")
            names = [feature.name for feature in self.config.features]
            full_shapes = [
                (*shape, feature.table.dimension)
                for shape, feature in zip(batch.prepared.shapes, self.config.features, strict=True)
            ]
            checked = check_gradients(gradients, names, full_shapes)
            rates = check_rates(learning_rates, self.config.num_learning_rates)
        except (ValueError, TypeError, RuntimeError) as problem:
            error = problem
        self.collection.agree_on_step(error, rates)
        assert rates is not None
        if batch.mode == "backward_pass_only":
            self.collection.step_queue.drain()
            step = SentStep(self._look_up(batch.prepared, train=True), checked, rates)
            self._queue.done(batch)
            self.collection.step_queue.apply(step)
            return
        step = SentStep(batch.activations, checked, rates)
        self._queue.done(batch)
        if self.config.pipeline_execution_with_tensor_core and not self._queue.waiting_for_gradients():
            # The next batch has not been looked up: its lookup comes first.
            self.collection.step_queue.hold(step)
        else:
            self.collection.step_queue.apply(step)

    def drain(self) -> None:
        """Applies gradients that were sent and, with pipeline_execution_with_tensor_core, wait for the next lookup.

        Evaluation, loading, retrieving, state dicts and checkpoints do it themselves.  Collective.
        """
        self.collection.step_queue.drain()

    def discard_batches(self) -> int:
        """Drops all batches that wait for recv or send, as after an error in the model; returns how many.

        Gradients that were sent are applied first.  In a job of several ranks, all must call it.
        """
        self.collection.step_queue.drain()
        count = len(self._queue)
        self._queue.clear()
        return count

    # Parameters.

    def load_parameters(
        self,
        parameters: Mapping[str, Mapping[str, object]],
        num_shards: int = 1,
        shard_id: int = 0,
        *,
        allow_nonfinite: bool = False,
    ) -> None:
        """Writes tables and slots; in a job of several ranks, all must call it.

        Args:
            parameters: `{table: {"parameters": t, "accumulators": t, ...}}`, float `[rows of the shard, dim]` each.
                Tables and slots left out keep their values.
            num_shards: into how many DIV or MOD shards (as the config says) the tables are cut.
            shard_id: which of them this is; ranks may give different ones.
            allow_nonfinite: whether NaN and infinity are loaded; else they are refused.

        Raises:
            ValueError, TypeError: for an unknown table or slot, a wrong shape or dtype, or a value that is not finite;
                nothing is written then.
        """
        parameter_io.load(
            self.config,
            self.collection.stored(),
            parameters,
            num_shards,
            shard_id,
            self.collection.process_group,
            allow_nonfinite,
        )

    def retrieve_parameters(
        self, tables: Sequence[str] | None = None, num_shards: int = 1, shard_id: int = 0
    ) -> Parameters:
        """Reads tables and slots; in a job of several ranks, all must call it.

        Args:
            tables: names; None is all.
            num_shards: as for `load_parameters`.
            shard_id: which shard this rank wants.

        Returns:
            `{table: {"parameters": t, "accumulators": t, ...}}`, new CPU float32 tensors.
        """
        return parameter_io.retrieve(
            self.config, self.collection.stored(), tables, num_shards, shard_id, self.collection.process_group
        )

    # Inside.

    def _check_trainable(self) -> None:
        if self.collection.training_refusal is not None:
            raise NotImplementedError(self.collection.training_refusal)

    def _trains(self) -> bool:
        return self.training and torch.is_grad_enabled() and self.config.mode != "inference"

    def _start(self, batch: PreparedBatch, compare_rates: bool = False) -> Any:
        """Begins a lookup: in a sharded layer, its ids are on their way to the ranks that hold the rows.

        Args:
            batch: what to look up.
            compare_rates: whether ranks compare their learning rates, which nothing does at the step of `backward()`.
        """
        return self.collection.start(batch.input, compare_rates=compare_rates)

    def _finish(self, batch: PreparedBatch, started: Any, train: bool) -> list[Tensor]:
        """Activations of a lookup that was begun, in the config's order."""
        # Gradients may be sent for activations that were received in inference mode.
        with torch.inference_mode(False), torch.set_grad_enabled(train):
            found = dict(zip(self.preparation.order, self.collection.finish(started), strict=True))
            return [
                found[index].reshape(*shape, feature.table.dimension)
                for index, (feature, shape) in enumerate(zip(self.config.features, batch.shapes, strict=True))
            ]

    def _look_up(self, batch: PreparedBatch, train: bool, compare_rates: bool = False) -> list[Tensor]:
        return self._finish(batch, self._start(batch, compare_rates), train)

    def _by_name(self, activations: Sequence[Tensor]) -> dict[str, Tensor]:
        return dict(zip((feature.name for feature in self.config.features), activations, strict=True))


def shard(
    embedding: TPUEmbedding,
    plan: PlanLike = "auto",
    process_group: dist.ProcessGroup | None = None,
    device: str | torch.device | None = None,
    exchange: str | Mapping[str, str] | None = None,
) -> TPUEmbedding:
    """Shards an embedding layer over the ranks of a process group (collective).

    Args:
        embedding: the unsharded layer, equal on all ranks; on device "meta" it needs no memory.  It is left as it is.
        plan: "auto", "row_wise", "table_wise", "column_wise", "table_row_wise", or a mapping of these by table name;
            a plan from `make_plan` or `read_plan`, or the path of its file; or a TorchRec plan.  "auto" keeps to the
            memory of the smallest GPU, or of each CPU rank's part of its machine.
        process_group: one of all ranks of the job, which TorchRec shards over; default: the world.
        device: where this rank's part lives; default: the CPU, or the current CUDA device under NCCL.
        exchange: what ranks send each other, for all tables or by table name: "pooled", "distinct" or "auto" (the
            default), as for `make_plan`.  A ready plan says it itself.

    Returns:
        A new layer with the same parameters and slots, spread over the ranks.

    Raises:
        RuntimeError: without an initialised process group.
        ValueError: for a plan that does not fit.
        NotImplementedError: for a process group of some of the ranks.
    """
    if not isinstance(embedding.collection, TPUEmbeddingBagCollection):
        raise ValueError("the embedding is sharded already; retrieve and load its parameters to shard it otherwise")
    sharded = TPUEmbedding.__new__(TPUEmbedding)
    nn.Module.__init__(sharded)
    where = None if device is None else torch.device(device)
    sharded._use(shard_collection(embedding.collection, plan, process_group, where, exchange))
    return sharded


def _is_traced(features: object) -> bool:
    if isinstance(features, Mapping):
        features = next(iter(features.values()), None)
    elif isinstance(features, list | tuple):
        features = next(iter(features), None)
    return isinstance(features, torch.fx.Proxy)


def sharders() -> list[TPUEmbeddingSharder]:
    """Sharders for `torchrec.distributed.DistributedModelParallel(model, sharders=tpuemb_torch.sharders())`."""
    return [TPUEmbeddingSharder()]
