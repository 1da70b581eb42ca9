"""Learning rates that differ between ranks, in pipelines, which look up ahead, and in models of TorchRec."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import tpuemb_torch as tpuemb
from tests.distributed import cases
from tests.distributed.test_rates import PIPELINED, SIZES, batch, both, error_of, layer, numbers, step
from tests.ranks import run_ranks


class Model(nn.Module):
    def __init__(self, embedding: tpuemb.TPUEmbedding) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, features: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.cat([a.flatten(1) for a in self.embedding(features).values()], dim=1).tanh()
        return (x - 1).square().sum(), x


def in_our_pipeline(rank: int, world: int, plan: Any, extra: str) -> tuple[list[str], bool, list[np.ndarray]]:
    """Rank 1's schedule goes astray after four steps, and is put right one step later."""
    embedding = layer(plan, extra)
    driven = tpuemb.LearningRates(embedding, [0.2, 0.1])
    pipeline = tpuemb.TrainPipeline(Model(embedding), None, features=lambda features: features)
    data = iter([batch(number, rank) for number in range(7)])
    messages, changed = [], []
    for number in range(7):
        for group in driven.param_groups:
            group["lr"] = 0.1 * (1 + number) + 0.01 * group["tag"] + (0.5 if number == 4 and rank else 0.0)
        before = copy.deepcopy(numbers(embedding))
        messages.append(error_of(lambda: pipeline.progress(data)))
        changed.append(any(not np.array_equal(a, b) for a, b in zip(before, numbers(embedding), strict=True)))
    return messages, changed == [True] * 4 + [False] + [True] * 2, numbers(embedding)


@pytest.mark.parametrize("extra", ["", PIPELINED])
def test_our_pipeline(extra: str) -> None:
    results = run_ranks(2, in_our_pipeline, "row_wise", extra)
    alone = layer(None)
    for number in (0, 1, 2, 3, 5, 6):
        alone.set_learning_rates([0.1 * (1 + number), 0.1 * (1 + number) + 0.01])
        step(alone, both(number))
    for messages, only_that_step_was_not, found in results:
        assert [bool(message) for message in messages] == [False] * 4 + [True] + [False] * 2
        assert messages[4].startswith("ValueError: learning rate of tag 0 is 0.5 on one rank and 1.0 on another")
        assert only_that_step_was_not
        for mine, whole in zip(found, numbers(alone), strict=True):
            np.testing.assert_allclose(mine, whole, rtol=1e-5, atol=1e-6)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = tpuemb.TPUEmbeddingBagCollection(cases.config_text("adagrad"), cases.COMBINERS)
        self.over = nn.Linear(8, 1)

    def forward(self, features: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.over(self.embedding(features)["viewer"])
        return (out - 1).square().sum(), out


def jagged(keys: list[str], step: int, rank: int, bad: bool = False) -> KeyedJaggedTensor:
    rng = np.random.default_rng([step, rank])
    lengths = torch.tensor(rng.integers(1, 3, len(keys) * SIZES[rank]))
    ids = torch.tensor(rng.integers(0, 2, int(lengths.sum())))
    return KeyedJaggedTensor(keys, ids - (5 if bad else 0), lengths=lengths)


def distributed_tower() -> tuple[Any, Any]:
    from torchrec.distributed import DistributedModelParallel

    torch.manual_seed(0)
    model = DistributedModelParallel(Tower(), device=torch.device("cpu"), sharders=tpuemb.sharders())
    return model, model.module.embedding


def in_torchrecs_pipeline(rank: int, world: int) -> list[str]:
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

    model, collection = distributed_tower()
    driven = tpuemb.LearningRates(collection, [0.2, 0.1])
    schedule = torch.optim.lr_scheduler.ExponentialLR(driven, 0.9)
    keys = [key.name for key in collection.keys]
    dense = torch.optim.SGD(model.module.over.parameters(), 0.1)
    pipeline = TrainPipelineSparseDist(model, dense, torch.device("cpu"))
    data = iter([jagged(keys, number, rank) for number in range(8)])
    messages = []
    for number in range(5):
        messages.append(error_of(lambda: pipeline.progress(data)))
        schedule.step()
        if number == 3 and rank:
            schedule.step()
    return messages


def test_torchrecs_pipeline() -> None:
    for messages in run_ranks(2, in_torchrecs_pipeline):
        assert messages[:4] == [""] * 4
        # 0.2 * 0.9 ** 4 and one step more.
        assert "learning rate of tag 0 is 0.118" in messages[4] and "on one rank and 0.131" in messages[4]


def bad_batch_in_a_model(rank: int, world: int) -> tuple[list[str], bool, list[float]]:
    model, collection = distributed_tower()
    collection.set_learning_rates([0.2, 0.1])
    keys = [key.name for key in collection.keys]
    messages, losses = [], []
    kept = []
    for number in range(3):
        kept.append([t.clone() for stored in collection.stored() for t in stored.tensors.values()])

        def train(number: int = number) -> None:
            loss, _ = model(jagged(keys, number, rank, bad=number == 1 and rank == 1))
            loss.backward()
            losses.append(float(loss.detach()))

        messages.append(error_of(train))
    return messages, all(torch.equal(a, b) for a, b in zip(kept[1], kept[2], strict=True)), losses


def test_a_bad_batch_of_a_collection_in_a_model_raises_on_every_rank() -> None:
    results = run_ranks(2, bad_batch_in_a_model)
    for rank, (messages, unchanged, losses) in enumerate(results):
        assert [bool(message) for message in messages] == [False, True, False]
        assert ("-5" in messages[1] or "-4" in messages[1]) == (rank == 1)
        assert ("another rank rejected its part" in messages[1]) == (rank == 0)
        assert unchanged
        assert len(losses) == 2
