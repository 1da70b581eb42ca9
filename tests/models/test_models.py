"""The models: values against a plain computation, gradients into the tables, and errors."""

from __future__ import annotations

import pytest
import torch

import tpuemb_torch as tpuemb
from tpuemb_torch.models import DLRM, TwoTower


def config(film_dimension: int = 4, shape: str = "input_shape: 3") -> tpuemb.Config:
    optimizer = "optimization_parameters { stochastic_gradient_descent {} learning_rate { constant: 0.1 } }"
    return tpuemb.load_config(f"""
mode: TRAINING num_hosts: 1 num_tensor_cores: 1
table_descriptor {{ name: "user" vocabulary_size: 10 dimension: 4 {optimizer} }}
table_descriptor {{ name: "film" vocabulary_size: 20 dimension: {film_dimension} {optimizer} }}
table_descriptor {{ name: "bias" vocabulary_size: 20 dimension: 1 {optimizer} }}
feature_descriptor {{ name: "user" table_id: 0 {shape} }}
feature_descriptor {{ name: "film" table_id: 1 input_shape: 3 }}
feature_descriptor {{ name: "bias" table_id: 2 input_shape: 3 }}
""")


FEATURES = {"user": torch.tensor([1, 2, 2]), "film": torch.tensor([3, 19, 0]), "bias": torch.tensor([3, 19, 0])}


@pytest.mark.parametrize("vectors_in_top", [False, True])
def test_dlrm_is_the_formula_of_its_paper(vectors_in_top: bool) -> None:
    embedding = tpuemb.TPUEmbedding(config())
    model = DLRM(embedding, dense_features=2, bottom=[5], top=[6], vectors_in_top=vectors_in_top)
    dense = torch.randn(3, 2)
    logit = model(dense, FEATURES)
    assert logit.shape == (3,)
    tables = {name: state["parameters"] for name, state in embedding.retrieve_parameters().items()}
    for sample in range(3):
        bottom = model.bottom(dense[sample])
        user, film = tables["user"][FEATURES["user"][sample]], tables["film"][FEATURES["film"][sample]]
        products = torch.stack([bottom @ user, bottom @ film, user @ film])
        seen = [bottom, user, film] if vectors_in_top else [bottom]
        expected = model.top(torch.cat([*seen, products])) + tables["bias"][FEATURES["bias"][sample]]
        torch.testing.assert_close(logit[sample : sample + 1], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["dlrm", "two tower"])
def test_backward_steps_the_rows_looked_up_and_fills_dense_gradients(kind: str) -> None:
    embedding = tpuemb.TPUEmbedding(config())
    before = embedding.retrieve_parameters()
    if kind == "dlrm":
        model: torch.nn.Module = DLRM(embedding, dense_features=2)
        model(torch.randn(3, 2), FEATURES).sum().backward()
    else:
        model = TwoTower(embedding, ["user"], ["film", "bias"])
        query, candidate = model(FEATURES)
        (query * candidate).sum().backward()
    after = embedding.retrieve_parameters()
    for name, ids in (("user", [1, 2]), ("film", [0, 3, 19]), ("bias", [0, 3, 19])):
        changed = (after[name]["parameters"] != before[name]["parameters"]).any(dim=1)
        assert changed.nonzero().flatten().tolist() == ids
    dense = [p for name, p in model.named_parameters() if not name.startswith("embedding.")]
    assert dense
    assert all(parameter.grad is not None for parameter in dense)


def test_two_towers_give_unit_vectors_that_depend_on_their_own_features() -> None:
    model = TwoTower(tpuemb.TPUEmbedding(config()), ["user"], ["film", "bias"], dimension=7)
    query, candidate = model(FEATURES)
    assert query.shape == candidate.shape == (3, 7)
    torch.testing.assert_close(query.norm(dim=1), torch.ones(3))
    torch.testing.assert_close(candidate.norm(dim=1), torch.ones(3))
    other_query, other_candidate = model({**FEATURES, "film": torch.tensor([4, 19, 0])})
    torch.testing.assert_close(other_query, query)
    assert not torch.allclose(other_candidate[0], candidate[0])
    torch.testing.assert_close(other_candidate[1:], candidate[1:])


def test_dlrm_names_what_cannot_interact() -> None:
    with pytest.raises(ValueError, match=r"one dimension, got \[4, 8\]"):
        DLRM(tpuemb.TPUEmbedding(config(film_dimension=8)), dense_features=2)
    with pytest.raises(ValueError, match="'user' has input_shape"):
        DLRM(tpuemb.TPUEmbedding(config(shape="input_shape: 3 input_shape: 2")), dense_features=2)


def test_two_tower_names_unknown_features() -> None:
    with pytest.raises(ValueError, match=r"unknown features \['movie'\]"):
        TwoTower(tpuemb.TPUEmbedding(config()), ["user"], ["movie"])
