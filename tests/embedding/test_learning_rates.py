"""Schedulers that drive dynamic tags: each step has the schedule's rate, from the first on, also after a resume."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR

import tpuemb_torch as tpuemb

CONFIG = """mode: TRAINING num_hosts: 1 num_tensor_cores: 1
table_descriptor { name: "a" vocabulary_size: 2 dimension: 1 optimization_parameters {
    learning_rate { dynamic { tag: 0 } } stochastic_gradient_descent {} } }
table_descriptor { name: "b" vocabulary_size: 2 dimension: 1 optimization_parameters {
    learning_rate { dynamic { tag: 1 } } stochastic_gradient_descent {} } }
feature_descriptor { name: "x" table_id: 0 input_shape: 1 }
feature_descriptor { name: "y" table_id: 1 input_shape: 1 }
"""
ZEROS = {name: {"parameters": torch.zeros(2, 1)} for name in "ab"}
FEATURES = [torch.tensor([0]), torch.tensor([1])]


def step(emb: torch.nn.Module) -> tuple[float, float]:
    """A step with gradient 1 moves each row by its rate."""
    emb.load_parameters(ZEROS)
    sum(v.sum() for v in emb(FEATURES).values()).backward()
    found = emb.retrieve_parameters()
    return -found["a"]["parameters"][0].item(), -found["b"]["parameters"][1].item()


def test_no_lag_and_resume() -> None:
    emb = tpuemb.TPUEmbedding(CONFIG)
    rates = tpuemb.LearningRates(emb, [1.0, 8.0])
    scheduler = ExponentialLR(rates, gamma=0.5)
    seen = []
    for count in range(3):
        seen.append(step(emb))
        rates.step()
        scheduler.step()
        if count == 1:
            saved = copy.deepcopy((rates.state_dict(), scheduler.state_dict()))
    assert seen == [(1.0, 8.0), (0.5, 4.0), (0.25, 2.0)]
    resumed = tpuemb.TPUEmbedding(CONFIG)
    rates = tpuemb.LearningRates(resumed, [1.0, 8.0])
    scheduler = ExponentialLR(rates, gamma=0.5)
    rates.load_state_dict(saved[0])
    scheduler.load_state_dict(saved[1])
    assert step(resumed) == (0.25, 2.0)


def test_a_warmup_from_zero_reaches_the_first_step() -> None:
    emb = tpuemb.TPUEmbedding(CONFIG)
    scheduler = LambdaLR(tpuemb.LearningRates(emb, [1.0, 2.0]), lambda count: count / 2)
    seen = []
    for _ in range(3):
        seen.append(step(emb))
        scheduler.step()
    assert seen == [(0.0, 0.0), (0.5, 1.0), (1.0, 2.0)]


def test_rates_given_to_a_step_or_to_the_layer_are_the_ones_taken() -> None:
    emb = tpuemb.TPUEmbedding(CONFIG)
    tpuemb.LearningRates(emb, [1.0, 8.0])
    emb.load_parameters(ZEROS)
    emb.enqueue(FEATURES)
    emb.send_gradients([torch.ones_like(a) for a in emb.recv_activations()], [0.25, 0.125])
    assert emb.retrieve_parameters()["b"]["parameters"][1].item() == -0.125
    assert step(emb) == (1.0, 8.0)
    emb.set_learning_rates([0.5, 0.25])
    assert step(emb) == (0.5, 0.25)


def test_wrong_rates() -> None:
    emb = tpuemb.TPUEmbedding(CONFIG)
    with pytest.raises(ValueError, match="1 learning rates given, but the config has 2 dynamic tags"):
        tpuemb.LearningRates(emb, [1.0])
    rates = tpuemb.LearningRates(emb, [1.0, float("nan")])
    with pytest.raises(ValueError, match="tag 1 is nan"):
        step(emb)
    assert not any(t["parameters"].any() for t in emb.retrieve_parameters().values())
    rates.param_groups[1]["lr"] = torch.tensor(2.0)
    assert step(emb) == (1.0, 2.0)
    constant = tpuemb.TPUEmbedding(
        CONFIG.replace("dynamic { tag: 0 }", "constant: 1").replace("dynamic { tag: 1 }", "constant: 1")
    )
    with pytest.raises(ValueError, match="no dynamic learning rate"):
        tpuemb.LearningRates(constant, [])
