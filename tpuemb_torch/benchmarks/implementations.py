"""The embedding step by this package and by others, behind one small interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tpuemb_torch.benchmarks.workloads import Workload

RATE = 0.01
ACCUMULATOR = 0.1


@dataclass(frozen=True)
class Batch:
    """One batch: ids and offsets as `Workload.draw` gives them, and the gradient of each feature's bags."""

    workload: Workload
    ids: Tensor
    offsets: Tensor
    gradient: Tensor  # [bags, features * dim]

    def per_feature(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Ids, offsets and gradient `[bags, dim]` of each feature."""
        bags, result = self.workload.bags, []
        for index, gradient in enumerate(self.gradient.split(self.workload.dim, dim=1)):
            offsets = self.offsets[index * bags : (index + 1) * bags + 1]
            ids = self.ids[int(offsets[0]) : int(offsets[-1])]
            result.append((ids, offsets - offsets[0], gradient.contiguous()))
        return result


class Implementation(ABC):
    """Tables of a workload with one optimizer."""

    #: Factor of the rate in the first step that float64 must follow: SparseAdam corrects its bias.
    first_rate = 1.0

    @abstractmethod
    def load(self, batch: Batch) -> None:
        """Brings a batch into the form that the implementation takes; not timed."""

    @abstractmethod
    def forward(self) -> None:
        """Looks the batch up."""

    @abstractmethod
    def backward(self) -> None:
        """Gradients and update of the batch that was looked up."""

    @abstractmethod
    def weights(self, table: int) -> Tensor:
        """Live `[rows, dim]` weights."""


class Ours(Implementation):
    """`TPUEmbeddingBagCollection`, from a KeyedJaggedTensor."""

    def __init__(self, workload: Workload, optimizer: str, kernel: str, device: str) -> None:
        from tpuemb_torch.collection import TPUEmbeddingBagCollection

        config = workload.config(optimizer)
        module = TPUEmbeddingBagCollection(config, device="meta", kernel=kernel)
        self.module = module.to_empty(device=device)
        for stored in self.module.stored():
            slots = iter(stored.tensors.values())
            next(slots).uniform_(-0.1, 0.1)
            for slot in slots:
                slot.fill_(ACCUMULATOR if not optimizer.startswith("adam ") else 0.0)

    def load(self, batch: Batch) -> None:
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        keys = self.module.preparation.names
        device = self.weights(0).device
        self._features = KeyedJaggedTensor(keys, batch.ids, offsets=batch.offsets).to(device)
        self._gradient = batch.gradient.to(device)

    def forward(self) -> None:
        self._out = self.module(self._features).values()

    def backward(self) -> None:
        self._out.backward(self._gradient)

    def weights(self, table: int) -> Tensor:
        return self.module.stored()[table].tensors["parameters"]


class OursByName(Ours):
    """`TPUEmbedding`, from one `Ragged` per feature, by name."""

    def __init__(self, workload: Workload, optimizer: str, kernel: str, device: str) -> None:
        import tpuemb_torch as tpuemb

        super().__init__(workload, optimizer, kernel, device)
        self.embedding = tpuemb.TPUEmbedding.__new__(tpuemb.TPUEmbedding)
        nn.Module.__init__(self.embedding)
        self.embedding._use(self.module)

    def load(self, batch: Batch) -> None:
        import tpuemb_torch as tpuemb

        device = self.weights(0).device
        parts = batch.per_feature()
        self._inputs = {
            f"f{i}": tpuemb.Ragged(offsets.to(device), ids.to(device)) for i, (ids, offsets, _) in enumerate(parts)
        }
        self._gradients = [gradient.to(device) for _, _, gradient in parts]

    def forward(self) -> None:
        self._found = self.embedding(self._inputs)

    def backward(self) -> None:
        torch.autograd.backward([self._found[name] for name in self._inputs], self._gradients)


class Fbgemm(Implementation):
    """FBGEMM's table-batched embedding with the optimizer fused into its backward."""

    def __init__(self, workload: Workload, optimizer: str, kernel: str, device: str) -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        where = (EmbeddingLocation.HOST, ComputeDevice.CPU)
        if device != "cpu":
            where = (EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
        adagrad = optimizer.startswith("adagrad ")
        self.module = SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, workload.dim, *where) for rows in workload.rows],
            optimizer=EmbOptimType.EXACT_ADAGRAD if adagrad else EmbOptimType.EXACT_SGD,
            learning_rate=RATE,
            eps=0.0,
        )
        for weights in self.module.split_embedding_weights():
            weights.uniform_(-0.1, 0.1)
        if adagrad:
            for (accumulators,) in self.module.split_optimizer_states():
                accumulators.fill_(ACCUMULATOR)

    def load(self, batch: Batch) -> None:
        device = self.weights(0).device
        self._batch = [tensor.to(device) for tensor in (batch.ids, batch.offsets, batch.gradient)]

    def forward(self) -> None:
        self._out = self.module(self._batch[0], self._batch[1])

    def backward(self) -> None:
        self._out.backward(self._batch[2])

    def weights(self, table: int) -> Tensor:
        return self.module.split_embedding_weights()[table]


