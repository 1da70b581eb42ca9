"""Malformed inputs: each gives an error that names the feature and the place, and nothing is looked up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import tpuemb_torch as tpuemb
from tpuemb_torch.config import Feature
from tpuemb_torch.preprocessing.bags import ragged_shape

CONFIG = """
mode: TRAINING num_hosts: 1 num_tensor_cores: 1
table_descriptor { name: "t" vocabulary_size: 10 dimension: 2 optimization_parameters {
    learning_rate { constant: 1 } stochastic_gradient_descent {} } }
feature_descriptor { name: "bag" table_id: 0 input_shape: 4 }
feature_descriptor { name: "seq" table_id: 0 input_shape: 4 input_shape: 3 }
"""
GOOD = {"bag": torch.arange(4), "seq": torch.zeros(4, 3, dtype=torch.int64)}


def t(*values: Any) -> torch.Tensor:
    return torch.tensor(values)


MALFORMED: dict[str, tuple[str, Any, str]] = {
    "splits do not start at 0": ("bag", tpuemb.Ragged(t(1, 1, 2, 2, 3), t(1, 2, 3)), r"row_splits\[0\] is 1"),
    "splits decrease": ("bag", tpuemb.Ragged(t(0, 2, 1, 2, 3), t(1, 2, 3)), r"row_splits\[2\] is 1 after 2"),
    "splits end too early": ("bag", tpuemb.Ragged(t(0, 1, 2, 2, 2), t(1, 2, 3)), "ends at 2, but there are 3 ids"),
    "splits end too late": ("bag", tpuemb.Ragged(t(0, 1, 2, 2, 4), t(1, 2, 3)), "ends at 4, but there are 3 ids"),
    "no splits": ("bag", tpuemb.Ragged(torch.zeros(0, dtype=torch.int64), t(1)), "row_splits is empty"),
    "splits of rank 2": ("bag", tpuemb.Ragged(torch.zeros(1, 5, dtype=torch.int64), t(1)), "row_splits must have rank"),
    "float splits": ("bag", tpuemb.Ragged(t(0.0, 1.0), t(1)), "row_splits must be int32 or int64"),
    "unsorted samples": ("bag", tpuemb.Sparse(t([1, 0], [0, 0]), t(1, 2)), r"indices\[1\] is \[0, 0\] after \[1, 0\]"),
    "sample too large": ("bag", tpuemb.Sparse(t([0, 0], [4, 0]), t(1, 2)), r"indices\[1\]\[0\] is 4.*size 4"),
    "sample negative": ("bag", tpuemb.Sparse(t([-1, 0], [3, 0]), t(1, 2)), r"indices\[0\]\[0\] is -1"),
    "indices and ids differ": ("bag", tpuemb.Sparse(t([0, 0]), t(1, 2)), "1 rows of indices for 2 ids"),
    "too many columns": ("bag", tpuemb.Sparse(t([0, 0, 0]), t(1)), "indices must have 1 columns.*or 2.*got 3"),
    "indices of rank 1": ("bag", tpuemb.Sparse(t(0, 1), t(1, 2)), "indices must have rank 2"),
    "two ids at a place": ("seq", tpuemb.Sparse(t([0, 1], [0, 1]), t(1, 2)), r"a second id at \[0, 1\]"),
    "weights of a sequence": ("seq", tpuemb.Sparse(t([0, 1]), t(1), t(1.0)), "weights are not used"),
    "negative step": ("seq", tpuemb.Sparse(t([0, -1]), t(1)), r"indices\[0\]\[1\] is -1"),
    "fewer weights": ("bag", tpuemb.Ragged(t(0, 1, 2, 3, 3), t(1, 2, 3), t(1.0, 2.0)), "2 weights for 3 ids"),
    "NaN weight": ("bag", tpuemb.Ragged(t(0, 1, 2, 2, 2), t(1, 2), t(1.0, np.nan)), "weight 1 is nan"),
    "infinite weight": ("bag", tpuemb.Ragged(t(0, 1, 2, 2, 2), t(1, 2), t(np.inf, 1.0)), "weight 0 is inf"),
    "integer weights": ("bag", tpuemb.Ragged(t(0, 1, 2, 2, 2), t(1, 2), t(1, 2)), "weights must be float32"),
    "half weights": ("bag", tpuemb.Ragged(t(0, 1, 2, 2, 2), t(1, 2), t(1.0, 2.0).half()), "weights must be float32"),
    "weights of rank 2": ("bag", tpuemb.Ragged(t(0, 1, 2, 2, 2), t(1, 2), t([1.0, 2.0])), "weights must have rank"),
    "float ids": ("bag", t(1.0, 2.0, 3.0, 4.0), "must be int32 or int64"),
    "boolean ids": ("bag", t(True, False, True, False), "must be int32 or int64"),
    "uint8 ids": ("bag", t(1, 2, 3, 4).to(torch.uint8), "must be int32 or int64"),
    "dense of rank 3": ("bag", torch.zeros(4, 1, 1, dtype=torch.int64), r"input_shape \[4\].*got shape \[4, 1, 1\]"),
    "scalar": ("bag", torch.tensor(3), "got shape"),
    "wrong length of a sequence": ("seq", torch.zeros(4, 2, dtype=torch.int64), r"must be \[3\], got shape \[4, 2\]"),
    "id too large": ("bag", t(0, 1, 10, 2), r"id 10 at position 2.*table 't'.*0 to 9"),
    "id negative": ("seq", torch.full((4, 3), -1), r"id -1 at position 0.*'t'"),
    "a string": ("bag", "abc", "must be a tensor"),
    "None": ("bag", None, "must be a tensor"),
    "samples differ": ("bag", torch.arange(3), r"has 4 samples, but feature 'bag' has 3"),
}


@pytest.fixture
def embedding() -> tpuemb.TPUEmbedding:
    return tpuemb.TPUEmbedding(tpuemb.load_config(CONFIG), ["mean"])


@pytest.mark.parametrize("what", list(MALFORMED))
def test_malformed_input(embedding: tpuemb.TPUEmbedding, what: str) -> None:
    feature, value, message = MALFORMED[what]
    with pytest.raises(tpuemb.InputError, match=message) as caught:
        embedding({**GOOD, feature: value})
    assert feature in str(caught.value)
    with pytest.raises(tpuemb.InputError, match=message):
        embedding.enqueue({**GOOD, feature: value})
    with pytest.raises(RuntimeError, match="no batch to receive"):
        embedding.recv_activations()


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({"bag": GOOD["bag"]}, r"missing features \['seq'\]"),
        ({**GOOD, "other": GOOD["bag"]}, r"unknown features \['other'\]"),
        ([GOOD["bag"]], "1 inputs for 2 features"),
        (torch.arange(4), "features must be a mapping"),
        ("bag", "features must be a mapping"),
        (
            KeyedJaggedTensor(["bag", "bag", "seq"], t(1, 2, 3), lengths=t(1, 1, 1)),
            r"features \['bag'\] occur twice",
        ),
        (
            KeyedJaggedTensor(["bag", "seq"], t(1, 2, 3), lengths=t(1, 1)),
            "lengths sum to 2, but it has values of shape",
        ),
    ],
)
def test_malformed_collection_of_features(embedding: tpuemb.TPUEmbedding, features: Any, message: str) -> None:
    with pytest.raises(tpuemb.InputError, match=message):
        embedding(features)


def feature(*shape: int) -> Feature:
    return Feature("f", 0, tpuemb.load_config(CONFIG).tables[0], shape)


@pytest.mark.parametrize(
    ("shape", "rows", "leading", "expected"),
    [
        # As many rows as samples: bags; this wins where a sequence of one step fits too.
        ((12,), 12, None, ((12,), None)),
        ((3, 4), 12, None, ((3, 4), None)),
        ((12, 1), 12, None, ((12, 1), None)),
        # k times fewer rows: sequences of k steps.
        ((12, 5), 12, None, ((12, 5), 5)),
        ((4, 6), 12, None, ((4, 6), 2)),
        ((2, 2, 3), 4, None, ((2, 2, 3), 3)),
        ((3, 4, 2), 12, None, ((3, 4, 2), 2)),
        ((12,), 6, 12, ((12,), 2)),
        # Batches of another size.
        ((12,), 5, None, ((5,), None)),
        ((12,), 6, None, ((6,), None)),
        ((12,), 0, None, ((0,), None)),
        ((12,), 24, None, ((24,), None)),
        ((4, 6), 3, None, ((3, 6), 6)),
        ((4, 6), 3, 3, ((3, 6), 6)),
        ((4, 6), 18, 3, ((3, 6), None)),
        ((4, 6), 0, 0, ((0, 6), None)),
        ((4, 2, 3), 18, None, ((3, 2, 3), None)),
    ],
)
def test_what_ragged_rows_are(shape: tuple[int, ...], rows: int, leading: int | None, expected: Any) -> None:
    assert ragged_shape(feature(*shape), rows, leading) == expected


def shapes(features: dict[str, Any], *input_shapes: list[int]) -> list[tuple[int, ...]]:
    described = "".join(
        f'feature_descriptor {{ name: "{name}" table_id: 0 {" ".join(f"input_shape: {size}" for size in shape)} }}'
        for name, shape in zip(features, input_shapes, strict=True)
    )
    embedding = tpuemb.TPUEmbedding(tpuemb.load_config(CONFIG.split("feature_descriptor")[0] + described))
    return [tuple(out.shape[:-1]) for out in embedding(features).values()]


def ragged(rows: int) -> tpuemb.Ragged:
    return tpuemb.Ragged(torch.arange(rows + 1), torch.zeros(rows, dtype=torch.int64))


def test_ragged_features_of_one_axis_tell_the_batch_to_the_others() -> None:
    # A batch of 3 where the config says 4: six rows are bags of [3, 2], not sequences.
    assert shapes({"a": ragged(3), "b": ragged(6)}, [4], [4, 2]) == [(3,), (3, 2)]
    # A batch of 4 where the config says 2: four rows are sequences of four steps, not of two.
    assert shapes({"a": ragged(4), "b": ragged(4)}, [2], [2, 4]) == [(4,), (4, 4)]
    sparse = tpuemb.Sparse(t([0, 0], [2, 1]), t(1, 2))
    assert shapes({"a": ragged(3), "b": sparse}, [4], [4]) == [(3,), (3,)]
    assert shapes({"a": ragged(6), "b": ragged(12)}, [12], [12]) == [(12,), (12,)]
    with pytest.raises(tpuemb.InputError, match="'a': 5 ragged rows do not fit"):
        shapes({"a": ragged(5), "b": ragged(12)}, [12], [12])
    with pytest.raises(tpuemb.InputError, match="'b': has 3 rows, but feature 'a' has 6"):
        shapes({"a": ragged(6), "b": ragged(3)}, [4], [4])


def test_the_size_of_a_batch_without_a_feature_of_one_axis() -> None:
    kjt = KeyedJaggedTensor(["a"], torch.arange(32) % 10, lengths=torch.full((8,), 4))
    assert shapes_of_kjt(kjt, [4, 4]) == [(8, 4)]  # eight samples of four steps, not four of two times two
    assert shapes_of_kjt(kjt, [4, 2]) == [(4, 2)]  # eight rows are the eight samples of [4, 2]: bags
    rows = tpuemb.Ragged(torch.arange(0, 17, 4), torch.zeros(16, dtype=torch.int64))
    assert shapes({"a": rows}, [2, 4]) == [(2, 4)]  # as TensorFlow reads it: two steps a row
    told = tpuemb.Ragged(rows.row_splits, rows.ids, batch_size=4)
    assert shapes({"a": told}, [2, 4]) == [(4, 4)]


def shapes_of_kjt(kjt: KeyedJaggedTensor, shape: list[int]) -> list[tuple[int, ...]]:
    axes = " ".join(f"input_shape: {size}" for size in shape)
    text = CONFIG.split("feature_descriptor")[0] + f'feature_descriptor {{ name: "a" table_id: 0 {axes} }}'
    return [tuple(out.shape[:-1]) for out in tpuemb.TPUEmbedding(tpuemb.load_config(text))(kjt).values()]


def test_ragged_rows_that_fit_nothing() -> None:
    with pytest.raises(tpuemb.InputError, match="5 ragged rows do not fit shape"):
        ragged_shape(feature(4, 6), 5, 4)
    with pytest.raises(tpuemb.InputError, match="5 ragged rows do not fit shape"):
        ragged_shape(feature(4, 2, 3), 5, None)


@pytest.mark.parametrize("policy", ["drop", "clamp"])
def test_id_policies(policy: str) -> None:
    embedding = tpuemb.TPUEmbedding(tpuemb.load_config(CONFIG), ["mean"], id_policy=policy)
    embedding.load_parameters({"t": {"parameters": torch.arange(10.0)[:, None].expand(10, 2)}})
    ragged = tpuemb.Ragged(t(0, 3, 4, 4, 6), t(1, 99, 4, -5, 2, 7), t(1.0, 2.0, 3.0, 1.0, 1.0, 1.0))
    out = embedding({**GOOD, "bag": ragged})["bag"][:, 0].tolist()
    if policy == "drop":
        # As if the ids had never been in their bags.
        assert out == pytest.approx([(1 + 3 * 4) / 4, 0, 0, 4.5])
    else:
        assert out == pytest.approx([(1 + 2 * 9 + 3 * 4) / 6, 0, 0, 4.5])


def one_feature(shape: tuple[int, ...], combiner: str = "sum") -> tpuemb.TPUEmbedding:
    """Row i holds the number i."""
    text = """mode: INFERENCE num_hosts: 1 num_tensor_cores: 1
    table_descriptor { name: "t" vocabulary_size: 20 dimension: 1 optimization_parameters {
        learning_rate { constant: 1 } stochastic_gradient_descent {} } }
    feature_descriptor { name: "f" table_id: 0 """
    emb = tpuemb.TPUEmbedding(text + " ".join(f"input_shape: {size}" for size in shape) + " }", [combiner])
    emb.load_parameters({"t": {"parameters": torch.arange(20.0)[:, None]}})
    return emb


def test_a_nested_tensor_with_holes_skips_them() -> None:
    value = torch.nested.nested_tensor_from_jagged(
        torch.arange(10), offsets=torch.tensor([0, 3, 5, 8, 10]), lengths=torch.tensor([2, 1, 3, 0])
    )
    assert one_feature((4,))([value])["f"].flatten().tolist() == [1, 3, 18, 0]


def test_an_empty_keyed_jagged_tensor_of_a_sequence() -> None:
    kjt = KeyedJaggedTensor(["f"], torch.zeros(0).long(), lengths=torch.zeros(0).long())
    assert one_feature((4, 3))(kjt)["f"].shape == (0, 3, 1)


def test_an_empty_list_or_array_of_ids() -> None:
    for value in ([], np.zeros(0)):
        assert one_feature((4,))([value])["f"].shape == (0, 1)


@pytest.mark.parametrize("shape", [(4,), (4, 2)])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lengths": torch.tensor([1, -1, 2, 0])}, "feature 'f': KeyedJaggedTensor length 1 is -1"),
        ({"offsets": torch.arange(5) + 1}, r"offsets\[0\] is 1"),
        ({"lengths": torch.ones(4).long(), "weights": torch.ones(4, 1)}, r"weights of shape \[4, 1\]"),
        ({"lengths": torch.tensor([1, 1, 1, 2])}, "sum to 5"),
        ({"stride_per_key_per_rank": [[2]], "lengths": torch.tensor([2, 2])}, "batch size per key"),
    ],
)
def test_malformed_keyed_jagged_tensors(shape: tuple[int, ...], arguments: dict[str, Any], message: str) -> None:
    values = torch.arange(2) if "length 1" in message else torch.arange(4)
    with pytest.raises(tpuemb.InputError, match=message):
        one_feature(shape)(KeyedJaggedTensor(["f"], values, **arguments))


@pytest.mark.parametrize("size", [-4, "4", 4.0, True])
def test_batch_sizes_that_are_none(size: Any) -> None:
    for value in (
        tpuemb.Ragged(torch.arange(5), torch.arange(4), batch_size=size),
        tpuemb.Sparse(torch.zeros(0, 2).long(), torch.zeros(0).long(), batch_size=size),
    ):
        with pytest.raises(tpuemb.InputError, match="feature 'f': batch_size is"):
            one_feature((4,))([value])


@pytest.mark.parametrize(
    "value",
    [
        torch.eye(4).long().to_sparse_csr(),
        torch.nested.nested_tensor([torch.arange(2), torch.arange(3)]),
        torch.zeros(4, dtype=torch.int64, device="meta"),
    ],
)
def test_tensors_of_other_layouts(value: torch.Tensor) -> None:
    with pytest.raises(tpuemb.InputError, match="feature 'f'"):
        one_feature((4,))([value])


def test_a_gain_beyond_float32() -> None:
    value = tpuemb.Ragged(torch.tensor([0, 1, 4]), torch.arange(4), torch.tensor([1.0, 1e30, -1e30, 1e-10]))
    with pytest.raises(tpuemb.InputError, match="feature 'f': the gain of id number 1 is beyond float32"):
        one_feature((2,), "mean")([value])
    assert one_feature((2,))([value])["f"].isfinite().all()


def test_unsorted_sequences() -> None:
    value = tpuemb.Sparse(torch.tensor([[0, 2], [2, 5], [1, 0]]), torch.arange(3))
    with pytest.raises(tpuemb.InputError, match=r"indices\[2\] is \[1, 0\] after \[2, 5\]: order ids by sample"):
        one_feature((3, 4))([value])
    steps_in_any_order = tpuemb.Sparse(torch.tensor([[0, 2], [0, 0], [1, 9], [2, 1]]), torch.arange(4) + 5)
    out = one_feature((3, 4))([steps_in_any_order])["f"].squeeze(-1)
    assert out.tolist() == [[6, 0, 5, 0], [0, 0, 0, 0], [0, 8, 0, 0]]
    repeated = tpuemb.Sparse(torch.tensor([[0, 9], [1, 2], [1, 2]]), torch.arange(3))
    with pytest.raises(tpuemb.InputError, match=r"indices\[2\]: a second id at \[1, 2\]"):
        one_feature((3, 4))([repeated])


def table_layout(text: str = "num_features: 2") -> tpuemb.TPUEmbedding:
    emb = tpuemb.TPUEmbedding(
        """mode: INFERENCE num_hosts: 1 num_tensor_cores: 1 batch_size_per_tensor_core: 4
        table_descriptor { name: "t" vocabulary_size: 20 dimension: 1 %s optimization_parameters {
            learning_rate { constant: 1 } stochastic_gradient_descent {} } }
        table_descriptor { name: "u" vocabulary_size: 20 dimension: 1 num_features: 1 optimization_parameters {
            learning_rate { constant: 1 } stochastic_gradient_descent {} } }""".replace("%s", text)
    )
    emb.load_parameters({name: {"parameters": torch.arange(20.0)[:, None]} for name in "tu"})
    return emb


def test_one_array_per_feature_slot() -> None:
    for make in (torch.tensor, np.array):
        out = table_layout()([[make([0, 1, 2, 3]), make([4, 5, 6, 7])], torch.arange(4)])["t"]
        assert out.flatten().tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    with pytest.raises(tpuemb.InputError, match="'t': nested lists may be bags or one input per feature slot"):
        table_layout()([[[0, 1, 2, 3], [4, 5, 6, 7]], torch.arange(4)])


def test_output_rows_that_are_no_batch() -> None:
    with pytest.raises(tpuemb.InputError, match="'t': 7 output rows, which num_features 2 does not divide"):
        table_layout()([torch.arange(7), torch.arange(4)])
    with pytest.raises(tpuemb.InputError, match="'u': 3 output rows with num_features 1 are 3 samples, but table 't'"):
        table_layout()([torch.arange(8), torch.arange(3)])
