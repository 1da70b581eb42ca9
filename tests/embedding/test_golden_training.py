"""Trainings made by TensorFlow, end to end through the public API: activations, tables and slots at every step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import tpuemb_torch as tpuemb
from tests.embedding.golden_cases import feature_input, names, read
from tests.golden import golden
from tpuemb_torch.optimizers import rules

TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}


def implemented(config: tpuemb.Config) -> bool:
    return all(table.optimizer.algorithm in rules() for table in config.tables)


@pytest.mark.parametrize("case", names("gradients"))
@pytest.mark.parametrize("path", ["steps", "autograd"])
def test_training(case: str, path: str) -> None:
    config, description, arrays = read(golden(f"gradients/{case}.pb").with_suffix(""))
    embedding = tpuemb.TPUEmbedding(config, description["combiners"])
    embedding.load_parameters(
        {
            table: {
                "parameters": arrays[f"table.{table}.0"],
                **{slot: arrays[f"slot.{table}.{slot}.0"] for slot in description["slots"][table]},
            }
            for table in description["table_order"]
        }
    )
    features = description["feature_order"]
    for step in range(1, description["steps"] + 1):
        batch = {name: feature_input(arrays, name, step) for name in features}
        gradients = [torch.from_numpy(arrays[f"activation_grad.{name}.{step}"]) for name in features]
        rates = [float(arrays[f"lr.{step}"])] * config.num_learning_rates
        if path == "steps":
            embedding.enqueue(batch)
            activations = embedding.recv_activations()
            embedding.send_gradients(gradients, rates)
        else:
            if rates:
                embedding.set_learning_rates(rates)
            activations = list(embedding(batch).values())
            torch.autograd.backward(activations, gradients)
            activations = [a.detach() for a in activations]
        for name, activation in zip(features, activations, strict=True):
            np.testing.assert_allclose(activation.numpy(), arrays[f"activation.{name}.{step}"], **TOLERANCE)
        state = embedding.retrieve_parameters()
        for table in description["table_order"]:
            np.testing.assert_allclose(state[table]["parameters"].numpy(), arrays[f"table.{table}.{step}"], **TOLERANCE)
            for slot in description["slots"][table]:
                np.testing.assert_allclose(
                    state[table][slot].numpy(), arrays[f"slot.{table}.{slot}.{step}"], **TOLERANCE
                )


@pytest.mark.parametrize("case", names("optimizers", "*/*.pb"))
def test_optimizer_trajectory(case: str) -> None:
    config, description, arrays = read(golden(f"optimizers/{case}.pb").with_suffix(""))
    if not implemented(config):
        pytest.skip(f"{config.tables[0].optimizer.algorithm} is not implemented")
    (table,) = config.tables
    slots = description["slots"]
    embedding = tpuemb.TPUEmbedding(config)
    embedding.load_parameters({table.name: {name: arrays[f"{name}.0"] for name in ("parameters", *slots)}})
    state = embedding.retrieve_parameters()[table.name]
    for step in range(1, description["steps"] + 1):
        ids, gradient = arrays[f"ids.{step}"], torch.from_numpy(arrays[f"grads.{step}"])
        embedding.enqueue(batch_of(config, ids), mode="train")
        activations = embedding.recv_activations()
        np.testing.assert_array_equal(activations[0][: len(ids)], state["parameters"][ids])
        sent = torch.zeros_like(activations[0])
        sent[: len(ids)] = gradient
        embedding.send_gradients([sent], dynamic_inputs(config, arrays, step))
        before, state = state, embedding.retrieve_parameters()[table.name]
        for name in ("parameters", *slots):
            ours, theirs = state[name].numpy(), arrays[f"{name}.{step}"]
            # Where TensorFlow's CPU kernels divide 0 by 0, an element here keeps its value.
            divides = np.isnan(theirs)
            assert np.isfinite(ours[divides]).all()
            np.testing.assert_allclose(ours[~divides], theirs[~divides], **TOLERANCE, err_msg=name)
            if not description.get("dense_update"):
                untouched = np.setdiff1d(np.arange(table.vocabulary_size), ids)
                np.testing.assert_array_equal(ours[untouched], before[name].numpy()[untouched])


def batch_of(config: tpuemb.Config, ids: np.ndarray) -> dict[str, Any]:
    """One id a sample; the samples left over are empty."""
    (feature,) = config.features
    count = max(len(ids), 1)
    splits = torch.arange(count + 1).clamp(max=len(ids))
    assert len(feature.input_shape) == 1
    return {feature.name: tpuemb.Ragged(splits, torch.from_numpy(ids))}


def dynamic_inputs(config: tpuemb.Config, arrays: dict[str, np.ndarray], step: int) -> list[float]:
    optimizer = config.tables[0].optimizer
    values = [0.0] * config.num_learning_rates
    if optimizer.step_counter_tag is not None:
        values[optimizer.step_counter_tag] = float(arrays.get(f"step.{step}", step))
    if optimizer.learning_rate.tag is not None:
        values[optimizer.learning_rate.tag] = float(arrays[f"lr.{step}"])
    return values
