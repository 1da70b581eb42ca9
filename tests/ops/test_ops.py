"""The ops: signatures of TensorFlow's registry, the five enqueue kinds, recv and send, load and retrieve."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import tpuemb_torch as tpuemb
from tests.distributed.cases import config_text
from tests.golden import GOLDEN
from tpuemb_torch import ops
from tpuemb_torch.ops import system
from tpuemb_torch.ops.parameters import snake_case

EMPTY = torch.tensor([])
RATES = [0.1, 0.2]
COMBINERS = ["mean", "sqrtn", "sum"]

TABLE_LAYOUT = """
mode: TRAINING num_hosts: 1 num_tensor_cores: 1 batch_size_per_tensor_core: 4
table_descriptor { name: "one" vocabulary_size: 9 dimension: 2 num_features: 1 optimization_parameters {
    learning_rate { constant: 1 } stochastic_gradient_descent {} } }
table_descriptor { name: "three" vocabulary_size: 9 dimension: 2 num_features: 3 optimization_parameters {
    learning_rate { constant: 1 } adagrad {} } }
"""


@pytest.fixture(autouse=True)
def no_system_left() -> Iterator[None]:
    yield
    system._installed = None


def configured(text: str, **options: Any) -> bytes:
    config = tpuemb.load_config(text)
    ops.configure_tpu_embedding(config.serialize(), **options)
    return config.serialize()


def op_defs() -> dict[str, Any]:
    if GOLDEN is None:
        return {}
    definitions = json.loads((GOLDEN / "configs" / "op_defs.json").read_text())
    return {name: definition for name, definition in definitions.items() if "TPUEmbedding" in name}


#: Attributes that TensorFlow infers from the inputs.
INFERRED = {"N", "NN", "T1", "T2", "T3", "NumTables", "NumLearningRateTags"}


def expected_parameters(definition: dict[str, Any]) -> list[str]:
    inputs = [name for name, *_ in definition["inputs"]]
    attrs = {name: a for name, a in definition["attrs"].items() if name not in INFERRED}
    needed = [name for name, a in attrs.items() if a["default"] is None]
    return [*inputs, *needed, *(name for name in attrs if name not in needed)]


def op_name(name: str) -> str:
    return snake_case(name.replace("TPUEmbedding", "TpuEmbedding"))


@pytest.mark.parametrize("name", sorted(op_defs()) or ["absent"])
def test_arguments_are_those_of_tensorflow(name: str) -> None:
    if GOLDEN is None:
        pytest.skip("no golden data: the registry's op definitions are missing")
    function = getattr(ops, op_name(name), None)
    if function is None or name == "EnqueueTPUEmbeddingBatch":
        pytest.skip(f"{name} is not among the ops here")
    if name == "ConfigureTPUEmbedding":
        assert next(iter(inspect.signature(function).parameters)) == "config"
        return
    assert list(inspect.signature(function).parameters) == expected_parameters(op_defs()[name])


def test_the_ops_that_there_must_be() -> None:
    for algorithm in ("adagrad", "adam", "ftrl", "stochastic_gradient_descent", "rms_prop", "centered_rms_prop"):
        assert callable(getattr(ops, f"load_tpu_embedding_{algorithm}_parameters"))
        assert callable(getattr(ops, f"retrieve_tpu_embedding_{algorithm}_parameters"))
    for name in ops.__all__:
        assert inspect.getdoc(getattr(ops, name)), name


def test_configure_and_is_initialized() -> None:
    assert not ops.is_tpu_embedding_initialized()
    with pytest.raises(RuntimeError, match="call configure_tpu_embedding"):
        ops.enqueue_tpu_embedding_integer_batch([EMPTY])
    config = configured(config_text("adagrad"))
    assert ops.is_tpu_embedding_initialized()
    assert ops.is_tpu_embedding_initialized(config)
    assert not ops.is_tpu_embedding_initialized(tpuemb.load_config(config_text("adam")).serialize())
    assert not ops.is_tpu_embedding_initialized(b"\xff")
    with pytest.raises(ValueError, match="config is empty"):
        ops.configure_tpu_embedding(b"")
    with pytest.raises(tpuemb.ConfigError):
        ops.configure_tpu_embedding(config[:-1])
    assert ops.is_tpu_embedding_initialized(config)


def test_arbitrary_tensor_batch_equals_the_module() -> None:
    config = configured(config_text("adagrad"))
    embedding = tpuemb.TPUEmbedding(tpuemb.load_config(config), COMBINERS)
    splits, ids = torch.tensor([0, 1, 1, 3, 3, 3, 3]), torch.tensor([1, 2, 3])
    weights = torch.tensor([1.0, 2.0, -3.0])
    history = torch.tensor([[0, 0], [0, 2], [3, 1], [3, 4]])
    grid = torch.tensor([[0, 0, 0], [0, 0, 1], [5, 1, 0]])
    steps = torch.tensor([1, 2, 3, 4])
    ops.enqueue_tpu_embedding_arbitrary_tensor_batch(
        [EMPTY, splits, history, grid.int(), torch.zeros(7, dtype=torch.int64)],
        [torch.arange(6), ids, steps, ids.int(), EMPTY.long()],
        [EMPTY, weights.double(), EMPTY, EMPTY, EMPTY],
        "train",
        combiners=COMBINERS,
    )
    found = ops.recv_tpu_embedding_activations(5, config)
    expected = embedding(
        {
            "viewer": torch.arange(6),
            "friends": tpuemb.Ragged(splits, ids, weights),
            "history": tpuemb.Sparse(history, steps),
            "grid": tpuemb.Sparse(grid, ids),
            "flag": tpuemb.Ragged(torch.zeros(7, dtype=torch.int64), EMPTY.long()),
        }
    )
    assert [tuple(a.shape) for a in found] == list(tpuemb.load_config(config).output_shapes)
    for activation, value in zip(found, expected.values(), strict=True):
        assert torch.equal(activation, value)


def test_combiners_are_per_batch() -> None:
    config = configured(config_text("sgd"))
    found = {}
    for combiners in ([], ["sum", "mean", "sum"], ["sum", "sqrtn", "sum"]):
        ops.enqueue_tpu_embedding_arbitrary_tensor_batch(
            [EMPTY, torch.zeros(7).long(), torch.zeros(7).long(), torch.arange(0, 25, 2), torch.zeros(7).long()],
            [torch.arange(6), EMPTY.long(), EMPTY.long(), torch.arange(24) % 7, EMPTY.long()],
            [EMPTY] * 5,
            "inference",
            combiners=combiners,
        )
        found[tuple(combiners)] = ops.recv_tpu_embedding_activations(5, config)[3]
    total, mean, sqrtn = found.values()
    torch.testing.assert_close(mean, total / 2)
    torch.testing.assert_close(sqrtn, total / 2**0.5)
    with pytest.raises(ValueError, match="2 combiners for 3 tables"):
        ops.enqueue_tpu_embedding_sparse_batch(
            [EMPTY.long()] * 3, [EMPTY.long()] * 3, [EMPTY] * 3, "train", -1, ["sum"] * 2
        )


def test_integer_sparse_and_feature_batches_agree_in_the_table_layout() -> None:
    config = configured(TABLE_LAYOUT)
    rng = np.random.default_rng(0)
    one = torch.from_numpy(rng.integers(0, 9, 4))
    slots = [torch.from_numpy(rng.integers(0, 9, 4)) for _ in range(3)]
    rows = torch.stack(slots, dim=1).reshape(-1)
    results = []
    ops.enqueue_tpu_embedding_integer_batch([one.int(), rows.int()], "train")
    results.append(ops.recv_tpu_embedding_activations(2, config))
    ops.enqueue_tpu_embedding_sparse_batch(
        [torch.arange(4), torch.arange(12)], [one, rows], [EMPTY, torch.ones(12)], "train", combiners=["mean", "sum"]
    )
    results.append(ops.recv_tpu_embedding_activations(2, config))
    samples = torch.stack([torch.arange(4), torch.zeros(4).long()], dim=1)
    ops.enqueue_tpu_embedding_sparse_tensor_batch(
        [samples, samples, torch.zeros(0, 2).long(), samples],
        [slots[0], one, slots[1], slots[2]],
        [EMPTY] * 4,
        "train",
        table_ids=[1, 0, 1, 1],
    )
    results.append(ops.recv_tpu_embedding_activations(2, config))
    ops.enqueue_tpu_embedding_ragged_tensor_batch(
        [torch.arange(5)] * 2 + [torch.arange(9)],
        [one, slots[0], torch.stack(slots[1:], dim=1).reshape(-1)],
        [EMPTY] * 3,
        "train",
        table_ids=[0, 1, 1],
        num_features=[1, 1, 2],
    )
    results.append(ops.recv_tpu_embedding_activations(2, config))
    # A sequence of three steps takes the table's three slots.
    ops.dynamic_enqueue_tpu_embedding_ragged_tensor_batch(
        [torch.arange(5), torch.arange(0, 13, 3)],
        [one, rows],
        [EMPTY] * 2,
        "train",
        torch.tensor(-1),
        table_ids=[0, 1],
        max_sequence_lengths=[0, 3],
    )
    results.append(ops.recv_tpu_embedding_activations(2, config))
    for found in results:
        assert [tuple(a.shape) for a in found] == [(4, 2), (12, 2)]
        assert all(torch.equal(a, b) for a, b in zip(found, results[0], strict=True))


def test_table_batches_reach_the_features_of_the_feature_layout() -> None:
    config = configured(config_text("sgd"))
    embedding = ops.system.current()
    # Samples 6, 6 / 18, 12 / 6 over a batch of 6: table 0 has 2 slots, table 1 has 5, table 2 has 1.
    assert [t.num_features for t in embedding.config.tables] == [2, 5, 1]
    rng = np.random.default_rng(1)
    viewer, friends = (torch.from_numpy(rng.integers(0, 23, 6)) for _ in range(2))
    history, grid = torch.from_numpy(rng.integers(0, 7, (6, 3))), torch.from_numpy(rng.integers(0, 7, (6, 2)))
    flag = torch.from_numpy(rng.integers(0, 2, 6))
    ops.enqueue_tpu_embedding_integer_batch(
        [torch.stack([viewer, friends], 1).reshape(-1), torch.cat([history, grid], 1).reshape(-1), flag]
    )
    found = ops.recv_tpu_embedding_activations(5, config)
    expected = embedding([viewer, friends, history, grid, flag]).values()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_send_and_xla_forms() -> None:
    config = configured(config_text("adagrad"))
    for xla in (False, True):
        before = ops.retrieve_tpu_embedding_adagrad_parameters(1, 0, table_name="user").parameters
        ops.enqueue_tpu_embedding_integer_batch([torch.arange(12), torch.arange(30) % 7, torch.zeros(6).long()])
        if xla:
            data = ops.xla_recv_tpu_embedding_deduplication_data(config)
            activations = ops.xla_recv_tpu_embedding_activations(data, 5, config)
            ops.xla_send_tpu_embedding_gradients([torch.ones_like(a) for a in activations], RATES, data, config)
        else:
            activations = ops.recv_tpu_embedding_activations(5, config)
            ops.send_tpu_embedding_gradients(
                [torch.ones_like(a) for a in activations], [torch.tensor(r) for r in RATES], config
            )
        after = ops.retrieve_tpu_embedding_adagrad_parameters(1, 0, table_name="user").parameters
        assert not torch.equal(before, after)
        before = after


def test_v2_forms_take_the_hardware_descriptions() -> None:
    config = configured(config_text("adagrad"))
    ops.enqueue_tpu_embedding_integer_batch([torch.arange(12), torch.arange(30) % 7, torch.zeros(6).long()])
    extra = {"embedding_partitions": "p", "hbm_buffers_config": "b", "tpu_topology": "t"}
    data = ops.xla_recv_tpu_embedding_deduplication_data_v2(config, **extra)
    activations = ops.xla_recv_tpu_embedding_activations_v2(data, 5, config, **extra)
    ops.xla_send_tpu_embedding_gradients_v2(activations, RATES, data, config, **extra)


def test_wrong_calls_change_no_table() -> None:
    config = configured(config_text("adagrad"))
    other = tpuemb.load_config(config_text("adam")).serialize()
    ops.enqueue_tpu_embedding_integer_batch([torch.arange(12), torch.arange(30) % 7, torch.zeros(6).long()])
    with pytest.raises(ValueError, match="config differs"):
        ops.recv_tpu_embedding_activations(5, other)
    with pytest.raises(ValueError, match="config is empty"):
        ops.recv_tpu_embedding_activations(5, b"")
    with pytest.raises(ValueError, match="num_outputs is 4, but the config gives 5"):
        ops.recv_tpu_embedding_activations(4, config)
    with pytest.raises(RuntimeError, match="recv first"):
        ops.send_tpu_embedding_gradients([None] * 5, RATES, config)
    good = [torch.ones_like(a) for a in ops.recv_tpu_embedding_activations(5, config)]
    before = ops.system.current().retrieve_parameters()
    for gradients, rates, given, error in [
        (good[:4], RATES, config, ValueError),
        (good, RATES[:1], config, ValueError),
        (good, RATES, other, ValueError),
        ([g.double() for g in good], RATES, config, TypeError),
        ([g[:1] for g in good], RATES, config, ValueError),
    ]:
        with pytest.raises(error):
            ops.send_tpu_embedding_gradients(gradients, rates, given)
    after = ops.system.current().retrieve_parameters()
    assert all(torch.equal(before[t][s], after[t][s]) for t in before for s in before[t])
    ops.send_tpu_embedding_gradients(good, RATES, config)
    with pytest.raises(RuntimeError, match="no training batch waits"):
        ops.send_tpu_embedding_gradients(good, RATES, config)


def test_wrong_enqueues() -> None:
    configured(config_text("adagrad"))
    ids = [torch.arange(12), torch.arange(30) % 7, torch.zeros(6).long()]
    with pytest.raises(tpuemb.InputError, match=r"batch has 2 entries.*3 tables"):
        ops.enqueue_tpu_embedding_integer_batch(ids[:2])
    with pytest.raises(tpuemb.InputError, match="'user': 11 ids for the table's 12 output rows"):
        ops.enqueue_tpu_embedding_integer_batch([ids[0][:11], *ids[1:]])
    with pytest.raises(tpuemb.InputError, match=r"'user'.*indices\[1\] is"):
        ops.enqueue_tpu_embedding_sparse_batch(
            [torch.tensor([1, 0]), *[EMPTY.long()] * 2], [torch.tensor([1, 2]), *[EMPTY.long()] * 2], [EMPTY] * 3
        )
    with pytest.raises(ValueError, match="device_ordinal 3"):
        ops.enqueue_tpu_embedding_integer_batch(ids, device_ordinal=3)
    with pytest.raises(ValueError, match="mode 'Train'"):
        ops.enqueue_tpu_embedding_integer_batch(ids, "Train")
    with pytest.raises(NotImplementedError, match="EnqueueTPUEmbeddingBatch takes opaque"):
        ops.enqueue_tpu_embedding_batch([b""], "train")
    with pytest.raises(tpuemb.InputError, match=r"table_ids\[0\] is 3"):
        ops.enqueue_tpu_embedding_ragged_tensor_batch([torch.arange(7)], [torch.arange(6)], [EMPTY], "train", [3])


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "ftrl", "adam"])
def test_load_and_retrieve(optimizer: str) -> None:
    config = configured(config_text(optimizer, "MOD"))
    name = {"sgd": "stochastic_gradient_descent"}.get(optimizer, optimizer)
    slots = {"sgd": [], "adagrad": ["accumulators"], "ftrl": ["accumulators", "linears"],
             "adam": ["momenta", "velocities"]}[optimizer]  # fmt: skip
    load = getattr(ops, f"load_tpu_embedding_{name}_parameters")
    retrieve = getattr(ops, f"retrieve_tpu_embedding_{name}_parameters")
    values = [torch.randn(8, 8) for _ in range(1 + len(slots))]
    load(*values, num_shards=3, shard_id=1, table_id=0, config=config)
    found = retrieve(3, 1, table_name="user")
    found = [found] if optimizer == "sgd" else list(found)
    assert all(torch.equal(a, b) for a, b in zip(found, values, strict=True))
    if slots:
        assert retrieve(3, 1, table_id=0)._fields == ("parameters", *slots)
    whole = ops.system.current().retrieve_parameters()["user"]
    for slot, value in zip(["parameters", *slots], values, strict=True):
        assert torch.equal(whole[slot][1::3], value)


def test_wrong_load_and_retrieve() -> None:
    config = configured(config_text("adagrad"))
    good = [torch.zeros(23, 8), torch.ones(23, 8)]
    load, retrieve = ops.load_tpu_embedding_adagrad_parameters, ops.retrieve_tpu_embedding_adagrad_parameters
    before = ops.system.current().retrieve_parameters()["user"]
    for arguments, message in [
        ({}, "give either table_id or table_name"),
        ({"table_id": 0, "table_name": "user"}, "give either table_id or table_name"),
        ({"table_id": 3}, "table_id 3: the config has 3 tables"),
        ({"table_name": "nobody"}, "table_name 'nobody'"),
        ({"table_name": "item"}, r"shape \[23, 8\]"),
        ({"table_id": 0, "config": b"x"}, "config differs"),
    ]:
        with pytest.raises(ValueError, match=message):
            load(*good, 1, 0, **arguments)
    with pytest.raises(ValueError, match="shard_id"):
        retrieve(2, 2, table_id=0)
    with pytest.raises(ValueError, match="'user' has the optimizer adagrad, not adam"):
        ops.load_tpu_embedding_adam_parameters(*good, good[0], 1, 0, table_id=0, config=config)
    with pytest.raises(TypeError):
        load(good[0], num_shards=1, shard_id=0, table_id=0)
    after = ops.system.current().retrieve_parameters()["user"]
    assert all(torch.equal(before[slot], after[slot]) for slot in before)
