"""How many samples an entry of an enqueue op has is stated by the op: other numbers are refused, none is guessed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import tpuemb_torch as tpuemb
from tpuemb_torch import ops
from tpuemb_torch.ops import system

EMPTY = torch.zeros(0)
OPTIMIZER = "optimization_parameters { learning_rate { constant: 1 } stochastic_gradient_descent {} }"


@pytest.fixture(autouse=True)
def no_system_left() -> Iterator[None]:
    yield
    system._installed = None


def configured(*shape: int, num_features: int = 0) -> None:
    """One table whose row i holds the number i; in the table layout, or with one feature of a shape."""
    text = "mode: INFERENCE num_hosts: 1 num_tensor_cores: 1 "
    text += (
        f'table_descriptor {{ name: "t" vocabulary_size: 20 dimension: 1 num_features: {num_features} {OPTIMIZER} }}'
    )
    if shape:
        text += 'feature_descriptor { name: "f" table_id: 0 ' + " ".join(f"input_shape: {n}" for n in shape) + " }"
    else:
        text += "batch_size_per_tensor_core: 4"
    emb = tpuemb.TPUEmbedding(text)
    emb.load_parameters({"t": {"parameters": torch.arange(20.0)[:, None]}})
    ops.use(emb)


def received() -> list[float]:
    (out,) = ops.recv_tpu_embedding_activations(1, system.current().config)
    return out.flatten().tolist()


def ragged(splits: list[int], ids: Tensor, steps: int = 0, slots: int = 1, dynamic: bool = False) -> None:
    arguments = ([torch.tensor(splits)], [ids], [EMPTY], "unspecified")
    options = {"table_ids": [0], "max_sequence_lengths": [steps], "num_features": [slots]}
    if dynamic:
        ops.dynamic_enqueue_tpu_embedding_ragged_tensor_batch(*arguments, -1, **options)
    else:
        ops.enqueue_tpu_embedding_ragged_tensor_batch(*arguments, **options)


def sparse(indices: list[list[int]], ids: Tensor, steps: int = 0, slots: int = 1) -> None:
    places = torch.tensor(indices, dtype=torch.int64).view(-1, 2)
    ops.enqueue_tpu_embedding_sparse_tensor_batch(
        [places], [ids], [EMPTY], "unspecified", [0], max_sequence_lengths=[steps], num_features=[slots]
    )


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("shape", "num_features"), [((2, 1), 0), ((), 1)])
def test_sequences_of_one_step_are_cut_not_combined(shape: tuple[int, ...], num_features: int, dynamic: bool) -> None:
    configured(*shape, num_features=num_features)
    rows = 2 if shape else 4
    splits = [0, 2, 3, 3, 5][: rows + 1]
    ragged(splits, torch.arange(splits[-1]) + 3, steps=1, dynamic=dynamic)
    assert received() == [3, 5, 0, 6][:rows]


@pytest.mark.parametrize(
    ("shape", "num_features", "splits", "steps", "slots", "message"),
    [
        ((4,), 0, [0, 3, 5], 0, 1, "2 rows for 4 samples"),
        ((4,), 0, [0, 5], 0, 1, "1 rows for 4 samples"),
        ((4,), 0, [0] * 9, 0, 1, "8 rows for 4 samples"),
        ((4, 2), 0, [0, 1, 2, 3, 4], 0, 1, "4 rows for 8 samples"),
        ((4, 2), 0, [0, 1, 2], 2, 1, "2 rows for a batch of 4 sequences"),
        ((4, 2), 0, [0] * 9, 2, 1, "8 rows for a batch of 4 sequences"),
        ((4, 2), 0, [0] * 5, 3, 1, "max_sequence_length is 3"),
        ((), 2, [0, 1, 2, 3, 4], 0, 2, "4 rows for 8 samples"),
        ((), 2, [0] * 9, 2, 1, "8 rows for a batch of 4 sequences"),
        ((), 2, [0] * 5, 0, 1, "fill 1 feature slots; the table has num_features 2"),
        ((), 2, [0] * 5, -2, 1, r"max_sequence_lengths\[0\] is -2"),
        ((), 2, [0] * 5, 0, 0, r"num_features\[0\] is 0"),
    ],
)
def test_ragged_entries(
    shape: tuple[int, ...], num_features: int, splits: list[int], steps: int, slots: int, message: str
) -> None:
    configured(*shape, num_features=num_features)
    with pytest.raises(tpuemb.InputError, match=message):
        ragged(splits, torch.zeros(splits[-1]).long(), steps, slots)
    with pytest.raises(RuntimeError, match="no batch to receive"):
        received()


@pytest.mark.parametrize(
    ("shape", "num_features", "ids", "slots"), [((4,), 0, 2, 1), ((4,), 0, 8, 1), ((), 1, 2, 1), ((), 2, 4, 2)]
)
def test_ids_without_indices_are_as_many_as_samples(
    shape: tuple[int, ...], num_features: int, ids: int, slots: int
) -> None:
    configured(*shape, num_features=num_features)
    samples = 4 * max(num_features, 1)
    with pytest.raises(tpuemb.InputError, match=f"{ids} rows for {samples} samples"):
        sparse([], torch.arange(ids), slots=slots)
    sparse([], torch.arange(samples), slots=slots)
    assert received() == list(range(samples))


def test_arbitrary_batches_have_the_size_of_the_config() -> None:
    configured(num_features=2)
    for splits, wanted in (
        ([0, 2, 2, 3, 4], [0, 1, 0, 0, 2, 0, 3, 0]),  # sequences of two steps, as TensorFlow reads them
        ([0, 2, 2, 3, 4, 4, 4, 4, 4], [1, 0, 2, 3, 0, 0, 0, 0]),
    ):
        ops.enqueue_tpu_embedding_arbitrary_tensor_batch([torch.tensor(splits)], [torch.arange(4)], [EMPTY])
        assert received() == wanted
    for splits in ([0, 2, 2, 4], [0] * 16 + [4]):
        with pytest.raises(tpuemb.InputError, match="ragged rows do not fit shape"):
            ops.enqueue_tpu_embedding_arbitrary_tensor_batch([torch.tensor(splits)], [torch.arange(4)], [EMPTY])
