"""Learning rates that differ between ranks: an error on all of them, at the lookup; and none where they are equal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import tpuemb_torch as tpuemb
from tests.distributed import cases
from tests.ranks import run_ranks

PLANS: list[Any] = ["row_wise", "table_wise", {"user": "column_wise", "item": "table_wise", "tiny": "row_wise"}]
PIPELINED = "pipeline_execution_with_tensor_core: true"
SIZES = (3, 5)


def layer(plan: Any, extra: str = "") -> tpuemb.TPUEmbedding:
    embedding = tpuemb.TPUEmbedding(cases.config_text("adagrad") + extra, cases.COMBINERS)
    return embedding if plan is None else tpuemb.shard(embedding, plan)


def batch(step: int, rank: int) -> dict[str, Any]:
    return cases.make_batch(SIZES[rank], 10 * step + rank)


def both(step: int) -> dict[str, Any]:
    return cases.concatenate([batch(step, rank) for rank in range(2)])


def step(embedding: tpuemb.TPUEmbedding, features: dict[str, Any], names: tuple[str, ...] = ()) -> None:
    """Forward and backward of features with these names, or of all."""
    found = embedding(features)
    sum((found[name].tanh() - 1).square().sum() for name in names or found).backward()  # type: ignore[union-attr]


def numbers(embedding: tpuemb.TPUEmbedding) -> list[np.ndarray]:
    return [t.numpy() for slots in embedding.retrieve_parameters().values() for t in slots.values()]


def error_of(call: Any) -> str:
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


# Rates that differ.


def different_rates(rank: int, world: int, plan: Any) -> tuple[list[str], bool, list[np.ndarray]]:
    embedding = layer(plan)
    messages = []

    def attempt(number: int) -> None:
        messages.append(error_of(lambda: step(embedding, batch(number, rank))))

    before = numbers(embedding)
    # Set differently before the forward: nothing happens, also in a second attempt.
    embedding.set_learning_rates([0.2, 0.1 if rank else 0.3])
    attempt(0)
    attempt(0)
    # Not set everywhere.
    embedding = layer(plan)
    if rank:
        embedding.set_learning_rates([0.2, 0.1])
    attempt(0)
    # A rank whose rate cannot be used.
    driven = tpuemb.LearningRates(embedding, [0.2, 0.1])
    driven.param_groups[1]["lr"] = float("nan") if rank else 0.1
    attempt(0)
    unchanged = all(np.array_equal(a, b) for a, b in zip(before, numbers(embedding), strict=True))
    # The job goes on once they are equal.
    embedding.set_learning_rates([0.2, 0.1])
    attempt(0)
    after_one = numbers(embedding)
    # Several rates between two lookups are not compared, nor in the way of what follows.
    two_lookups_before_two_steps(rank, embedding)
    embedding.set_learning_rates([0.2, 0.1])
    # Set differently between forward and backward: told at the next forward, once.
    found = embedding(batch(1, rank))
    embedding.set_learning_rates([0.25 if rank else 0.5, 0.1])
    sum(a.sum() for a in found.values()).backward()
    embedding.set_learning_rates([0.2, 0.1])
    attempt(2)
    attempt(2)
    # A schedule that one rank steps twice.
    driven = tpuemb.LearningRates(embedding, [0.2, 0.1])
    schedule = torch.optim.lr_scheduler.ExponentialLR(driven, 0.5)
    attempt(3)
    schedule.step()
    if rank:
        schedule.step()
    attempt(4)
    with torch.no_grad():
        messages.append(error_of(lambda: embedding.eval()(batch(4, rank))))
    return messages, unchanged, after_one


@pytest.mark.parametrize("plan", PLANS)
def test_different_rates_raise_on_every_rank(plan: Any) -> None:
    results = run_ranks(2, different_rates, plan)
    alone = layer(None)
    alone.set_learning_rates([0.2, 0.1])
    step(alone, both(0))
    for rank, (messages, unchanged, after_one) in enumerate(results):
        tag_1 = "ValueError: learning rate of tag 1 is 0.1 on one rank and 0.3 on another"
        expected = [
            tag_1,
            tag_1,
            "ValueError: learning rates are set on one rank and not on another",
            "ValueError: learning rate of tag 1 is nan" if rank else "InputError: another rank",
            "",
            "ValueError: learning rate of tag 0 in the last step was 0.25 on one rank and 0.5 on another",
            "",
            "",
            *["ValueError: learning rate of tag 0 is 0.05 on one rank and 0.1 on another"] * 2,
        ]
        for message, words in zip(messages, expected, strict=True):
            assert message.startswith(words)
            assert bool(message) == bool(words), message
        assert unchanged
        for found, whole in zip(after_one, numbers(alone), strict=True):
            np.testing.assert_allclose(found, whole, rtol=1e-5, atol=1e-6)


# Equal rates in every order of calls.


def evaluation_without_rates(rank: int, embedding: tpuemb.TPUEmbedding) -> None:
    embedding.eval()
    embedding(batch(0, rank))
    embedding.train()
    with torch.no_grad():
        embedding(batch(0, rank))
    # As late as possible.
    found = embedding(batch(0, rank))
    embedding.set_learning_rates([0.0, -0.0])
    sum(a.sum() for a in found.values()).backward()


def schedules(rank: int, embedding: tpuemb.TPUEmbedding) -> None:
    driven = tpuemb.LearningRates(embedding, [0.2, 0.1])
    schedule = torch.optim.lr_scheduler.ExponentialLR(driven, 0.9)
    for number in range(3):
        step(embedding, batch(number, rank))
        schedule.step()
        with torch.no_grad():
            embedding(batch(number, rank))


def losses_of_some_tables(rank: int, embedding: tpuemb.TPUEmbedding) -> None:
    """Ranks without a table do not take part in its steps: theirs are older."""
    for number, names in enumerate([("viewer",), ("history",), ("flag", "viewer"), ("grid",), ("flag",)]):
        embedding.set_learning_rates([0.1 + number, 0.2 + number])
        step(embedding, batch(number, rank), names)


def two_lookups_before_two_steps(rank: int, embedding: tpuemb.TPUEmbedding) -> None:
    for number in range(3):
        losses = [sum(a.sum() for a in embedding(batch(number, rank)).values()) for _ in range(2)]
        for loss in losses:
            embedding.set_learning_rates([0.1 + number + 0.5 * float(loss is losses[1]), 0.2])
            loss.backward()  # type: ignore[union-attr]


def protocol_and_evaluation(rank: int, embedding: tpuemb.TPUEmbedding) -> None:
    for number in range(4):
        embedding.enqueue(batch(number, rank))
        received = embedding.recv_activations()
        embedding.send_gradients([a.cos() for a in received], [0.1 + number, 0.2 + number])
        with torch.no_grad():
            embedding(batch(number, rank))
        if number == 1:
            embedding.drain()
    embedding.discard_batches()


ORDERS = [
    evaluation_without_rates,
    schedules,
    losses_of_some_tables,
    two_lookups_before_two_steps,
    protocol_and_evaluation,
]


def in_every_order(rank: int, world: int, plan: Any) -> None:
    for order in ORDERS:
        for extra in ("", PIPELINED):
            order(rank, layer(plan, extra))


@pytest.mark.parametrize("plan", PLANS)
def test_equal_rates_raise_nothing(plan: Any) -> None:
    run_ranks(2, in_every_order, plan)
