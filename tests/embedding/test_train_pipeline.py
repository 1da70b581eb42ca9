"""TrainPipeline: what a plain loop gives, in either order of lookups and updates, whatever goes wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tpuemb_torch as tpuemb
from tests.distributed.cases import COMBINERS, config_text, make_batch

PIPELINED = "pipeline_execution_with_tensor_core: true"
STEPS = 5
RATES = [0.2, 0.1]
ORDERS = pytest.mark.parametrize("pipelined", [False, True])


class Model(nn.Module):
    """Activations of all features, squashed, into one number a sample; `fault` may raise in the middle."""

    def __init__(self, pipelined: bool = False, mode: str = "TRAINING") -> None:
        super().__init__()
        text = config_text("adagrad").replace("mode: TRAINING", f"mode: {mode}")
        self.embedding = tpuemb.TPUEmbedding(text + (PIPELINED if pipelined else ""), COMBINERS)
        self.embedding.set_learning_rates(RATES)
        torch.manual_seed(3)
        self.dense = nn.Linear(8 + 8 + 12 + 8 + 4, 1)
        self.fault: Callable[[Tensor], Tensor] = lambda x: x

    def forward(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        activations = self.embedding(dict(batch["features"]))  # an equal mapping, the same tensors
        x = torch.cat([a.flatten(1) for a in activations.values()], dim=1)
        x = self.fault(x.tanh())
        out = self.dense(x).squeeze(1)
        return (out - batch["label"]).square().mean(), out


def batches(count: int = STEPS) -> list[dict[str, Any]]:
    return [{"features": make_batch(6, step), "label": torch.full((6,), float(step))} for step in range(count)]


def optimizer(model: Model) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.dense.parameters(), lr=0.05)


def state(model: Model) -> list[Tensor]:
    tables = model.embedding.retrieve_parameters()
    slots = [t for values in tables.values() for t in values.values()]
    return slots + [p.detach().clone() for p in model.dense.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def plain(
    model: Model, data: list[dict[str, Any]], pipelined: bool, optim: torch.optim.Optimizer | None = None
) -> list[Tensor]:
    """The loop by hand, with the step protocol."""
    optim = optim or optimizer(model)
    emb = model.embedding
    outputs = []
    received: list[list[Tensor]] = []
    for batch in data:
        emb.enqueue(batch["features"])
    for step, batch in enumerate(data):
        while len(received) <= min(step + pipelined, len(data) - 1):
            received.append(emb.recv_activations())
        leaves = [a.requires_grad_() for a in received[step]]
        optim.zero_grad()
        x = torch.cat([a.flatten(1) for a in leaves], dim=1).tanh()
        out = model.dense(x).squeeze(1)
        (out - batch["label"]).square().mean().backward()
        emb.send_gradients([a.grad for a in leaves], RATES)
        optim.step()
        outputs.append(out.detach())
    return outputs


def run(pipeline: tpuemb.TrainPipeline, data: Iterator[dict[str, Any]]) -> list[Tensor]:
    outputs = []
    while True:
        try:
            outputs.append(pipeline.progress(data).detach())
        except StopIteration:
            return outputs


@ORDERS
def test_it_trains_as_a_plain_loop(pipelined: bool) -> None:
    model, other = Model(pipelined), Model(False)
    pipeline = tpuemb.TrainPipeline(model, optimizer(model), "cpu", features="features")
    assert same(run(pipeline, iter(batches())), plain(other, batches(), pipelined))
    assert same(state(model), state(other))
    # The order makes a difference at all.
    third = Model(False)
    plain(third, batches(), not pipelined)
    assert not same(state(model), state(third))


def test_autograd_alone_updates_before_the_next_lookup() -> None:
    model, other = Model(pipelined=True), Model()
    optim = optimizer(model)
    for batch in batches():
        optim.zero_grad()
        model(batch)[0].backward()
        optim.step()
    plain(other, batches(), pipelined=False)
    assert same(state(model), state(other))


@ORDERS
def test_epochs(pipelined: bool) -> None:
    model, other = Model(pipelined), Model(False)
    pipeline = tpuemb.TrainPipeline(model, optimizer(model))
    run(pipeline, iter(batches(3)))
    with pytest.raises(StopIteration):
        pipeline.progress(iter([]))
    run(pipeline, iter(batches(2)))
    pipeline.close()
    # Nothing of one iterator is looked up before the updates of another.
    optim = optimizer(other)
    plain(other, batches(3), pipelined, optim)
    plain(other, batches(2), pipelined, optim)
    assert same(state(model), state(other))


class Fault(torch.autograd.Function):
    """Raises in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise ArithmeticError("in the backward")


def raise_in_forward(x: Tensor) -> Tensor:
    raise ArithmeticError("in the forward")


