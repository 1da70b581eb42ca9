"""Models, batches and training for the tests with TorchRec: the same steps in one process and on several ranks.

TorchRec's own helpers for this (`torchrec.distributed.test_utils.test_sharding`) import `torchrec.distributed.tests`,
which its wheels do not have; those that can be imported build their own collections.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.streamable import Pipelineable

import tpuemb_torch as tpuemb
from tpuemb_torch.sharding import model_plan
from tpuemb_torch.sharding.parameters import retrieve

CONFIG = tpuemb.load_config("""
mode: TRAINING num_hosts: 1 num_tensor_cores: 1 sharding_strategy: MOD
table_descriptor { name: "user" vocabulary_size: 13 dimension: 4 optimization_parameters {
    learning_rate { dynamic { tag: 0 } } adagrad {}
    gradient_clipping_limits { lower { value: -0.2 } upper { value: 0.2 } } } }
table_descriptor { name: "item" vocabulary_size: 7 dimension: 4 optimization_parameters {
    learning_rate { constant: 0.1 } adam { beta1: 0.9 beta2: 0.99 epsilon: 0.001 } } }
feature_descriptor { name: "viewer" table_id: 0 input_shape: 4 }
feature_descriptor { name: "friends" table_id: 0 input_shape: 4 }
feature_descriptor { name: "seen" table_id: 1 input_shape: 4 }
""")
COMBINERS = {"user": "mean", "item": "sum"}
FEATURES = {"viewer": 13, "friends": 13, "seen": 7, "tag": 11}
RATE = 0.2


@dataclass
class Batch(Pipelineable):
    """`scale` makes the loss a mean over the samples of all ranks once the ranks' gradients are averaged."""

    dense_features: Tensor
    sparse_features: KeyedJaggedTensor
    labels: Tensor
    scale: float

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return self

    def record_stream(self, stream: torch.Stream) -> None:
        pass

    def pin_memory(self) -> Batch:
        return self


def batch(step: int, sizes: list[int], ranks: list[int]) -> Batch:
    """The samples of some ranks, one rank's after the other's; `sizes` are those of all ranks."""
    dense, labels = [], []
    lengths: dict[str, list[int]] = {name: [] for name in FEATURES}
    ids: dict[str, list[int]] = {name: [] for name in FEATURES}
    for rank in ranks:
        rng = np.random.default_rng([step, rank])
        for _ in range(sizes[rank]):
            dense.append(rng.normal(size=3))
            labels.append(float(rng.integers(0, 2)))
            for name, rows in FEATURES.items():
                found = rng.integers(0, rows, rng.integers(0, 4)).tolist()
                ids[name] += found
                lengths[name].append(len(found))
    sparse = KeyedJaggedTensor(
        list(FEATURES),
        torch.tensor([i for name in FEATURES for i in ids[name]]),
        lengths=torch.tensor([n for name in FEATURES for n in lengths[name]]),
    )
    dense_features = torch.tensor(np.array(dense).reshape(-1, 3), dtype=torch.float32)
    return Batch(dense_features, sparse, torch.tensor(labels), len(sizes) / len(ranks) / sum(sizes))


