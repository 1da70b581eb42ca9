"""The scalars that a step is given by tag: rates, step counters, the global step and a program's scalar."""

from __future__ import annotations

import pytest
import torch

import tpuemb_torch as tpuemb
from tests.hlo_text import parse

PROGRAM = parse("""
HloModule m
ENTRY e {
  g = f32[1,1] parameter(0)
  w = f32[1,1] parameter(1)
  last = f32[1,1] parameter(2)
  scalar = f32[] parameter(3)
  wide = f32[1,1] broadcast(scalar)
  sum = f32[1,1] add(w, wide)
  ROOT r = (f32[1,1], f32[1,1]) tuple(sum, wide)
}""")

CONFIG = """
mode: TRAINING num_hosts: 1 num_tensor_cores: 1
table_descriptor { name: "aware" vocabulary_size: 4 dimension: 1 optimization_parameters {
    learning_rate { dynamic { tag: RATE } } frequency_aware_adagrad { max_lr_multiplier: 100 probability_exponent: 1
        accumulator_decay: 1 STEP } } }
table_descriptor { name: "estimator" vocabulary_size: 4 dimension: 1 optimization_parameters {
    learning_rate { dynamic { tag: GLOBAL } } frequency_estimator { tau: 0.25 max_delta: 50 outlier_threshold: 2 } } }
table_descriptor { name: "program" vocabulary_size: 4 dimension: 1 optimization_parameters {
    learning_rate { dynamic { tag: SCALAR } } user_defined_program {} } }
feature_descriptor { name: "a" table_id: 0 input_shape: 2 }
feature_descriptor { name: "e" table_id: 1 input_shape: 2 }
feature_descriptor { name: "p" table_id: 2 input_shape: 2 }
"""


def layer(step: str, tags: dict[str, int]) -> tpuemb.TPUEmbedding:
    text = CONFIG.replace("STEP", step).replace("user_defined_program {}", "adagrad {}")
    for name, tag in tags.items():
        text = text.replace(name, str(tag))
    proto = tpuemb.load_config(text).to_proto()
    proto.table_descriptor[2].optimization_parameters.user_defined_program.program.CopyFrom(PROGRAM)
    embedding = tpuemb.TPUEmbedding(tpuemb.load_config(proto))
    one = torch.ones(4, 1)
    embedding.load_parameters(
        {
            "aware": {"parameters": one, "accumulators": 3 * one, "counters": one},
            "estimator": {"parameters": 10 * one, "last_hit_step": 100 * one},
            "program": {"parameters": one, "Slot_0": 0 * one},
        }
    )
    return embedding


@pytest.mark.parametrize("path", ["steps", "autograd"])
@pytest.mark.parametrize(
    ("step", "tags"),
    [
        ("step_counter { tag: 0 }", {"COUNTER": 0, "GLOBAL": 1, "RATE": 2, "SCALAR": 3}),
        ("", {"COUNTER": 0, "GLOBAL": 1, "RATE": 2, "SCALAR": 3}),  # an unset step counter has tag 0
        ("step_counter { tag: 3 }", {"COUNTER": 3, "GLOBAL": 2, "RATE": 1, "SCALAR": 0}),
        ("step_counter { tag: 1 }", {"COUNTER": 1, "GLOBAL": 1, "RATE": 0, "SCALAR": 0}),  # tables may share a tag
    ],
)
def test_each_scalar_reaches_its_table(step: str, tags: dict[str, int], path: str) -> None:
    """Expected by hand."""
    embedding = layer(step, tags)
    values = {"COUNTER": 112.0, "GLOBAL": 112.0, "RATE": 0.25, "SCALAR": 0.25}
    if tags["COUNTER"] != tags["GLOBAL"]:
        values |= {"COUNTER": 8.0, "RATE": 0.5}
    rates = [0.0] * embedding.config.num_learning_rates
    for name, tag in tags.items():
        rates[tag] = values[name]
    batch = [torch.tensor([1, 1]), torch.tensor([1, 2]), torch.tensor([1, 0])]
    gradients = [torch.full((2, 1), 0.5)] * 3
    if path == "steps":
        embedding.enqueue(batch)
        embedding.recv_activations()
        embedding.send_gradients(gradients, rates)
    else:
        embedding.set_learning_rates(rates)
        torch.autograd.backward(list(embedding(batch).values()), gradients)
    state = embedding.retrieve_parameters()
    # The counter is 2, the accumulator 3 + (0.5 + 0.5)^2 = 4.
    weight = 1.0 - values["RATE"] * min(values["COUNTER"] / 2, 100.0) * 1.0 / 2.0
    assert [state["aware"][s][1].item() for s in ("parameters", "accumulators", "counters")] == [weight, 4.0, 2.0]
    # 12 steps since the last hit, fewer than 2 * 10: 0.75 * 10 + 0.25 * 12
    assert state["estimator"]["parameters"].flatten().tolist() == [10.0, 10.5, 10.5, 10.0]
    assert state["estimator"]["last_hit_step"].flatten().tolist() == [100.0, 112.0, 112.0, 100.0]
    assert state["program"]["parameters"].flatten().tolist() == [1.25, 1.25, 1.0, 1.0]
    assert state["program"]["Slot_0"].flatten().tolist() == [0.25, 0.25, 0.0, 0.0]
