"""pipeline_execution_with_tensor_core in the step protocol: F1 F2 B1 F3 B2 ... BN on the tables, always."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tpuemb_torch as tpuemb
from tests.distributed.cases import COMBINERS, OPTIMIZERS, config_text, make_batch
from tpuemb_torch import checkpoint
from tpuemb_torch.kernels import TableGroup

STEPS = 5
PIPELINED = "pipeline_execution_with_tensor_core: true"
Parameters = dict[str, dict[str, Tensor]]


def layer(optimizer: str = "adagrad", pipelined: bool = True) -> tpuemb.TPUEmbedding:
    return tpuemb.TPUEmbedding(config_text(optimizer) + (PIPELINED if pipelined else ""), COMBINERS)


def rates(step: int) -> list[float]:
    return [0.2 / (step + 1), 0.1 + 0.1 * step]


def gradients(activations: list[Tensor]) -> list[Tensor]:
    """They depend on the activations, so that a lookup at another time gives other tables."""
    return [torch.cos(a) for a in activations]


def equal(a: Parameters, b: Parameters) -> bool:
    return all(torch.equal(a[table][slot], b[table][slot]) for table in a for slot in a[table])


def expected(optimizer: str, drained: set[int] = frozenset()) -> tuple[list[list[Tensor]], Parameters]:  # type: ignore[assignment]
    """Activations and tables in the order F1 F2 B1 F3 B2 ..., which a layer that is not pipelined is led through.

    After step n of `drained`, B comes before the next F.
    """
    emb = layer(optimizer, pipelined=False)
    for step in range(STEPS):
        emb.enqueue(make_batch(6, step))
    received = [emb.recv_activations()]
    for step in range(STEPS):
        ahead = step + 1 < STEPS and step not in drained
        if ahead:
            received.append(emb.recv_activations())
        emb.send_gradients(gradients(received[step]), rates(step))
        if step + 1 < STEPS and not ahead:
            received.append(emb.recv_activations())
    return received, emb.retrieve_parameters()


def train(emb: tpuemb.TPUEmbedding, after: Callable[[int], None] = lambda step: None) -> list[list[Tensor]]:
    """The usual program: enqueue, recv, send."""
    received = []
    for step in range(STEPS):
        emb.enqueue(make_batch(6, step))
        received.append(emb.recv_activations())
        emb.send_gradients(gradients(received[-1]), rates(step))
        after(step)
    return received


def assert_same(found: list[list[Tensor]], wanted: list[list[Tensor]]) -> None:
    for step, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True)), f"activations of step {step}"


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_each_lookup_misses_exactly_the_step_before_it(optimizer: str) -> None:
    emb = layer(optimizer)
    activations, parameters = expected(optimizer)
    assert_same(train(emb), activations)
    assert equal(emb.retrieve_parameters(), parameters)
    sequential = layer(optimizer, pipelined=False)
    train(sequential)
    assert not equal(sequential.retrieve_parameters(), parameters)


def test_a_program_that_receives_ahead_gets_the_same() -> None:
    emb = layer()
    for step in range(STEPS):
        emb.enqueue(make_batch(6, step))
    received = [emb.recv_activations()]
    for step in range(STEPS):
        if step + 1 < STEPS:
            received.append(emb.recv_activations())
        emb.send_gradients(gradients(received[step]), rates(step))
    activations, parameters = expected("adagrad")
    assert_same(received, activations)
    assert equal(emb.retrieve_parameters(), parameters)


@pytest.fixture
def trace(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Reads and writes of the tables, as they happen: one letter per batch, whatever the number of groups."""
    events: list[str] = []

    def record(letter: str) -> None:
        if not events or events[-1] != letter:
            events.append(letter)

    look_up, update = TableGroup.lookup, TableGroup.update

    def traced_lookup(self: TableGroup, *args: Any, **options: Any) -> Tensor:
        record("F")
        return look_up(self, *args, **options)

    def traced_update(self: TableGroup, *args: Any, **options: Any) -> None:
        record("B")
        update(self, *args, **options)

    monkeypatch.setattr(TableGroup, "lookup", traced_lookup)
    monkeypatch.setattr(TableGroup, "update", traced_update)
    return events


def test_order_of_reads_and_writes(trace: list[str]) -> None:
    emb = layer()
    marks: list[int] = []
    for step in range(STEPS):
        emb.enqueue(make_batch(6, step))
        trace.append(f"step {step}")
        received = emb.recv_activations()
        emb.send_gradients(gradients(received), rates(step))
        marks.append(len(trace))
    emb.drain()
    # One F for the first step; then F of the step before B of the one before it; the last B when drained.
    wanted = ["step 0", "F"] + [event for step in range(1, STEPS) for event in (f"step {step}", "F", "B")] + ["B"]
    assert trace == [event for index, event in enumerate(wanted) if index == 0 or event != wanted[index - 1]]
    assert marks[0] == 2


def test_updates_follow_one_another_without_pipelining(trace: list[str]) -> None:
    train(layer(pipelined=False))
    assert trace == ["F", "B"] * STEPS