@ORDERS
@pytest.mark.parametrize("fault", [raise_in_forward, Fault.apply])
@pytest.mark.parametrize("at", [0, 2, STEPS - 1])
def test_an_error_in_the_model_is_a_step_that_was_not(
    pipelined: bool, fault: Callable[[Tensor], Tensor], at: int
) -> None:
    model = Model(pipelined)
    pipeline = tpuemb.TrainPipeline(model, optimizer(model))
    data = iter(batches())
    for _ in range(at):
        pipeline.progress(data)
    before = [p.clone() for p in flat(model)]
    model.fault = fault
    with pytest.raises(ArithmeticError, match="in the"):
        pipeline.progress(data)
    assert same(flat(model), before)
    model.fault = lambda x: x
    rest = run(pipeline, data)
    assert len(rest) == STEPS - at - 1
    other = Model(False)
    # With the failed batch gone, its update is missing and nothing else is; a pipelined lookup had been made ahead.
    if not pipelined:
        plain(other, [b for step, b in enumerate(batches()) if step != at], pipelined=False)
        assert same(state(model), state(other))


def flat(model: Model) -> list[Tensor]:
    """Tables, slots and dense parameters, without draining anything."""
    collection = model.embedding.collection
    assert isinstance(collection, tpuemb.TPUEmbeddingBagCollection)
    slots = [t for stored in collection.kernel.stored() for t in stored.tensors.values()]
    return slots + [p.detach() for p in model.dense.parameters()]


@ORDERS
def test_a_malformed_batch_is_told_at_its_turn_and_skipped(pipelined: bool) -> None:
    model, other = Model(pipelined), Model(pipelined)
    bad = {"features": {**make_batch(6, 7), "viewer": torch.full((6,), 23)}, "label": torch.zeros(6)}
    pipeline = tpuemb.TrainPipeline(model, optimizer(model))
    data = iter([*batches(2), bad, *batches(4)[2:]])
    for _ in range(2):
        pipeline.progress(data)
    with pytest.raises(tpuemb.InputError, match="feature 'viewer': id 23"):
        pipeline.progress(data)
    assert len(run(pipeline, data)) == 2
    reference = tpuemb.TrainPipeline(other, optimizer(other))
    for part in (batches(2), batches(4)[2:]):  # the lookup ahead begins anew after the error
        run(reference, iter(part))
    assert not same(state(model), state(Model()))
    if not pipelined:
        assert same(state(model), state(other))


def test_an_error_of_the_iterator_loses_no_batch() -> None:
    def data() -> Iterator[dict[str, Any]]:
        yield from batches(2)
        raise OSError("disk gone")

    model, other = Model(), Model()
    pipeline = tpuemb.TrainPipeline(model, optimizer(model))
    iterator = data()
    pipeline.progress(iterator)
    pipeline.progress(iterator)
    with pytest.raises(OSError, match="disk gone"):
        pipeline.progress(iterator)
    plain(other, batches(2), pipelined=False)
    assert same(state(model), state(other))


@ORDERS
def test_a_resumed_run_is_the_run_that_saved(pipelined: bool) -> None:
    """Whatever reads the tables drains the pipeline: the next lookup sees all updates, as after a restart."""
    model = Model(pipelined)
    optim = optimizer(model)
    pipeline = tpuemb.TrainPipeline(model, optim)
    data = iter(batches())
    for _ in range(3):
        pipeline.progress(data)
    saved = copy.deepcopy((model.embedding.retrieve_parameters(), model.dense.state_dict(), optim.state_dict()))
    outputs = run(pipeline, data)
    resumed = Model(pipelined)
    resumed.embedding.load_parameters(saved[0])
    resumed.dense.load_state_dict(saved[1])
    other = optimizer(resumed)
    other.load_state_dict(saved[2])
    assert same(run(tpuemb.TrainPipeline(resumed, other), iter(batches()[3:])), outputs)
    assert same(state(resumed), state(model))


@ORDERS
def test_evaluation_within_a_run(pipelined: bool) -> None:
    model = Model(pipelined)
    pipeline = tpuemb.TrainPipeline(model, optimizer(model))
    data = iter(batches())
    pipeline.progress(data)
    model.eval()
    before = [p.clone() for p in flat(model)]
    _loss, out = pipeline.progress(data)  # all that the model returns
    assert torch.equal(model(batches()[1])[1], out)
    assert same(flat(model), before)
    model.train()
    assert len(run(pipeline, data)) == STEPS - 2
    assert not same(flat(model), before)


def test_an_inference_config_trains_the_dense_part_only() -> None:
    model = Model(mode="INFERENCE")
    before = model.embedding.retrieve_parameters()
    weights = model.dense.weight.detach().clone()
    run(tpuemb.TrainPipeline(model, optimizer(model)), iter(batches()))
    after = model.embedding.retrieve_parameters()
    assert all(torch.equal(before[t][s], after[t][s]) for t in before for s in before[t])
    assert not torch.equal(weights, model.dense.weight)


