"""Random batches of every kind of input against plain loops in float64."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import tpuemb_torch as tpuemb
from tests.distributed.cases import COMBINERS, OPTIMIZERS, RATES, config_text
from tests.oracle import Oracle

#: Lookups add at most a few dozen products: errors stay within some units in the last place of float32.
LOOKUP = {"rtol": 2e-6, "atol": 2e-6}
#: Steps divide by roots of small sums as well.
STEP = {"rtol": 1e-4, "atol": 1e-5}


def flat(value: Any) -> list[list[tuple[int, float]]]:
    """One feature's input as (id, weight) by sample."""
    if isinstance(value, tpuemb.Ragged):
        weights = torch.ones(len(value.ids)) if value.weights is None else value.weights.float()
        splits = value.row_splits.tolist()
        pairs = list(zip(value.ids.tolist(), weights.tolist(), strict=True))
        return [pairs[a:b] for a, b in pairwise(splits)]
    return [[(int(i), 1.0) for i in row.reshape(-1)] for row in value]


def random_batch(rng: np.random.Generator, size: int) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Features as inputs, and the same by sample."""

    def ragged(rows: int, vocabulary: int, weighted: bool) -> tpuemb.Ragged:
        lengths = rng.integers(0, 4, rows)
        ids = torch.from_numpy(rng.integers(0, vocabulary, lengths.sum()))
        # Halves: some bags of signed weights add up to exactly 0.
        weights = torch.from_numpy(rng.integers(-2, 4, len(ids)) / 2) if weighted else None
        return tpuemb.Ragged(torch.from_numpy(np.concatenate([[0], lengths.cumsum()])), ids, weights)

    batch: dict[str, Any] = {
        "viewer": torch.from_numpy(rng.integers(0, 23, (size, 2) if rng.random() < 0.5 else (size,))),
        "friends": ragged(size, 23, True),
        "grid": ragged(size * 2, 7, bool(rng.random() < 0.5)),
        "flag": ragged(size, 2, False),
    }
    samples = {name: flat(value) for name, value in batch.items()}
    # A sequence with holes: cell (b, t) has an id or not; ids beyond the third step are never seen.
    cells = rng.random((size, 5)) < 0.6
    ids = rng.integers(0, 7, (size, 5))
    places = np.argwhere(cells)
    batch["history"] = tpuemb.Sparse(torch.from_numpy(places), torch.from_numpy(ids[cells]), batch_size=size)
    samples["history"] = [[(int(ids[b, t]), 1.0)] if cells[b, t] else [] for b in range(size) for t in range(3)]
    return batch, samples


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32 - 1), sizes=st.lists(st.integers(0, 7), min_size=3, max_size=3))
def test_training(optimizer: str, seed: int, sizes: list[int]) -> None:
    rng = np.random.default_rng(seed)
    config = tpuemb.load_config(config_text(optimizer))
    embedding = tpuemb.TPUEmbedding(config, COMBINERS)
    state = {
        table: {slot: rng.uniform(0.1, 1, value.shape).astype(np.float32) for slot, value in slots.items()}
        for table, slots in embedding.retrieve_parameters().items()
    }
    embedding.load_parameters(state)
    oracle = Oracle(config, COMBINERS, state)
    for size, rates in zip(sizes, RATES, strict=True):
        if optimizer == "ftrl":
            rates = tuple(max(rate, 0.05) for rate in rates)  # without multiply_linear_by_lr, FTRL divides by the rate
        batch, samples = random_batch(rng, size)
        embedding.enqueue(batch)
        names = [feature.name for feature in config.features]
        activations = dict(zip(names, embedding.recv_activations(), strict=True))
        expected = oracle.lookup(samples)
        gradients = {}
        for name, activation in activations.items():
            np.testing.assert_allclose(activation.numpy(), expected[name].reshape(activation.shape), **LOOKUP)
            gradients[name] = rng.normal(size=activation.shape).astype(np.float32)
        embedding.send_gradients([torch.from_numpy(gradients[name]) for name in names], rates)
        oracle.update(samples, {n: g.astype(np.float64) for n, g in gradients.items()}, rates)
        for table, slots in embedding.retrieve_parameters().items():
            for (slot, value), exact in zip(slots.items(), oracle.state[table], strict=True):
                np.testing.assert_allclose(value.numpy(), exact, **STEP, err_msg=f"{table} {slot}")
        # The oracle goes on from float32 numbers, so that errors do not add up over the steps.
        oracle.state = {
            t: [v.numpy().astype(np.float64) for v in slots.values()]
            for t, slots in embedding.retrieve_parameters().items()
        }


def kinds_of_input(rng: np.random.Generator) -> dict[str, Any]:
    """One batch of one feature of shape [4] in every form."""
    lengths = torch.tensor([2, 0, 3, 1])
    splits = torch.tensor([0, 2, 2, 5, 6])
    ids = torch.from_numpy(rng.integers(0, 9, 6))
    sample = torch.repeat_interleave(torch.arange(4), lengths)
    position = torch.tensor([0, 1, 0, 1, 2, 0])
    places = torch.stack([sample, position], dim=1)
    return {
        "Ragged": tpuemb.Ragged(splits, ids),
        "int32 Ragged": tpuemb.Ragged(splits.int(), ids.int()),
        "Sparse": tpuemb.Sparse(places, ids),
        "KeyedJaggedTensor": KeyedJaggedTensor(["f"], ids, lengths=lengths),
        "JaggedTensor": KeyedJaggedTensor(["f"], ids, lengths=lengths).to_dict()["f"],
        "sparse COO": torch.sparse_coo_tensor(places.t(), ids, (4, 3)),
        "nested": torch.nested.nested_tensor_from_jagged(ids, splits),
        "NumPy Ragged": tpuemb.Ragged(splits.numpy(), ids.numpy()),  # type: ignore[arg-type]
    }


def test_every_form_of_one_batch_gives_the_same() -> None:
    config = tpuemb.load_config("""
        mode: TRAINING num_hosts: 1 num_tensor_cores: 1
        table_descriptor { name: "t" vocabulary_size: 9 dimension: 3 optimization_parameters {
            learning_rate { constant: 1 } adagrad {} } }
        feature_descriptor { name: "f" table_id: 0 input_shape: 4 }""")
    found = {}
    for kind, value in kinds_of_input(np.random.default_rng(0)).items():
        embedding = tpuemb.TPUEmbedding(config, ["sqrtn"])
        out = embedding(value if isinstance(value, KeyedJaggedTensor) else {"f": value})["f"]
        out.square().sum().backward()
        found[kind] = (out.detach(), embedding.retrieve_parameters()["t"])
    first = found["Ragged"]
    for kind, (out, state) in found.items():
        assert torch.equal(out, first[0]), kind
        assert all(torch.equal(state[slot], first[1][slot]) for slot in state), kind


def test_permuting_a_batch_permutes_the_activations_and_changes_no_table() -> None:
    config = tpuemb.load_config(config_text("adam"))
    rng = np.random.default_rng(5)
    order = torch.tensor([3, 1, 5, 0, 4, 2])
    ids = {f.name: torch.from_numpy(rng.integers(0, f.table.vocabulary_size, f.input_shape)) for f in config.features}
    results = []
    for batch in (ids, {name: value[order] for name, value in ids.items()}):
        embedding = tpuemb.TPUEmbedding(config, COMBINERS)
        embedding.set_learning_rates([0.1, 0.1])
        out = embedding(batch)
        sum(value.square().sum() for value in out.values()).backward()
        results.append((out, embedding.retrieve_parameters()))
    (out, state), (permuted, permuted_state) = results
    for name, value in out.items():
        assert torch.equal(value[order], permuted[name])
    for table, slots in state.items():
        for slot, value in slots.items():
            torch.testing.assert_close(permuted_state[table][slot], value, rtol=1e-5, atol=1e-6)


def test_two_runs_are_bitwise_equal() -> None:
    config = tpuemb.load_config(config_text("ftrl"))
    states = []
    for _ in range(2):
        rng = np.random.default_rng(11)
        embedding = tpuemb.TPUEmbedding(config, COMBINERS, seed=2)
        embedding.set_learning_rates([0.1, 0.1])
        for _ in range(3):
            batch, _ = random_batch(rng, 6)
            sum(value.square().sum() for value in embedding(batch).values()).backward()
        states.append(embedding.retrieve_parameters())
    assert all(torch.equal(states[0][t][s], states[1][t][s]) for t in states[0] for s in states[0][t])


def test_shapes_follow_the_batch() -> None:
    config = tpuemb.load_config(config_text("sgd"))
    embedding = tpuemb.TPUEmbedding(config, COMBINERS)
    embedding.set_learning_rates([0.1, 0.1])
    for size in (0, 1, 6, 11):
        batch, samples = random_batch(np.random.default_rng(size), size)
        out = embedding(batch)
        for feature in config.features:
            shape = (size, *feature.input_shape[1:])
            assert out[feature.name].shape == (*shape, feature.table.dimension)
            assert len(samples[feature.name]) == prod(shape)
        sum(value.sum() for value in out.values()).backward()