def test_evaluation_sees_all_updates() -> None:
    activations, parameters = expected("adagrad", {1})
    emb = layer()
    seen: list[list[Tensor]] = []

    def evaluate(step: int) -> None:
        if step == 1:
            emb.enqueue(make_batch(6, 99), mode="inference")
            seen.append(emb.recv_activations())

    assert_same(train(emb, evaluate), activations)
    assert equal(emb.retrieve_parameters(), parameters)
    other = layer()
    train_two(other)
    other.eval()
    wanted = list(other(make_batch(6, 99)).values())
    assert all(torch.equal(a, b) for a, b in zip(seen[0], wanted, strict=True))


def train_two(emb: tpuemb.TPUEmbedding) -> None:
    for step in range(2):
        emb.enqueue(make_batch(6, step))
        emb.send_gradients(gradients(emb.recv_activations()), rates(step))


@pytest.mark.parametrize("reader", ["retrieve", "state_dict", "stored", "save", "copy", "drain", "module"])
def test_readers_find_every_update_that_was_sent(reader: str, tmp_path: Path) -> None:
    emb, sequential = layer(), layer(pipelined=False)
    sequential.enqueue(make_batch(6, 0))
    first = sequential.recv_activations()
    sequential.enqueue(make_batch(6, 1))
    second = sequential.recv_activations()
    sequential.send_gradients(gradients(first), rates(0))
    sequential.send_gradients(gradients(second), rates(1))
    wanted = sequential.retrieve_parameters()
    train_two(emb)
    if reader == "retrieve":
        assert equal(emb.retrieve_parameters(), wanted)
    elif reader == "state_dict":
        state = emb.state_dict()
        for table, slots in wanted.items():
            assert torch.equal(state[f"collection.embedding_bags.{table}.weight"], slots["parameters"])
    elif reader == "stored":
        for stored in emb.collection.stored():
            assert torch.equal(stored.tensors["parameters"], wanted[stored.part.table.name]["parameters"])
    elif reader == "save":
        checkpoint.save(tmp_path / "c", emb)
        other = layer()
        checkpoint.load(tmp_path / "c", other)
        assert equal(other.retrieve_parameters(), wanted)
    elif reader == "copy":
        assert equal(copy.deepcopy(emb).retrieve_parameters(), wanted)
    else:
        if reader == "module":
            emb.eval()(make_batch(6, 3))
        else:
            emb.drain()
        # The kernel itself drains nothing.
        assert isinstance(emb.collection, tpuemb.TPUEmbeddingBagCollection)
        for stored in emb.collection.kernel.stored():
            assert torch.equal(stored.tensors["parameters"], wanted[stored.part.table.name]["parameters"])


def test_loaded_values_are_not_written_over_by_a_step_sent_before() -> None:
    emb = layer()
    train_two(emb)
    start = layer().retrieve_parameters()
    emb.load_parameters(start)
    emb.drain()
    assert equal(emb.retrieve_parameters(), start)
    train_two(emb)
    state = layer().state_dict()
    emb.load_state_dict(state)
    emb.drain()
    assert all(torch.equal(emb.state_dict()[name], value) for name, value in state.items())


def test_a_third_lookup_before_the_first_update_is_refused() -> None:
    emb = layer()
    for step in range(3):
        emb.enqueue(make_batch(6, step))
    emb.recv_activations()
    second = emb.recv_activations()
    with pytest.raises(RuntimeError, match="two training batches wait for their gradients"):
        emb.recv_activations()
    emb.send_gradients(gradients(second), rates(0))
    emb.recv_activations()


def test_backward_only_batches_take_their_turn() -> None:
    emb, sequential = layer(), layer(pipelined=False)
    for one in (emb, sequential):
        one.enqueue(make_batch(6, 0))
        received = one.recv_activations()
        one.send_gradients(gradients(received), rates(0))
        one.enqueue(make_batch(6, 1), mode="backward_pass_only")
        one.send_gradients(gradients(received), rates(1))
    assert equal(emb.retrieve_parameters(), sequential.retrieve_parameters())


def test_discarded_batches_change_nothing_and_sent_ones_do() -> None:
    emb, other = layer(), layer()
    for one in (emb, other):
        one.enqueue(make_batch(6, 0))
        one.send_gradients(gradients(one.recv_activations()), rates(0))
    emb.enqueue(make_batch(6, 1))
    emb.recv_activations()
    emb.enqueue(make_batch(6, 2))
    assert emb.discard_batches() == 2
    assert emb.discard_batches() == 0
    other.drain()
    with pytest.raises(RuntimeError, match="no training batch waits"):
        emb.send_gradients([None] * 5, rates(0))
    for one in (emb, other):
        one.enqueue(make_batch(6, 3))
        one.send_gradients(gradients(one.recv_activations()), rates(1))
    assert equal(emb.retrieve_parameters(), other.retrieve_parameters())


def test_refused_gradients_are_not_held() -> None:
    emb, other = layer(), layer()
    for one in (emb, other):
        one.enqueue(make_batch(6, 0))
        received = one.recv_activations()
        if one is emb:
            with pytest.raises(ValueError, match="gradients given"):
                one.send_gradients([], rates(0))
            with pytest.raises(ValueError, match="learning rates given"):
                one.send_gradients(gradients(received), [])
        one.send_gradients(gradients(received), rates(0))
    assert equal(emb.retrieve_parameters(), other.retrieve_parameters())