def test_features_nobody_uses_are_stepped_with_zeros() -> None:
    model, other = Model(), Model()
    model.fault = other.fault = lambda x: x * torch.tensor([1.0] * 36 + [0.0] * 4)
    model.dense = other.dense = nn.Linear(40, 1)

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
            activations = self.inner.embedding(batch["features"])
            return activations["viewer"].sum(), activations["viewer"]

    pipeline = tpuemb.TrainPipeline(Part(), None)
    run(pipeline, iter(batches(1)))
    emb = other.embedding
    emb.enqueue(batches(1)[0]["features"])
    received = emb.recv_activations()
    emb.send_gradients([torch.ones_like(received[0]), None, None, None, None], RATES)
    a, b = model.embedding.retrieve_parameters(), emb.retrieve_parameters()
    assert all(torch.equal(a[t][s], b[t][s]) for t in a for s in a[t])


def test_other_features_than_announced_are_refused() -> None:
    model = Model()
    before = [p.clone() for p in flat(model)]
    pipeline = tpuemb.TrainPipeline(model, optimizer(model), features=lambda batch: make_batch(6, 11))
    with pytest.raises(RuntimeError, match="looks up other features than TrainPipeline prepared"):
        pipeline.progress(iter(batches()))

    class Twice(Model):
        def forward(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
            super().forward(batch)
            return super().forward(batch)

    twice = Twice()
    with pytest.raises(RuntimeError, match="twice in a step"):
        tpuemb.TrainPipeline(twice, None).progress(iter(batches()))

    class Never(Model):
        def forward(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
            return torch.zeros((), requires_grad=True), torch.zeros(())

    never = Never()
    with pytest.raises(RuntimeError, match="did not call its embedding layer"):
        tpuemb.TrainPipeline(never, None).progress(iter(batches()))
    for one in (model, twice, never):
        assert same(flat(one), before)
        # Out of the pipeline, the layer is its own again.
        assert one.embedding(make_batch(6, 0))["viewer"].shape == (6, 8)


def test_models_it_cannot_take() -> None:
    with pytest.raises(ValueError, match="has no TPUEmbedding"):
        tpuemb.TrainPipeline(nn.Linear(1, 1), None)
    two = nn.ModuleList([Model().embedding, Model().embedding])
    with pytest.raises(ValueError, match=r"layers \['0', '1'\]: give features="):
        tpuemb.TrainPipeline(two, None)
    with pytest.raises(ValueError, match=r"given for \['0'\], but the model's layers are \['0', '1'\]"):
        tpuemb.TrainPipeline(two, None, features={"0": "features"})


def test_missing_rates_are_refused_before_anything_changes() -> None:
    model = Model()
    model.embedding.collection.steps.rates = None
    before = [p.clone() for p in flat(model)]
    with pytest.raises(RuntimeError, match="call set_learning_rates"):
        tpuemb.TrainPipeline(model, optimizer(model)).progress(iter(batches()))
    assert same(flat(model), before)


def test_two_layers() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = Model(pipelined=True).embedding, Model().embedding

        def forward(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
            a, b = self.right(batch["b"]), self.left(batch["a"])
            out = a["viewer"] * b["viewer"] + a["flag"].sum()
            return out.tanh().sum(), out

    data = [{"a": make_batch(6, step), "b": make_batch(6, step + 50)} for step in range(STEPS)]
    model, other = Two(), Two()
    run(tpuemb.TrainPipeline(model, None, features={"left": "a", "right": "b"}), iter(data))
    lefts: list[Any] = []
    for batch in data:
        other.left.enqueue(batch["a"])
    for step, batch in enumerate(data):
        while len(lefts) <= min(step + 1, STEPS - 1):
            lefts.append(other.left.recv_activations())
        names = [f.name for f in other.left.config.features]
        leaves = {n: a.requires_grad_() for n, a in zip(names, lefts[step], strict=True)}
        other.right.enqueue(batch["b"])
        rights = {n: a.requires_grad_() for n, a in zip(names, other.right.recv_activations(), strict=True)}
        (rights["viewer"] * leaves["viewer"] + rights["flag"].sum()).tanh().sum().backward()
        other.left.send_gradients([a.grad for a in leaves.values()], RATES)
        other.right.send_gradients([a.grad for a in rights.values()], RATES)
    for mine, theirs in ((model.left, other.left), (model.right, other.right)):
        a, b = mine.retrieve_parameters(), theirs.retrieve_parameters()
        assert all(torch.equal(a[t][s], b[t][s]) for t in a for s in a[t])


def test_batches_prepared_by_the_loader_are_taken_and_not_sorted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = Model(), Model()
    prepare = other.embedding.preparation
    data = [{**b, "features": prepare(b["features"], deduplicate=True)} for b in batches()]

    class Direct(Model):
        def forward(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
            out = torch.cat([a.flatten(1) for a in self.embedding(batch["features"]).values()], dim=1)
            out = self.dense(out.tanh()).squeeze(1)
            return (out - batch["label"]).square().mean(), out

    direct = Direct()
    sorts: list[int] = []
    counted, sort = (lambda *args, **options: sorts.append(1) or sort(*args, **options)), torch.sort
    monkeypatch.setattr(torch, "sort", counted)
    run(tpuemb.TrainPipeline(direct, optimizer(direct)), iter(data))
    assert not sorts
    plain(model, batches(), pipelined=False)
    assert sorts
    assert same(state(direct), state(model))
