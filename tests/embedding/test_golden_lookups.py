"""Lookups made by TensorFlow: bags through its SparseCore preprocessing, sequences and N-D shapes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

import tpuemb_torch as tpuemb
from tests.embedding.golden_cases import names
from tests.golden import golden

TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}


def layer(table: np.ndarray, shape: tuple[int, ...], combiner: str, extra: str = "") -> tpuemb.TPUEmbedding:
    """One table with one feature "f"."""
    rows, dimension = table.shape
    axes = " ".join(f"input_shape: {size}" for size in shape)
    config = tpuemb.load_config(f"""
        mode: TRAINING num_hosts: 1 num_tensor_cores: 1
        table_descriptor {{ name: "t" vocabulary_size: {rows} dimension: {dimension} optimization_parameters {{
            learning_rate {{ constant: 1 }} stochastic_gradient_descent {{}} {extra} }} }}
        feature_descriptor {{ name: "f" table_id: 0 {axes} }}""")
    embedding = tpuemb.TPUEmbedding(config, [combiner])
    embedding.load_parameters({"t": {"parameters": table}})
    return embedding


def arrays_of(path: str) -> dict[str, np.ndarray]:
    with np.load(golden(path)) as arrays:
        return dict(arrays)


def torch_of(arrays: dict[str, np.ndarray], name: str) -> torch.Tensor | None:
    return torch.from_numpy(arrays[name]) if name in arrays else None


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("kind", ["ragged", "sparse"])
@pytest.mark.parametrize("case", names("lookups/sparsecore_coo", "*.npz"))
def test_bags(case: str, kind: str, combiner: str) -> None:
    arrays = arrays_of(f"lookups/sparsecore_coo/{case}.npz")
    expected = arrays[f"activation64.{kind}.{combiner}"]
    embedding = layer(arrays["table"], (len(expected),), combiner)
    ids, weights = torch.from_numpy(arrays["values"]), torch_of(arrays, "weights")
    if kind == "ragged":
        value: object = tpuemb.Ragged(torch.from_numpy(arrays["row_splits"]), ids, weights)
    else:
        value = tpuemb.Sparse(torch.from_numpy(arrays["indices"]), ids, weights)
    embedding.enqueue({"f": value})
    gain = embedding._queue.to_receive().prepared.input.gains
    (out,) = embedding.recv_activations()
    if combiner == "sqrtn" and "huge" in case:
        # TensorFlow squares in float32, which overflows: it gives 0 where the denominator is finite in float64.
        wide = arrays["weights"].astype(np.float64)
        starts = arrays["row_splits"]
        for row, (begin, end) in enumerate(pairwise(starts)):
            bag = wide[begin:end]
            gains = bag / np.sqrt((bag**2).sum()) if len(bag) else bag
            exact = (gains[:, None] * arrays["table"][arrays["values"][begin:end]].astype(np.float64)).sum(0)
            np.testing.assert_allclose(out[row].numpy(), exact, **TOLERANCE)
        return
    np.testing.assert_allclose(out.numpy(), expected, **TOLERANCE)
    empty = np.diff(arrays["row_splits"]) == 0
    assert not out.numpy()[empty].any()
    rows = arrays[f"row.{kind}.{combiner}"]
    if gain is not None and len(rows) == len(ids):  # TensorFlow merges ids that occur twice in a bag
        order = np.lexsort((arrays["values"], np.repeat(np.arange(len(expected)), np.diff(arrays["row_splits"]))))
        theirs = np.lexsort((arrays[f"id.{kind}.{combiner}"], rows))
        np.testing.assert_allclose(gain.numpy()[order], arrays[f"gain.{kind}.{combiner}"][theirs], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("case", names("lookups/sequence_and_shapes", "sequence_*.npz"))
def test_sequences(case: str) -> None:
    arrays = arrays_of(f"lookups/sequence_and_shapes/{case}.npz")
    ids = torch.from_numpy(arrays["values"])
    batch, length, _ = arrays["out.sparse"].shape
    for combiner in ("sum", "mean", "sqrtn"):
        embedding = layer(arrays["table"], (batch, length), combiner)
        out = embedding({"f": tpuemb.Sparse(torch.from_numpy(arrays["indices"]), ids)})["f"]
        np.testing.assert_array_equal(out.detach().numpy(), arrays["out.sparse"])
        # With as many rows as samples a ragged input is bags (length 1), which differs from CPU serving.
        if "out.ragged" in arrays and length > 1:
            out = embedding({"f": tpuemb.Ragged(torch.from_numpy(arrays["row_splits"]), ids)})["f"]
            np.testing.assert_array_equal(out.detach().numpy(), arrays["out.ragged"])


@pytest.mark.parametrize("case", names("lookups/sequence_and_shapes", "ragged_output_*.npz"))
def test_ragged_output_shapes(case: str) -> None:
    arrays = arrays_of(f"lookups/sequence_and_shapes/{case}.npz")
    shape = arrays["out.noweights"].shape[:-1]
    embedding = layer(arrays["table"], shape, case.rsplit("_", 1)[1])
    splits, ids = torch.from_numpy(arrays["row_splits"]), torch.from_numpy(arrays["values"])
    for name, weights in (("noweights", None), ("weights", torch.from_numpy(arrays["weights"]))):
        out = embedding({"f": tpuemb.Ragged(splits, ids, weights)})["f"]
        np.testing.assert_allclose(out.detach().numpy(), arrays[f"out.{name}"], **TOLERANCE)


@pytest.mark.parametrize("case", names("lookups/sequence_and_shapes", "dense_*.npz"))
def test_dense(case: str) -> None:
    arrays = arrays_of(f"lookups/sequence_and_shapes/{case}.npz")
    ids = torch.from_numpy(arrays["values"])
    embedding = layer(arrays["table"], tuple(ids.shape), "mean")
    np.testing.assert_array_equal(embedding({"f": ids})["f"].detach().numpy(), arrays["out"])


def test_sparse_of_rank_3() -> None:
    arrays = arrays_of("lookups/sequence_and_shapes/sparse_rank3_mean.npz")
    shape = arrays["out.noweights"].shape[:-1]
    embedding = layer(arrays["table"], shape, "mean")
    indices, ids = torch.from_numpy(arrays["indices"]), torch.from_numpy(arrays["values"])
    for name, weights in (("noweights", None), ("weights", torch.from_numpy(arrays["weights"]))):
        out = embedding({"f": tpuemb.Sparse(indices, ids, weights)})["f"]
        np.testing.assert_allclose(out.detach().numpy(), arrays[f"out.{name}"], **TOLERANCE)


def test_simulated_quantization() -> None:
    arrays = arrays_of("lookups/quantization.npz")
    cases = sorted({key.split(".")[0] for key in arrays})
    assert cases
    for case in cases:
        lower, upper, buckets = arrays[f"{case}.lower_upper_buckets"]
        table = arrays[f"{case}.input"][:, None]
        embedding = layer(
            table,
            (len(table),),
            "sum",
            f"""simulated_quantization {{ enabled: true num_buckets: {int(buckets)}
                clipping_limits {{ lower {{ value: {lower} }} upper {{ value: {upper} }} }} }}""",
        )
        out = embedding({"f": torch.arange(len(table))})["f"]
        np.testing.assert_allclose(out.detach().numpy()[:, 0], arrays[f"{case}.f4"], **TOLERANCE)
        # Straight-through: the stored table moves by lr * gradient, from its unquantized values.
        out.sum().backward()
        moved = embedding.retrieve_parameters()["t"]["parameters"].numpy()
        np.testing.assert_allclose(moved, table - 1, rtol=1e-6, atol=1e-6)


def test_out_of_range_ids_raise() -> None:
    embedding = layer(np.zeros((50, 8), np.float32), (4,), "sum")
    for bad in (-1, 50, 2**31, 2**40):
        with pytest.raises(tpuemb.InputError, match=rf"'f'.*{bad} at position 2.*'t'.*0 to 49"):
            embedding({"f": torch.tensor([1, 2, bad, 3])})
    embedding({"f": torch.tensor([0, 49, 1, 2])})
