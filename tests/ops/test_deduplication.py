"""Split, merge, size and mask of deduplication data; the op that catches gradients."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tpuemb_torch as tpuemb
from tests.distributed.cases import config_text
from tpuemb_torch import ops
from tpuemb_torch.ops import system

RATES = [0.1, 0.2]
IDS = [torch.arange(12), torch.arange(30) % 7, torch.zeros(6).long()]
# Written by hand from tensor.proto: dtype 3; dims 3 and 2; int_val packed.  Elements int, int, float, int.
EXAMPLE = bytes.fromhex("0803 1208 12020803 12020802 3a06 000201010001".replace(" ", ""))
EXAMPLE_ROWS = torch.tensor([[0, 2], [1, 1], [0, 1]], dtype=torch.int32)


@pytest.fixture(autouse=True)
def no_system_left() -> Iterator[None]:
    yield
    system._installed = None


def configured(optimizer: str = "adagrad") -> bytes:
    config = tpuemb.load_config(config_text(optimizer)).serialize()
    ops.configure_tpu_embedding(config)
    return config


def split(data: Any, mask: bytes, config: bytes = b"") -> tuple[torch.Tensor, torch.Tensor]:
    return ops.split_dedup_data(data, torch.int64, torch.float32, mask, config)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("split_dedup_data", ["input", "integer_type", "float_type", "tuple_mask", "config"]),
        ("merge_dedup_data", ["integer_tensor", "float_tensor", "tuple_mask", "config"]),
        ("compute_dedup_data_size", ["config"]),
        ("compute_dedup_data_tuple_mask", ["config"]),
        ("compute_dedup_data_size_v2", ["config", "embedding_partitions", "hbm_buffers_config", "tpu_topology"]),
        ("compute_dedup_data_tuple_mask_v2", ["config", "embedding_partitions", "hbm_buffers_config", "tpu_topology"]),
    ],
)
def test_arguments_are_those_of_tensorflow(name: str, parameters: list[str]) -> None:
    assert list(inspect.signature(getattr(ops, name)).parameters) == parameters


def test_a_mask_is_written_as_a_tensor_proto() -> None:
    assert ops.serialize_tuple_mask(EXAMPLE_ROWS) == EXAMPLE


def test_unpacked_values_are_read_too() -> None:
    unpacked = EXAMPLE[:12] + bytes.fromhex("3800 3802 3801 3801 3800 3801".replace(" ", ""))
    data = ops.merge_dedup_data(torch.arange(3), torch.ones(1), unpacked)
    assert data.kinds.tolist() == [0, 0, 1, 0]


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3)), min_size=1, max_size=6))
def test_merge_then_split_is_the_identity(rows: list[tuple[int, int]]) -> None:
    mask = ops.serialize_tuple_mask(torch.tensor(rows))
    integers = torch.arange(sum(n for kind, n in rows if kind == 0)) * 7 - 3
    floats = torch.arange(sum(n for kind, n in rows if kind == 1)) / 3
    data = ops.merge_dedup_data(integers, floats, mask)
    assert data.kinds.tolist() == [kind for kind, n in rows for _ in range(n)]
    found = split(data, mask)
    assert torch.equal(found[0], integers)
    assert torch.equal(found[1], floats)


@pytest.mark.parametrize("integer_type", [torch.int32, torch.int64, torch.uint32, torch.uint64])
@pytest.mark.parametrize("float_type", [torch.float16, torch.bfloat16, torch.float32])
def test_types(integer_type: torch.dtype, float_type: torch.dtype) -> None:
    data = ops.merge_dedup_data(torch.arange(3).to(integer_type), torch.ones(1, dtype=float_type), EXAMPLE)
    integers, floats = ops.split_dedup_data(data, integer_type, float_type, EXAMPLE)
    assert (integers.dtype, floats.dtype) == (integer_type, float_type)
    assert integers.tolist() == [0, 1, 2]
    assert floats.tolist() == [1.0]


@pytest.mark.parametrize("shape", [(0, 2), (0,), (0, 5, 1)])
def test_an_empty_mask_gives_empty_tensors_whatever_its_rank(shape: tuple[int, ...]) -> None:
    mask = ops.serialize_tuple_mask(torch.zeros(shape, dtype=torch.int32))
    data = ops.merge_dedup_data(torch.zeros(0).long(), torch.zeros(0), mask)
    assert [t.shape for t in split(data, mask)] == [(0,), (0,)]
    ops.configure_tpu_embedding(tpuemb.load_config(config_text("adagrad")))
    ops.enqueue_tpu_embedding_integer_batch(IDS)
    received = ops.xla_recv_tpu_embedding_deduplication_data(system.current().config)
    assert [t.shape for t in split(received, mask)] == [(0,), (0,)]


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (b"\xff", "not a serialized TensorProto"),
        (b"", "scalar or has no shape"),
        (ops.serialize_tuple_mask(torch.tensor([0, 1])), r"shape \[2\]; it must be \[m, 2\]"),
        (ops.serialize_tuple_mask(torch.tensor([[0, 1, 1]])), r"shape \[1, 3\]"),
        (ops.serialize_tuple_mask(torch.tensor([[2, 1]])), r"tuple_mask\[0\] has type 2"),
        (ops.serialize_tuple_mask(torch.tensor([[0, 1], [1, -1]])), r"tuple_mask\[1\] has span -1"),
        (EXAMPLE[:12] + bytes.fromhex("3a05") + EXAMPLE[14:19], r"has 5 int_val; it must have 6"),
        (EXAMPLE[:12] + bytes.fromhex("2218") + EXAMPLE_ROWS.numpy().tobytes(), "tensor_content"),
        (b"\x08\x09" + EXAMPLE[2:], "data type 9"),
        (ops.serialize_tuple_mask(torch.tensor([[0, 3]])), "float_tensor has 1 elements, but tuple_mask describes 0"),
        (ops.serialize_tuple_mask(torch.tensor([[0, 2**31 - 1]])), "integer_tensor has 3 elements"),
    ],
)
def test_wrong_masks(mask: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ops.merge_dedup_data(torch.arange(3), torch.ones(1), mask)
    data = ops.merge_dedup_data(torch.arange(3), torch.ones(1), EXAMPLE)
    with pytest.raises(ValueError, match="tuple_mask"):
        split(data, mask)


def test_wrong_inputs() -> None:
    data = ops.merge_dedup_data(torch.tensor([0, -1, 2]), torch.ones(1), EXAMPLE)
    with pytest.raises(ValueError, match="in this order"):  # The same numbers in another order.
        split(data, ops.serialize_tuple_mask(torch.tensor([[0, 3], [1, 1]])))
    with pytest.raises(ValueError, match="element 1 is -1, beyond"):
        ops.split_dedup_data(data, torch.uint32, torch.float32, EXAMPLE)
    with pytest.raises(ValueError, match=r"float_tensor has shape \[1, 1\]"):
        ops.merge_dedup_data(torch.arange(3), torch.ones(1, 1), EXAMPLE)
    with pytest.raises(TypeError, match="float64"):
        ops.merge_dedup_data(torch.arange(3), torch.ones(1).double(), EXAMPLE)
    with pytest.raises(TypeError, match="int16"):
        ops.split_dedup_data(data, torch.int16, torch.float32, EXAMPLE)
    with pytest.raises(TypeError, match="deduplication data, got int"):
        split(3, EXAMPLE)
    with pytest.raises(TypeError, match="got str"):
        split(data, "mask")  # type: ignore[arg-type]


def test_size_mask_and_split_agree_and_merged_data_names_its_batch() -> None:
    config = configured()
    for size in (ops.compute_dedup_data_size(config), ops.compute_dedup_data_size_v2(config)):
        assert (size.item(), size.dtype, size.shape) == (1, torch.int32, ())
    rows = ops.compute_dedup_data_tuple_mask(config)
    assert rows.dtype == torch.int32
    assert torch.equal(rows, ops.compute_dedup_data_tuple_mask_v2(config))
    mask = ops.serialize_tuple_mask(rows)
    with pytest.raises(ValueError, match="config differs"):
        ops.compute_dedup_data_size(tpuemb.load_config(config_text("sgd")).serialize())

    for _ in range(2):
        ops.enqueue_tpu_embedding_integer_batch(IDS)
        data = ops.xla_recv_tpu_embedding_deduplication_data(config)
        number = data.batch
        integers, floats = split(data, mask, config)
        assert integers.tolist() == [number]
        assert floats.shape == (0,)
        other = ops.merge_dedup_data(integers + 1, floats, mask, config)
        example = ops.merge_dedup_data(torch.arange(3), torch.ones(1), EXAMPLE)
        for wrong, message in ((other, f"of batch {number + 1} given to the"), (example, "3 integers and 1 floats")):
            with pytest.raises(ValueError, match=message):
                ops.xla_recv_tpu_embedding_activations(wrong, 5, config)
        merged = ops.merge_dedup_data(integers, floats, mask, config)
        activations = ops.xla_recv_tpu_embedding_activations(merged, 5, config)
        before = system.current().retrieve_parameters()["user"]["parameters"]
        gradients = [torch.ones_like(a) for a in activations]
        with pytest.raises(ValueError, match=f"of batch {number + 1} given to the send"):
            ops.xla_send_tpu_embedding_gradients(gradients, RATES, other, config)
        assert torch.equal(before, system.current().retrieve_parameters()["user"]["parameters"])
        ops.xla_send_tpu_embedding_gradients(gradients, RATES, merged, config)
        assert not torch.equal(before, system.current().retrieve_parameters()["user"]["parameters"])


def test_activations_catch_the_gradients_for_a_send() -> None:
    config = configured()
    variable = torch.ones(1, requires_grad=True)
    ops.enqueue_tpu_embedding_integer_batch(IDS)
    received = ops.recv_tpu_embedding_activations(5, config)
    tables = [0, 0, 1, 1, 2]
    keys = [(table, tables[:index].count(table)) for index, table in enumerate(tables)]
    seen = [ops.tpu_embedding_activations(variable, a, *key) for a, key in zip(received, keys, strict=True)]
    assert all(torch.equal(a, b) for a, b in zip(seen, received, strict=True))
    sum(((index + 1) * a.square().sum() for index, a in enumerate(seen)), torch.zeros(())).backward()
    assert variable.grad is not None
    assert variable.grad.tolist() == [0.0]
    caught = ops.captured_gradients()
    assert sorted(caught) == sorted(keys)
    for index, (key, a) in enumerate(zip(keys, received, strict=True)):
        torch.testing.assert_close(caught[key], 2 * (index + 1) * a)
    assert ops.captured_gradients() == {}
    before = system.current().retrieve_parameters()["user"]["parameters"]
    ops.send_tpu_embedding_gradients([caught[key] for key in keys], RATES, config)
    assert not torch.equal(before, system.current().retrieve_parameters()["user"]["parameters"])


def test_activations_refuse_a_second_gradient_and_wrong_numbers() -> None:
    configured()
    variable, activations = torch.ones(1, requires_grad=True), torch.ones(2, 3, requires_grad=True)
    output = ops.tpu_embedding_activations(variable, activations, 1, 0)
    output.sum().backward()
    assert activations.grad is not None
    assert not activations.grad.any()
    with pytest.raises(RuntimeError, match="second gradient for table_id 1 and lookup_id 0"):
        ops.tpu_embedding_activations(variable, activations, 1, 0).sum().backward()
    with pytest.raises(ValueError, match="table_id 3: the config has 3 tables"):
        ops.tpu_embedding_activations(variable, activations, 3, 0)
    with pytest.raises(ValueError, match="lookup_id -1"):
        ops.tpu_embedding_activations(variable, activations, 0, -1)
    configured("sgd")  # A new layer begins without gradients.
    assert ops.captured_gradients() == {}


def test_activations_take_no_gradient_in_inference() -> None:
    ops.configure_tpu_embedding(tpuemb.load_config(config_text("sgd").replace("mode: TRAINING", "mode: INFERENCE")))
    assert system.current().config.mode == "inference"
    output = ops.tpu_embedding_activations(torch.ones(1, requires_grad=True), torch.ones(2), 0, 0)
    with pytest.raises(RuntimeError, match="mode INFERENCE"):
        output.sum().backward()