class Model(nn.Module):
    """Ours beside an ordinary collection of TorchRec and dense layers."""

    def __init__(self, ours: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        kind = tpuemb.TPUEmbedding if ours == "layer" else tpuemb.TPUEmbeddingBagCollection
        # TorchRec's collections and DistributedDataParallel average over the ranks.
        self.embedding = kind(CONFIG, COMBINERS, seed=3, gradient_reduction="mean")
        tags = EmbeddingBagConfig(name="tags", num_embeddings=11, embedding_dim=4, feature_names=["tag"])
        self.other = EmbeddingBagCollection(tables=[tags])
        self.bottom = nn.Linear(3, 4)
        self.top = nn.Sequential(nn.Linear(20, 8), nn.Tanh(), nn.Linear(8, 1))

    def own_features(self, features: KeyedJaggedTensor) -> Any:
        # The layer refuses features that it does not know; the collection leaves them to others, as TorchRec's do.
        if isinstance(self.embedding, tpuemb.TPUEmbedding):
            return {feature.name: features[feature.name] for feature in CONFIG.features}
        return features

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        own = self.embedding(self.own_features(batch.sparse_features))
        tags = self.other(batch.sparse_features)
        x = [own["viewer"], own["friends"], own["seen"], tags["tag"], self.bottom(batch.dense_features)]
        out = self.top(torch.cat(x, dim=1)).squeeze(1)
        return (out - batch.labels).square().sum() * batch.scale, out


def distributed(
    model: nn.Module, path: str, plan: str, other: str | None = None, exchange: str = "auto"
) -> DistributedModelParallel:
    """Shards a model; `path` is its module of ours, and `other` the compute kernel of its `other` collection."""
    world = dist.get_world_size()
    whole = model_plan(model, tpuemb.make_plan(CONFIG, world, sharding=plan, exchange=exchange))
    assert list(whole.plan) == [path]
    sharders = [*tpuemb.sharders(), EmbeddingBagCollectionSharder()]
    if other is not None:
        kind = row_wise() if plan == "row_wise" else table_wise(rank=1, compute_kernel=other)
        whole.plan["other"] = construct_module_sharding_plan(
            model.other, {"tags": kind}, sharders[1], world_size=world, local_size=world, device_type="cpu"
        )
    start = {name: value.detach().clone() for name, value in model.state_dict().items() if name.startswith("other.")}
    sharded = DistributedModelParallel(model, device=torch.device("cpu"), plan=whole, sharders=sharders)
    for name, value in start.items():  # TorchRec's sharding draws new weights
        for shard in sharded.state_dict()[name].local_shards():
            first, rows = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
            shard.tensor.detach().copy_(value[first : first + rows])
    return sharded


def optimizer_of(model: nn.Module) -> CombinedOptimizer:
    """Adam for what nothing trains in the backward pass, as in TorchRec's examples, beside the fused optimizers."""
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    optimizers = [KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.Adam(parameters, lr=0.05))]
    if isinstance(model, DistributedModelParallel):
        optimizers.insert(0, model.fused_optimizer)
    return CombinedOptimizer(optimizers)


def train_other_in_backward(model: Model) -> None:
    apply_optimizer_in_backward(torch.optim.SGD, model.other.parameters(), {"lr": 0.3})


def loop(model: nn.Module, batches: Iterator[Batch]) -> list[np.ndarray]:
    """The steps without any pipeline; returns the outputs."""
    optimizer = optimizer_of(model)
    outputs = []
    for each in batches:
        optimizer.zero_grad()
        loss, out = model(each)
        loss.backward()
        optimizer.step()
        outputs.append(output_of(out))
    return outputs


def output_of(out: Any) -> np.ndarray:
    """The predictions in what a model or pipeline returns: TorchRec's DLRM gives (loss, logits, labels)."""
    return (out[1] if isinstance(out, tuple) else out).detach().numpy()


def numbers(model: nn.Module, collection: Any) -> dict[str, np.ndarray]:
    """Tables with their slots, dense weights, and the table of TorchRec's collection (collective)."""
    tables = retrieve(CONFIG, collection.stored(), None, 1, 0, collection.process_group)
    found = {f"{table}/{slot}": t.numpy() for table, slots in tables.items() for slot, t in slots.items()}
    for name, value in model.state_dict().items():
        if name.startswith("other."):
            found["tags"] = _whole(value).numpy()
        elif "embedding" not in name:
            found[name] = value.numpy().copy()
    return found


def _whole(value: Any) -> Tensor:
    """All rows of a table that TorchRec may have sharded."""
    if isinstance(value, Tensor) and type(value).__name__ != "ShardedTensor":
        return value.detach().clone()
    mine = [(shard.metadata.shard_offsets, shard.tensor) for shard in value.local_shards()]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return torch.cat([tensor for _, tensor in sorted((p for parts in every for p in parts), key=lambda part: part[0])])


def assert_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=2e-5, atol=2e-6, err_msg=name)
