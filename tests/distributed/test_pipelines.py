"""Pipelined steps and TrainPipeline on several ranks: what one process gives; an error of one rank is all ranks'."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import tpuemb_torch as tpuemb
from tests.distributed.cases import COMBINERS, concatenate, config_text, make_batch
from tests.ranks import run_ranks
from tpuemb_torch import ops
from tpuemb_torch.kernels import TableBatchedEmbedding

PIPELINED = "pipeline_execution_with_tensor_core: true"
STEPS = 5
RATES = [0.2, 0.1]
PLANS = ["row_wise", "table_wise"]
EXCHANGE = {"row_wise": "pooled", "table_wise": "distinct"}


class Model(torch.nn.Module):
    """One number a sample; the dense part is fixed, so that ranks need not agree on it."""

    def __init__(self, embedding: tpuemb.TPUEmbedding) -> None:
        super().__init__()
        self.embedding = embedding
        self.fail = False

    def forward(self, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.cat([a.flatten(1) for a in self.embedding(batch["features"]).values()], dim=1)
        if self.fail:
            raise ArithmeticError("this rank's model")
        out = x.tanh().sum(1)
        return (out - 1).square().sum(), out


def layer(pipelined: bool, plan: str | None = None) -> tpuemb.TPUEmbedding:
    emb = tpuemb.TPUEmbedding(config_text("adagrad") + (PIPELINED if pipelined else ""), COMBINERS)
    if plan is not None:
        emb = tpuemb.shard(emb, plan, exchange=EXCHANGE[plan])
    emb.set_learning_rates(RATES)
    return emb


def sizes(world: int) -> list[int]:
    """Uneven parts of 7 samples; one rank may have none."""
    return [7] if world == 1 else [4, 3] if world == 2 else [5, 0, 2]


def batch(step: int, rank: int, world: int) -> dict[str, Any]:
    return {"features": make_batch(sizes(world)[rank], 100 * step + rank)}


def whole(step: int, world: int) -> dict[str, Any]:
    return {"features": concatenate([batch(step, rank, world)["features"] for rank in range(world)])}


def numbers(emb: tpuemb.TPUEmbedding) -> list[np.ndarray]:
    return [t.numpy() for slots in emb.retrieve_parameters().values() for t in slots.values()]


def run(model: Model, data: Any) -> list[np.ndarray]:
    pipeline = tpuemb.TrainPipeline(model, None)
    outputs = []
    while True:
        try:
            outputs.append(pipeline.progress(data).detach().numpy())
        except StopIteration:
            return outputs


def on_rank(rank: int, world: int, plan: str, pipelined: bool) -> Any:
    model = Model(layer(pipelined, plan))
    outputs = run(model, iter([batch(step, rank, world) for step in range(STEPS)]))
    return outputs, numbers(model.embedding)


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("plan", PLANS)
def test_train_pipeline_equals_one_process(plan: str, world: int, pipelined: bool) -> None:
    model = Model(layer(pipelined))
    outputs = run(model, iter([whole(step, world) for step in range(STEPS)]))
    expected = numbers(model.embedding)
    results = run_ranks(world, on_rank, plan, pipelined)
    for step in range(STEPS):
        np.testing.assert_allclose(
            np.concatenate([parts[step] for parts, _ in results]), outputs[step], rtol=1e-5, atol=1e-6
        )
    for _, found in results:
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def protocol(emb: tpuemb.TPUEmbedding, data: list[dict[str, Any]]) -> list[np.ndarray]:
    seen = []
    for step, features in enumerate(data):
        emb.enqueue(features["features"])
        dedup = emb.recv_deduplication_data()
        received = emb.recv_activations(dedup)
        emb.send_gradients([torch.cos(a) for a in received], RATES, dedup)
        if step == 2:
            emb.retrieve_parameters(["user"])
        seen.append(np.concatenate([a.flatten(1).numpy() for a in received], axis=1))
    return seen


def protocol_on_rank(rank: int, world: int, plan: str) -> Any:
    emb = layer(True, plan)
    seen = protocol(emb, [batch(step, rank, world) for step in range(STEPS)])
    emb.discard_batches()
    return seen, numbers(emb)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("plan", PLANS)
def test_pipelined_protocol_equals_one_process(plan: str, world: int) -> None:
    emb = layer(True)
    seen = protocol(emb, [whole(step, world) for step in range(STEPS)])
    expected = numbers(emb)
    results = run_ranks(world, protocol_on_rank, plan)
    for step in range(STEPS):
        parts = np.concatenate([parts[step] for parts, _ in results])
        np.testing.assert_allclose(parts, seen[step], rtol=1e-5, atol=1e-6)
    for _, found in results:
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def with_faults(rank: int, world: int, pipelined: bool) -> Any:
    """Step 1: the last rank's model raises. Step 3: the first rank's ids are out of range."""
    model = Model(layer(pipelined, "row_wise"))
    data = [batch(step, rank, world) for step in range(6)]
    if rank == 0:
        data[3] = {"features": {**data[3]["features"], "viewer": torch.full((sizes(world)[0],), 99)}}
    pipeline = tpuemb.TrainPipeline(model, None)
    iterator = iter(data)
    messages, unchanged = [], []
    before = kernel_numbers(model.embedding)
    for step in range(6):
        model.fail = step == 1 and rank == world - 1
        try:
            pipeline.progress(iterator)
            messages.append("")
        except (ArithmeticError, tpuemb.InputError) as error:
            messages.append(str(error))
        after = kernel_numbers(model.embedding)
        unchanged.append(all(np.array_equal(a, b) for a, b in zip(before, after, strict=True)))
        before = after
    dist.barrier()
    return messages, unchanged, numbers(model.embedding)


def kernel_numbers(emb: tpuemb.TPUEmbedding) -> list[np.ndarray]:
    """This rank's tables and slots, without draining the pipeline."""
    modules = [module for lookup in emb.collection._lookups for module in lookup.modules()]
    kernels = [module for module in modules if isinstance(module, TableBatchedEmbedding)]
    assert kernels
    return [t.numpy().copy() for k in kernels for stored in k.stored() for t in stored.tensors.values()]


