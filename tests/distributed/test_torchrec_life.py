"""Models of TorchRec with our tables in them give, on several ranks, the numbers of one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR
from torchrec.distributed.train_pipeline import EvalPipelineSparseDist, TrainPipelineBase, TrainPipelineSparseDist
from torchrec.models.dlrm import DLRM, DLRMTrain

import tpuemb_torch as tpuemb
from tests.distributed import torchrec_cases as cases
from tests.ranks import run_ranks

STEPS = 5
#: Samples of each rank.  TorchRec's row-wise collections need equal batches, ours do not.
SIZES = {"row_wise": [3, 3], "table_wise": [4, 2]}
PIPELINES = {"base": TrainPipelineBase, "sparse_dist": TrainPipelineSparseDist}


def collection_of(model: Any) -> Any:
    return getattr(model.embedding, "collection", model.embedding)


def run(model: torch.nn.Module, pipeline: str, batches: Any) -> list[np.ndarray]:
    if pipeline == "loop":
        return cases.loop(model, batches)
    train = PIPELINES[pipeline](model, cases.optimizer_of(model), torch.device("cpu"))
    outputs = []
    while True:
        try:
            outputs.append(cases.output_of(train.progress(batches)))
        except StopIteration:
            return outputs


def on_rank(rank: int, world: int, ours: str, plan: str, other: str, pipeline: str, exchange: str) -> Any:
    inner = cases.Model(ours)
    if other == "fused":
        cases.train_other_in_backward(inner)
    path = "embedding.collection" if ours == "layer" else "embedding"
    model = cases.distributed(inner, path, plan, other, exchange)
    collection = collection_of(model.module)
    collection.set_learning_rates([cases.RATE])
    outputs = run(model, pipeline, iter([cases.batch(step, SIZES[plan], [rank]) for step in range(STEPS)]))
    return outputs, cases.numbers(model, collection)


def one_process(plan: str, other: str) -> Any:
    model = cases.Model("collection")
    if other == "fused":
        cases.train_other_in_backward(model)
    model.embedding.set_learning_rates([cases.RATE])
    outputs = cases.loop(model, iter([cases.batch(step, SIZES[plan], [0, 1]) for step in range(STEPS)]))
    return outputs, cases.numbers(model, model.embedding)


CASES = [
    ("layer", "row_wise", "fused", "loop", "auto"),
    ("layer", "table_wise", "dense", "base", "auto"),
    ("collection", "row_wise", "fused", "base", "auto"),
    ("collection", "row_wise", "fused", "sparse_dist", "distinct"),
    ("collection", "row_wise", "fused", "sparse_dist", "pooled"),
    ("collection", "table_wise", "fused", "sparse_dist", "distinct"),
    ("collection", "table_wise", "dense", "sparse_dist", "pooled"),
]


@pytest.mark.parametrize(("ours", "plan", "other", "pipeline", "exchange"), CASES)
def test_beside_a_collection_of_torchrec_and_dense_layers(
    ours: str, plan: str, other: str, pipeline: str, exchange: str
) -> None:
    outputs, expected = one_process(plan, other)
    results = run_ranks(2, on_rank, ours, plan, other, pipeline, exchange)
    for step, whole in enumerate(outputs):
        found = np.concatenate([parts[step] for parts, _ in results])
        np.testing.assert_allclose(found, whole, rtol=2e-5, atol=2e-6, err_msg=f"step {step}")
    for _, found in results:
        cases.assert_equal(found, expected)


def dlrm() -> DLRMTrain:
    torch.manual_seed(2)
    ours = tpuemb.TPUEmbeddingBagCollection(cases.CONFIG, cases.COMBINERS, seed=3, gradient_reduction="mean")
    ours.set_learning_rates([cases.RATE])
    return DLRMTrain(DLRM(ours, 3, [5, 4], [6, 1]))


def dlrm_on_rank(rank: int, world: int, plan: str, pipeline: str) -> Any:
    path = "model.sparse_arch.embedding_bag_collection"
    model = cases.distributed(dlrm(), path, plan)
    outputs = run(model, pipeline, iter([cases.batch(step, [3, 3], [rank]) for step in range(STEPS)]))
    return outputs, cases.numbers(model, model.module.get_submodule(path))


@pytest.mark.parametrize(("plan", "pipeline"), [("row_wise", "sparse_dist"), ("table_wise", "base")])
def test_dlrm_of_torchrec(plan: str, pipeline: str) -> None:
    model = dlrm()
    outputs = cases.loop(model, iter([cases.batch(step, [3, 3], [0, 1]) for step in range(STEPS)]))
    expected = cases.numbers(model, model.model.sparse_arch.embedding_bag_collection)
    results = run_ranks(2, dlrm_on_rank, plan, pipeline)
    for step, whole in enumerate(outputs):
        found = np.concatenate([parts[step] for parts, _ in results])
        np.testing.assert_allclose(found, whole, rtol=2e-5, atol=2e-6, err_msg=f"step {step}")
    for _, found in results:
        cases.assert_equal(found, expected)


def evaluated(rank: int, world: int) -> Any:
    model = cases.distributed(cases.Model("collection"), "embedding", "row_wise", "fused").eval()
    evaluate = EvalPipelineSparseDist(model, torch.optim.SGD(model.module.top.parameters()), torch.device("cpu"))
    batches = iter([cases.batch(step, [3, 3], [rank]) for step in range(STEPS)])
    return [cases.output_of(evaluate.progress(batches)) for _ in range(STEPS)]


def test_evaluation_in_a_pipeline() -> None:
    model = cases.Model("collection").eval()
    results = run_ranks(2, evaluated)
    for step in range(STEPS):
        whole = cases.output_of(model(cases.batch(step, [3, 3], [0, 1]))[1])
        np.testing.assert_allclose(np.concatenate([found[step] for found in results]), whole, rtol=1e-5, atol=1e-6)


def scheduled(rank: int, world: int) -> Any:
    """The pipeline has begun the next batch's lookup when the scheduler is stepped."""
    inner = cases.Model("collection")
    cases.train_other_in_backward(inner)
    model = cases.distributed(inner, "embedding", "table_wise", "fused")
    rates = tpuemb.LearningRates(model.module.embedding, [1.0])
    scheduler = ExponentialLR(rates, gamma=0.3)
    train = TrainPipelineSparseDist(model, cases.optimizer_of(model), torch.device("cpu"))
    batches = iter([cases.batch(step, [4, 2], [rank]) for step in range(STEPS)])
    for _ in range(STEPS):
        train.progress(batches)
        rates.step()
        scheduler.step()
    return cases.numbers(model, model.module.embedding)


