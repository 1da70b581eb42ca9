"""TrainPipeline: a training loop that prepares and sends the next batch while the model computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from tpuemb_torch.embedding import TPUEmbedding
from tpuemb_torch.preprocessing import InputError, PreparedBatch, Ragged, Sparse
from tpuemb_torch.sent_steps import SentStep
from tpuemb_torch.sharding.step_agreement import BatchesEndedError
from tpuemb_torch.supplied import SuppliedActivations

Getter: TypeAlias = str | Callable[[Any], Any]


class TrainPipeline:
    """Trains a model that contains a `TPUEmbedding`; used like TorchRec's train pipelines.

    `progress` trains on one batch.  Meanwhile it reads the next one, prepares its features on another thread and
    sends its ids to the ranks that hold the rows.  On the tables, with F the lookup and B the update of a batch, the
    order is F1 B1 F2 B2 ...; if the config says `pipeline_execution_with_tensor_core`, it is F1 F2 B1 F3 B2 ... BN.
    Whatever drains the pipeline between two steps (evaluation, load, retrieve, a state dict, a checkpoint, `drain`)
    finds all updates applied, and the lookup after it sees them.

    An error in the model (forward, backward) leaves tables, slots and dense parameters as they were before the step,
    on all ranks; the next `progress` goes on with the next batch.

    Args:
        model: called with a batch, in training mode it returns `(losses, output)`; the sum of the losses is
            differentiated.  In eval mode there is neither backward nor step.
        optimizer: of the other parameters; None if there are none.
        device: where batches are moved to; None leaves them where they are.
        features: where the features of the batch are: the name of an attribute or key, or a function of the batch.
            The model must look up exactly these.  For a model with several embedding layers, a mapping of these by
            the layers' module names.

    Raises:
        ValueError: if the model has no `TPUEmbedding`, or `features` does not name each.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        device: str | torch.device | None = None,
        *,
        features: Getter | Mapping[str, Getter] = "features",
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._device = None if device is None else torch.device(device)
        self._layers = _layers(model, features)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tpuemb-prepare")
        self._ahead: _Step | None = None
        self._closed = False

    def progress(self, iterator: Iterator[Any]) -> Any:
        """Trains on the next batch (collective in a job of several ranks).

        Args:
            iterator: gives batches; one batch is read ahead.

        Returns:
            The model's output (in eval mode: all that the model returns).

        Raises:
            StopIteration: when all batches are done.
            InputError: for a malformed batch, here or on another rank, or if another rank has fewer batches; it
                changes nothing.
            RuntimeError: after `close`.
        """
        if self._closed:
            raise RuntimeError("this TrainPipeline was closed: make another")
        step, self._ahead = self._ahead or self._read(iterator), None
        self._start(step)
        if isinstance(step.error, BatchesEndedError):
            self._ahead = _Step(None, [], begun=True, end=True)
        if step.error is not None:
            raise step.error
        if step.end:
            raise StopIteration
        training = self._model.training and torch.is_grad_enabled()
        if not training:
            for layer, _ in self._layers:
                layer.drain()
        self._finish(step, training)
        self._ahead = self._read(iterator)
        try:
            if not training:
                return self._forward(step)
            return self._train(step)
        finally:
            step.activations.clear()

    def close(self) -> None:
        """Ends the thread and forgets the batch that was read ahead."""
        self._ahead, self._closed = None, True
        self._thread.shutdown(cancel_futures=True)

    # The stages of a batch, in their order.

    def _read(self, iterator: Iterator[Any]) -> _Step:
        """Takes a batch from the iterator and begins to prepare it."""
        try:
            batch = _to_device(next(iterator), self._device)
        except StopIteration:
            return _Step(None, [], end=True)
        except Exception as error:  # told when its turn comes: the batch before it must not be lost
            return _Step(None, [], error=error)
        return _Step(batch, [self._thread.submit(_prepare, layer, get, batch) for layer, get in self._layers])

    def _start(self, step: _Step) -> None:
        """Begins the lookups of a batch: the input dist of sharded layers.  A malformed batch keeps its error."""
        if step.begun:
            return
        step.begun = True
        if step.end:
            for layer, _ in self._layers:
                layer.collection.end()
            return
        for index, (layer, _) in enumerate(self._layers):
            if step.error is None:
                try:
                    features, batch = step.prepared[index].result()
                    step.features.append(features)
                    step.batches.append(batch)
                except Exception as error:
                    step.error = error
            try:
                if step.error is not None:
                    # The other ranks wait in their input dist for this one's.
                    layer.collection.reject(InputError(str(step.error)))
                step.started.append(layer._start(step.batches[index]))
            except InputError as error:
                step.error = step.error or error

    def _finish(self, step: _Step, training: bool, ahead: bool = False) -> None:
        """Looks the batch up, unless that was done ahead and no one has drained the pipeline since.

        Ahead of the update of the batch before, only layers that are pipelined do.
        """
        for index, (layer, _) in enumerate(self._layers):
            if ahead and not layer.config.pipeline_execution_with_tensor_core:
                continue
            generation = layer.collection.step_queue.generation
            train = training and layer._trains()
            if index in step.activations:
                if (generation, train) == (step.generations[index], step.trains[index]):
                    continue
                with layer.statistics.paused():  # counted when it was begun first
                    step.started[index] = layer._start(step.batches[index])
            step.trains[index] = train
            step.activations[index] = layer._finish(step.batches[index], step.started[index], train)
            step.generations[index] = generation

    def _forward(self, step: _Step) -> Any:
        """Runs the model on activations that its embedding layers find ready."""
        for index, (layer, _) in enumerate(self._layers):
            step.leaves.append([a.detach().requires_grad_(a.requires_grad) for a in step.activations[index]])
            # Copies, so that the model may change its activations in place as it may those of the layer alone.
            given = [leaf.clone() for leaf in step.leaves[index]]
            layer._supplied = SuppliedActivations(step.features[index], layer._by_name(given))
        try:
            result = self._model(step.batch)
            for layer, _ in self._layers:
                assert layer._supplied is not None
                layer._supplied.check_taken()
            return result
        finally:
            for layer, _ in self._layers:
                layer._supplied = None

    def _train(self, step: _Step) -> Any:
        error: Exception | None = None
        output = None
        if self._optimizer is not None:
            self._optimizer.zero_grad()
        try:
            losses, output = self._forward(step)
        except Exception as problem:
            error = problem
        # Ranks whose model failed still take part: the others are here.
        ahead = self._ahead
        assert ahead is not None
        self._start(ahead)
        rates: dict[int, Tensor] = {}
        if error is None:
            try:
                torch.sum(losses).backward()
                rates = {
                    index: layer.collection.steps.required()
                    for index, (layer, _) in enumerate(self._layers)
                    if step.trains[index]
                }
            except Exception as problem:
                error = problem
        for index, (layer, _) in enumerate(self._layers):
            layer.collection.agree_on_step(error, rates.get(index))
        if ahead.error is None and not ahead.end:
            self._finish(ahead, training=True, ahead=True)
        for index, (layer, _) in enumerate(self._layers):
            if step.trains[index]:
                leaves = step.leaves[index]
                gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
                layer.collection.step_queue.apply(SentStep(step.activations[index], gradients, rates[index]))
        if self._optimizer is not None:
            self._optimizer.step()
        return output


