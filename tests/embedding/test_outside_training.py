"""Optimizers and clipping from outside are warned of, once a table, and change nothing; TorchRec's idioms are not."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

import tpuemb_torch as tpuemb

CONFIG = """mode: TRAINING num_hosts: 1 num_tensor_cores: 1
table_descriptor { name: "user" vocabulary_size: 5 dimension: 2 optimization_parameters {
    learning_rate { constant: 0.5 } adagrad {} } }
table_descriptor { name: "an.item" vocabulary_size: 3 dimension: 2 optimization_parameters {
    learning_rate { constant: 0.5 } stochastic_gradient_descent {} } }
feature_descriptor { name: "viewer" table_id: 0 input_shape: 2 }
feature_descriptor { name: "seen" table_id: 1 input_shape: 2 }
"""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = tpuemb.TPUEmbedding(CONFIG, seed=1)
        self.over = nn.Linear(4, 1)

    def forward(self) -> torch.Tensor:
        found = self.embedding([torch.tensor([0, 1]), torch.tensor([2, 2])])
        return self.over(torch.cat(list(found.values()), dim=1)).sum()


def warned(run: Callable[[], Any]) -> list[str]:
    """ "table by whom" for each warning of ours."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    pattern = r"table '(\S+)': (.*) was given its weight and has no effect on it\. .*fused optimizer \((\w+)\)"
    found = [re.match(pattern, str(w.message)) for w in caught if "fused optimizer" in str(w.message)]
    return [f"{m[1]} ({m[3]}): {m[2]}" for m in found if m]


def train(model: Model, optimizer: Any, between: Callable[[Iterator[nn.Parameter]], Any] = lambda _: None) -> None:
    for _ in range(3):
        optimizer.zero_grad()
        model.zero_grad()
        model().backward()
        between(model.parameters())
        optimizer.step()


def dense(model: nn.Module) -> KeyedOptimizerWrapper:
    """TorchRec's idiom."""
    named = dict(in_backward_optimizer_filter(model.named_parameters()))
    return KeyedOptimizerWrapper(named, lambda parameters: torch.optim.SGD(parameters, lr=0.1))


def both(by: str) -> list[str]:
    return [f"user (adagrad): {by}", f"an.item (stochastic_gradient_descent): {by}"]


@pytest.mark.parametrize(
    "make",
    [
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        lambda model: torch.optim.SGD([{"params": p} for p in model.parameters()], lr=0.1),
        lambda model: KeyedOptimizerWrapper(dict(model.named_parameters()), lambda p: torch.optim.SGD(p, lr=0.1)),
    ],
)
def test_an_optimizer_of_all_parameters(make: Callable[[Model], Any]) -> None:
    model, expected = Model(), Model()
    expected.load_state_dict(model.state_dict())
    assert warned(lambda: train(model, make(model))) == both("the optimizer SGD")
    assert warned(lambda: train(model, make(model))) == []  # once a table
    train(expected, dense(expected))
    train(expected, dense(expected))
    for name, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_a_group_that_is_added_later() -> None:
    model = Model()
    optimizer = torch.optim.Adam(model.over.parameters())
    assert warned(lambda: train(model, optimizer)) == []
    optimizer.add_param_group({"params": list(model.embedding.parameters())[:1]})
    assert warned(lambda: train(model, optimizer)) == ["user (adagrad): the optimizer Adam"]


def clipping_optimizer(model: Model) -> GradientClippingOptimizer:
    every = KeyedOptimizerWrapper(dict(model.named_parameters()), lambda p: torch.optim.SGD(p, lr=0.1))
    return GradientClippingOptimizer(every, clipping=GradientClipping.NORM, max_gradient=0.1)


@pytest.mark.parametrize("clip", [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_])
def test_clipping_of_all_parameters(clip: Callable[..., Any]) -> None:
    model = Model()
    assert warned(lambda: train(model, dense(model), lambda p: clip(p, 0.1))) == both("gradient clipping")


def test_clipping_by_torchrec() -> None:
    model = Model()
    assert warned(lambda: train(model, clipping_optimizer(model))) == both("gradient clipping")


def test_the_idiom_of_torchrec_and_reading_gradients_are_not_warned_of() -> None:
    model = Model()
    names = [name for name, _ in in_backward_optimizer_filter(model.named_parameters())]
    assert names == ["over.weight", "over.bias"]

    def look(parameters: Iterator[nn.Parameter]) -> None:
        assert [p.grad is None for p in parameters] == [True, True, False, False]
        nn.utils.clip_grad_norm_(model.over.parameters(), 0.1)

    assert warned(lambda: train(model, dense(model), look)) == []


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), lambda m: m.to("cpu")]
)
def test_copies_are_tables_of_their_own(again: Callable[[Model], Model]) -> None:
    model = Model()
    other = again(model)
    assert warned(lambda: train(other, torch.optim.SGD(other.parameters(), lr=0.1))) == both("the optimizer SGD")
    assert torch.equal(
        other.embedding.collection.embedding_bags["user"].weight,
        other.embedding.retrieve_parameters()["user"]["parameters"],
    )


def test_a_table_is_warned_of_once_although_its_weight_is_replaced() -> None:
    model = Model()
    assert warned(lambda: train(model, torch.optim.SGD(model.parameters(), lr=0.1))) == both("the optimizer SGD")
    model.load_state_dict(model.state_dict(), assign=True)
    assert warned(lambda: train(model, torch.optim.SGD(model.parameters(), lr=0.1))) == []


def test_a_gradient_that_someone_sets_is_kept() -> None:
    weight = Model().embedding.collection.embedding_bags["user"].weight
    weight.grad = torch.ones(5, 2)
    assert torch.equal(weight.grad, torch.ones(5, 2))
    weight.grad = None
    assert weight.grad is None
    weight.grad = torch.ones(5, 2)
    del weight.grad
    assert weight.grad is None


def test_a_compiled_step_of_an_optimizer() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.over.parameters(), lr=0.1)
    model().backward()
    before = model.over.weight.detach().clone()
    torch.compile(optimizer.step, backend="eager")()
    assert not torch.equal(model.over.weight, before)