@pytest.mark.parametrize("pipelined", [False, True])
def test_an_error_on_one_rank_is_a_step_that_was_not_on_all(pipelined: bool) -> None:
    world = 2
    results = run_ranks(world, with_faults, pipelined)
    for rank, (messages, unchanged, _) in enumerate(results):
        assert [bool(message) for message in messages] == unchanged == [False, True, False, True, False, False]
        assert ("this rank's model" in messages[1]) == (rank == 1)
        assert ("another rank" in messages[1]) == (rank == 0)
        assert ("id 99" in messages[3]) == (rank == 0)
        assert ("another rank" in messages[3]) == (rank == 1)
    for a, b in zip(results[0][2], results[1][2], strict=True):
        np.testing.assert_array_equal(a, b)
    if not pipelined:
        model = Model(layer(False))
        run(model, iter([whole(step, world) for step in (0, 2, 4, 5)]))
        for a, b in zip(results[0][2], numbers(model.embedding), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def uneven(rank: int, world: int, pipelined: bool) -> Any:
    """Rank 0 has two batches fewer."""
    model = Model(layer(pipelined, "row_wise"))
    data = iter([batch(step, rank, world) for step in range(3 if rank == 0 else 5)])
    pipeline = tpuemb.TrainPipeline(model, None)
    ends = []
    for _ in range(5):
        try:
            pipeline.progress(data)
            ends.append("")
        except StopIteration:
            ends.append("stop")
            break
        except tpuemb.InputError as error:
            ends.append(str(error))
    return ends, numbers(model.embedding)


@pytest.mark.parametrize("pipelined", [False, True])
def test_ranks_with_different_numbers_of_batches_train_on_those_that_all_have(pipelined: bool) -> None:
    results = run_ranks(2, uneven, pipelined)
    assert results[0][0] == ["", "", "", "stop"]
    assert results[1][0] == [
        "",
        "",
        "",
        "another rank has no more batches: give all ranks the same number of batches",
        "stop",
    ]
    model = Model(layer(pipelined))
    run(model, iter([whole(step, 2) for step in range(3)]))
    for _, found in results:
        for a, b in zip(found, numbers(model.embedding), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def wrong_calls(rank: int, world: int) -> Any:
    """Rank 0 makes one wrong call after the other; both go on afterwards."""
    emb = ops.use(layer(True, "row_wise"))
    wrong = rank == 0
    messages = []

    def attempt(call: Any) -> None:
        try:
            call()
            messages.append("")
        except (ValueError, TypeError, RuntimeError) as error:
            messages.append(str(error))

    ids = [torch.arange(12), torch.arange(30) % 7, torch.zeros(6).long()]
    good = make_batch(3, rank)
    attempt(lambda: ops.enqueue_tpu_embedding_integer_batch([ids[0][: 11 if wrong else 12], *ids[1:]]))
    attempt(lambda: emb.enqueue(good, "Train" if wrong else "train"))
    attempt(lambda: emb.enqueue({**good, "viewer": torch.eye(3).long().to_sparse_csr()} if wrong else good))
    emb.enqueue(make_batch(3, rank + 10))
    data = emb.recv_deduplication_data()
    other = tpuemb.DeduplicationData(data.batch + 1, (), ())
    attempt(lambda: emb.recv_activations(other if wrong else data))
    received = emb.recv_activations(data)
    attempt(lambda: emb.send_gradients([r.to_sparse() if wrong else r for r in received], RATES))
    emb.send_gradients(received, RATES)
    assert emb.discard_batches() == 0
    return messages, numbers(emb)


def test_a_wrong_call_on_one_rank_raises_on_all_and_is_as_if_it_had_not_been() -> None:
    results = run_ranks(2, wrong_calls)
    expected = ("11 ids for the table's 12", "mode 'Train'", "layout", "deduplication data of batch", "dense tensor")
    for message, part in zip(results[0][0], expected, strict=True):
        assert part in message
    assert all("another rank" in message for message in results[1][0])
    emb = layer(True)
    emb.enqueue(concatenate([make_batch(3, 10), make_batch(3, 11)]))
    emb.send_gradients(emb.recv_activations(), RATES)
    for _, found in results:
        for a, b in zip(found, numbers(emb), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