def test_a_scheduler_drives_dynamic_tags_in_the_pipeline_without_lag() -> None:
    model = cases.Model("collection")
    cases.train_other_in_backward(model)

    def rated(step: int) -> cases.Batch:
        model.embedding.set_learning_rates([0.3**step])
        return cases.batch(step, [4, 2], [0, 1])

    cases.loop(model, map(rated, range(STEPS)))
    for found in run_ranks(2, scheduled):
        cases.assert_equal(found, cases.numbers(model, model.embedding))


def traced(rank: int, world: int) -> str:
    model = cases.distributed(cases.Model("layer"), "embedding.collection", "row_wise", "fused")
    train = TrainPipelineSparseDist(model, cases.optimizer_of(model), torch.device("cpu"))
    with pytest.raises(TypeError) as caught:
        train.progress(iter([cases.batch(step, [3, 3], [rank]) for step in range(STEPS)]))
    return str(caught.value)


def test_the_layer_is_refused_where_the_pipeline_traces_the_model() -> None:
    for message in run_ranks(2, traced):
        assert "TPUEmbedding cannot be traced" in message
        assert "TPUEmbeddingBagCollection" in message


def with_a_wrong_id(rank: int, world: int) -> str:
    model = cases.distributed(cases.Model("collection"), "embedding", "row_wise", "fused")
    model.module.embedding.set_learning_rates([cases.RATE])
    train = TrainPipelineSparseDist(model, cases.optimizer_of(model), torch.device("cpu"))
    batches = [cases.batch(step, [3, 3], [rank]) for step in range(STEPS)]
    if rank == 1:
        of_ours = int(batches[2].sparse_features.lengths()[:9].sum())
        batches[2].sparse_features.values()[of_ours - 1] = 99
    given = iter(batches)
    with pytest.raises(tpuemb.InputError) as caught:  # noqa: PT012 (the pipeline looks ahead)
        for _ in range(STEPS):
            train.progress(given)
    return str(caught.value)


def test_a_wrong_id_on_one_rank_stops_the_pipeline_on_all() -> None:
    first, second = run_ranks(2, with_a_wrong_id)
    assert "another rank" in first
    assert "feature 'seen'" in second and "id 99" in second
