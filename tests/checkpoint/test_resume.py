"""A job that is stopped and resumed gives what an uninterrupted one gives, bit by bit."""

from __future__ import annotations

from pathlib import Path

import torch

import tpuemb_torch as tpuemb
from tests.checkpoint.cases import Tables, same_tables
from tests.distributed import cases
from tests.distributed.test_algorithms import config, start
from tpuemb_torch.checkpoint import load, save


def every_algorithm(seed: int) -> tpuemb.TPUEmbedding:
    """A table for each algorithm, with steps counted and rates given by tag."""
    return tpuemb.TPUEmbedding(config(), seed=seed, experimental={"mdl_adagrad_light"})


def steps(embedding: tpuemb.TPUEmbedding, first: int, last: int) -> Tables:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        embedding.enqueue([torch.randint(0, 11, (6,), generator=generator) for _ in embedding.config.features])
        gradients = [torch.randn(a.shape, generator=generator) for a in embedding.recv_activations()]
        embedding.send_gradients(gradients, (30.0 + step, 0.2 / (step + 1), 20.0 + step))
    return embedding.retrieve_parameters()


def test_resumed_training_equals_uninterrupted_training_for_every_algorithm(tmp_path: Path) -> None:
    straight, first, second = every_algorithm(1), every_algorithm(1), every_algorithm(2)
    for embedding in (straight, first):
        embedding.load_parameters(start())
    assert same_tables(steps(straight, 0, 5), steps(first, 0, 5))
    save(tmp_path, first, step=5, extra={"step": 5})
    extra = load(tmp_path, second)
    assert same_tables(steps(straight, 5, 10), steps(second, extra["step"], 10))


def test_the_last_rates_come_back(tmp_path: Path) -> None:
    def train(embedding: tpuemb.TPUEmbedding) -> Tables:
        sum(value.square().sum() for value in embedding(cases.make_batch(6, seed=3)).values()).backward()
        return embedding.retrieve_parameters()

    text = cases.config_text("adam")
    first, second = (tpuemb.TPUEmbedding(tpuemb.load_config(text), cases.COMBINERS, seed=s) for s in (1, 2))
    save(tmp_path, second)
    load(tmp_path, first)
    assert first.collection.steps.rates is None  # none had been set
    first.set_learning_rates([0.1, 1 / 3])
    save(tmp_path, first)
    load(tmp_path, second)
    assert same_tables(train(first), train(second))


def test_gradients_that_wait_for_the_next_lookup_are_in_the_checkpoint(tmp_path: Path) -> None:
    text = "pipeline_execution_with_tensor_core: true" + cases.config_text("adagrad")
    first, second, straight = (
        tpuemb.TPUEmbedding(tpuemb.load_config(text), cases.COMBINERS, seed=seed) for seed in (1, 2, 1)
    )
    for embedding in (first, straight):
        embedding.enqueue(cases.make_batch(6, seed=1))
        embedding.send_gradients([torch.ones_like(a) for a in embedding.recv_activations()], (0.1, 0.2))
    save(tmp_path, first)
    load(tmp_path, second)
    assert same_tables(second.retrieve_parameters(), straight.retrieve_parameters())