@dataclass(eq=False)
class _Step:
    """One batch on its way through the pipeline; the lists have one entry per embedding layer, dicts at most one."""

    batch: Any
    prepared: list[Future[tuple[Any, PreparedBatch]]]
    begun: bool = False
    #: Instead of a batch: the end of the iterator.
    end: bool = False
    features: list[Any] = field(default_factory=list)
    batches: list[PreparedBatch] = field(default_factory=list)
    started: list[Any] = field(default_factory=list)
    #: Of the layers' step queues when they looked the batch up.
    generations: dict[int, int] = field(default_factory=dict)
    activations: dict[int, list[Tensor]] = field(default_factory=dict)
    #: Whether the lookup was for training: not in a layer that is in eval mode, or has an INFERENCE config.
    trains: dict[int, bool] = field(default_factory=dict)
    leaves: list[list[Tensor]] = field(default_factory=list)
    error: Exception | None = None


def _layers(model: nn.Module, features: Getter | Mapping[str, Getter]) -> list[tuple[TPUEmbedding, Callable[..., Any]]]:
    found = {name: module for name, module in model.named_modules() if isinstance(module, TPUEmbedding)}
    if not found:
        raise ValueError("the model has no TPUEmbedding: use one of TorchRec's train pipelines")
    if not isinstance(features, Mapping):
        if len(found) > 1:
            raise ValueError(f"the model has the embedding layers {list(found)}: give features={{name: ...}} for each")
        features = dict.fromkeys(found, features)
    if set(features) != set(found):
        raise ValueError(f"features are given for {sorted(features)}, but the model's layers are {sorted(found)}")
    return [(layer, _getter(features[name])) for name, layer in found.items()]


def _getter(where: Getter) -> Callable[[Any], Any]:
    if not isinstance(where, str):
        return where
    name = where

    def get(batch: Any) -> Any:
        return batch[name] if isinstance(batch, Mapping) else attrgetter(name)(batch)

    return get


def _prepare(layer: TPUEmbedding, get: Callable[[Any], Any], batch: Any) -> tuple[Any, PreparedBatch]:
    """On the other thread: the features of a batch, and what the lookup needs of them."""
    features = get(batch)
    # The kernel of a sharded layer sees the ids of all ranks: sorting this rank's does not help it.
    return features, layer.preparation(features, deduplicate=layer.collection.process_group is None)


def _to_device(value: Any, device: torch.device | None) -> Any:
    if device is None:
        return value
    if isinstance(value, Sparse | Ragged):
        tensors = {f.name: _to_device(getattr(value, f.name), device) for f in fields(value)}
        return replace(value, **tensors)
    if isinstance(value, Mapping):
        return {key: _to_device(item, device) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_to_device(item, device) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_to_device(item, device) for item in value)
    if hasattr(value, "to"):
        return value.to(device, non_blocking=True)
    return value
