"""What a caller does with its memory after a call changes nothing: inputs, weights, gradients and activations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import tpuemb_torch as tpuemb

TABLE = """table_descriptor { name: "t" vocabulary_size: 10 dimension: 2 optimization_parameters {
    learning_rate { constant: 0.5 } stochastic_gradient_descent {} } }"""
CONFIG = f"""mode: TRAINING num_hosts: 1 num_tensor_cores: 1 {TABLE}
feature_descriptor {{ name: "f" table_id: 0 input_shape: 4 }}"""
IDS = torch.arange(4)


def layer(text: str = CONFIG) -> tpuemb.TPUEmbedding:
    """Row i holds the number i."""
    emb = tpuemb.TPUEmbedding(text)
    emb.load_parameters({"t": {"parameters": torch.arange(10.0)[:, None].expand(10, 2)}})
    return emb


def moved(emb: tpuemb.TPUEmbedding) -> list[float]:
    """How far each row has moved."""
    return (emb.retrieve_parameters()["t"]["parameters"][:, 0] - torch.arange(10.0)).tolist()


@pytest.mark.parametrize("kind", ["tensor", "numpy"])
def test_gradients_held_by_a_pipelined_layer_are_copies(kind: str) -> None:
    emb = layer(CONFIG + "pipeline_execution_with_tensor_core: true")
    emb.enqueue([IDS])
    emb.recv_activations()
    gradient: Any = torch.ones(4, 2) if kind == "tensor" else np.ones((4, 2), np.float32)
    emb.send_gradients([gradient])
    gradient[:] = 100
    assert moved(emb) == [-0.5] * 4 + [0.0] * 6


def test_a_keyed_jagged_tensor_may_be_used_again_after_enqueue() -> None:
    emb = layer()
    ids, weights = IDS.clone(), torch.ones(4)
    kjt = KeyedJaggedTensor(["f"], ids, lengths=torch.ones(4).long(), weights=weights)
    emb.enqueue(kjt)
    prepared = emb.preparation(kjt)
    weights.fill_(float("nan"))
    ids.fill_(99)
    (out,) = emb.recv_activations()
    assert out[:, 0].tolist() == [0, 1, 2, 3]
    assert torch.equal(emb(prepared)["f"], out)
    weights.fill_(1)
    ids.copy_(IDS)
    activations = emb(kjt)["f"]
    weights.fill_(100)
    ids.fill_(7)
    emb.send_gradients([torch.ones(4, 2)])
    activations.sum().backward()
    assert moved(emb) == [-1.0] * 4 + [0.0] * 6


def test_gradients_may_be_sent_for_activations_received_in_inference_mode() -> None:
    emb = layer()
    emb.enqueue([IDS])
    with torch.inference_mode():
        emb.recv_activations()
    emb.send_gradients([torch.ones(4, 2)])
    assert moved(emb) == [-0.5] * 4 + [0.0] * 6


def test_gradients_of_another_layout_are_refused_and_the_batch_waits() -> None:
    emb = layer()
    emb.enqueue([IDS])
    emb.recv_activations()
    for gradient in (torch.ones(4, 2).to_sparse(), torch.ones(4, 2, device="meta")):
        with pytest.raises(TypeError, match="must be a dense tensor"):
            emb.send_gradients([gradient])
    emb.send_gradients([torch.ones(4, 2)])
    assert moved(emb) == [-0.5] * 4 + [0.0] * 6


def test_fresh_weights_are_not_stepped_by_a_step_sent_before() -> None:
    emb = layer(CONFIG + "pipeline_execution_with_tensor_core: true")
    fresh = tpuemb.TPUEmbedding(CONFIG).retrieve_parameters()["t"]["parameters"]
    emb.enqueue([IDS])
    emb.recv_activations()
    emb.send_gradients([torch.ones(4, 2)])
    emb.collection.reset_parameters()
    assert torch.equal(emb.retrieve_parameters()["t"]["parameters"], fresh)


class InPlace(nn.Module):
    def __init__(self, emb: tpuemb.TPUEmbedding) -> None:
        super().__init__()
        self.embedding = emb

    def forward(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        activations = self.embedding(batch["features"])["f"]
        activations.mul_(2)
        torch.relu_(activations)
        return activations.sum(), activations


def test_a_pipelined_model_may_change_activations_in_place() -> None:
    model, other = InPlace(layer()), InPlace(layer())
    batch = {"features": [IDS]}
    out = tpuemb.TrainPipeline(model, None).progress(iter([batch]))
    loss, wanted = other(batch)
    loss.backward()
    assert torch.equal(out, wanted)
    assert moved(model.embedding) == moved(other.embedding) == [-0.0, -1.0, -1.0, -1.0] + [0.0] * 6


def test_a_frozen_layer_is_not_trained_by_the_pipeline() -> None:
    model = InPlace(layer())
    model.train()
    model.embedding.eval()
    model.bias = nn.Parameter(torch.zeros(()))
    model.register_forward_hook(lambda module, _, out: (out[0] + module.bias, out[1]))
    tpuemb.TrainPipeline(model, torch.optim.SGD([model.bias], lr=1.0)).progress(iter([{"features": [IDS]}]))
    assert moved(model.embedding) == [0.0] * 10
    assert model.bias.item() == -1.0


def test_a_pipeline_without_training_layers_needs_no_rates() -> None:
    text = CONFIG.replace("TRAINING", "INFERENCE").replace("constant: 0.5", "dynamic { tag: 0 }")
    model = InPlace(layer(text))
    model.bias = nn.Parameter(torch.zeros(()))
    model.register_forward_hook(lambda module, _, out: (out[0] + module.bias, out[1]))
    tpuemb.TrainPipeline(model, torch.optim.SGD([model.bias], lr=1.0)).progress(iter([{"features": [IDS]}]))
    assert model.bias.item() == -1.0


def test_a_closed_pipeline_says_so() -> None:
    pipeline = tpuemb.TrainPipeline(InPlace(layer()), None)
    pipeline.close()
    with pytest.raises(RuntimeError, match="was closed"):
        pipeline.progress(iter([{"features": [IDS]}]))


def test_rows_of_a_feature_that_the_loss_does_not_use_take_a_step_in_any_group() -> None:
    """A gradient of zero still moves a row that has momentum, whether its table is in the group of another or not."""
    momentum = """table_descriptor { name: "%s" vocabulary_size: 4 dimension: %d optimization_parameters {
        learning_rate { constant: 1 } momentum { momentum: 0.5 } } }"""
    text = "mode: TRAINING num_hosts: 1 num_tensor_cores: 1 " + "".join(
        momentum % (name, dim) for name, dim in (("a", 2), ("b", 2), ("c", 3))
    )
    for index, name in enumerate("xyz"):
        text += f'feature_descriptor {{ name: "{name}" table_id: {index} input_shape: 1 }}'
    emb = tpuemb.TPUEmbedding(text)
    emb.load_parameters(
        {
            name: {"parameters": torch.zeros(4, dim), "momenta": torch.ones(4, dim)}
            for name, dim in (("a", 2), ("b", 2), ("c", 3))
        }
    )
    emb([torch.tensor([1])] * 3)["x"].sum().backward()
    found = emb.retrieve_parameters()
    assert found["a"]["parameters"][1].tolist() == [-1.5] * 2
    assert found["b"]["parameters"][1].tolist() == [-0.5] * 2
    assert found["c"]["parameters"][1].tolist() == [-0.5] * 3