class EmbeddingBags(Implementation):
    """One `nn.EmbeddingBag(sparse=True)` per table and an optimizer of torch.optim."""

    def __init__(self, workload: Workload, optimizer: str, kernel: str, device: str) -> None:
        tables = []
        for rows in workload.rows:
            weights = torch.empty(rows, workload.dim, device=device).uniform_(-0.1, 0.1)
            tables.append(
                nn.EmbeddingBag.from_pretrained(
                    weights, freeze=False, mode="sum", sparse=True, include_last_offset=True
                )
            )
        self.module = nn.ModuleList(tables)
        parameters = list(self.module.parameters())
        if optimizer.startswith("adam "):
            beta1, beta2 = 0.9, 0.999
            self.optimizer: torch.optim.Optimizer = torch.optim.SparseAdam(parameters, RATE, (beta1, beta2), 1e-6)
            self.first_rate = (1 - beta2) ** 0.5 / (1 - beta1)
        elif optimizer.startswith("adagrad "):
            self.optimizer = torch.optim.Adagrad(parameters, RATE, initial_accumulator_value=ACCUMULATOR, eps=0.0)
        else:
            self.optimizer = torch.optim.SGD(parameters, RATE)

    def load(self, batch: Batch) -> None:
        device = self.weights(0).device
        parts = batch.per_feature()
        self._inputs = [(ids.to(device), offsets.to(device)) for ids, offsets, _ in parts]
        self._gradients = [gradient.to(device) for _, _, gradient in parts]

    def forward(self) -> None:
        self._out = [table(ids, offsets) for table, (ids, offsets) in zip(self.module, self._inputs, strict=True)]

    def backward(self) -> None:
        self.optimizer.zero_grad()
        torch.autograd.backward(self._out, self._gradients)
        self.optimizer.step()

    def weights(self, table: int) -> Tensor:
        module = self.module[table]
        assert isinstance(module, nn.EmbeddingBag)
        return module.weight.detach()


@dataclass(frozen=True)
class Entry:
    """An implementation by name, and the optimizers that it has (None: all)."""

    label: str
    build: Callable[[Workload, str, str, str], Implementation]
    kernel: str = ""
    optimizers: Sequence[str] | None = None
    devices: Sequence[str] = ("cpu", "cuda")


def _tensorflow(workload: Workload, optimizer: str, kernel: str, device: str) -> Implementation:
    from tpuemb_torch.benchmarks.tensorflow_step import TensorFlow

    return TensorFlow(workload, optimizer)


IMPLEMENTATIONS: Mapping[str, Entry] = {
    "compiled": Entry("ours, compiled", Ours, "compiled"),
    "eager": Entry("ours, eager", Ours, "eager"),
    "by-name": Entry("ours, compiled, features by name", OursByName, "compiled"),
    "fbgemm": Entry("FBGEMM TBE", Fbgemm, "", ("sgd", "adagrad")),
    "embedding-bag": Entry("nn.EmbeddingBag + torch.optim", EmbeddingBags, "", ("sgd", "adagrad", "adam")),
    "tensorflow": Entry("TensorFlow", _tensorflow, "", ("sgd", "adagrad"), ("cpu",)),
}

#: Text of each optimizer's field.
OPTIMIZERS: Mapping[str, str] = {
    "sgd": "stochastic_gradient_descent {}",
    "adagrad": "adagrad {}",
    "adam": "adam { beta1: 0.9 beta2: 0.999 epsilon: 1e-6 }",
    "momentum": "momentum { momentum: 0.9 }",
    "ftrl": "ftrl { lr_power: -0.5 l1: 0.001 l2: 0.001 }",
    "ftrl-power": "ftrl { lr_power: -0.7 l1: 0.001 }",
    "rms_prop": "rms_prop { rho: 0.9 momentum: 0.9 epsilon: 1e-6 }",
    "centered_rms_prop": "centered_rms_prop { rho: 0.9 momentum: 0.9 epsilon: 1e-6 }",
    "adadelta": "adadelta { rho: 0.9 epsilon: 1e-6 }",
    "lion": "lion { beta1: 0.9 beta2: 0.99 }",
    "adagrad_momentum": "adagrad_momentum { momentum: 0.9 exponent: 2 beta2: 1 epsilon: 1e-6 }",
    "bounded_adagrad": "bounded_adagrad { max_var_update: 1 }",
    "proximal_adagrad": "proximal_adagrad { l1: 0.001 l2: 0.001 }",
    "proximal_yogi": "proximal_yogi { beta1: 0.9 beta2: 0.99 epsilon: 1e-3 }",
    "online_yogi": "online_yogi { beta2: 0.99 }",
}
