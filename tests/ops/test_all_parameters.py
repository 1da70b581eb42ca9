"""LoadAll and RetrieveAll: which slots they show, what they refuse, and that a refusal writes nothing."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import tpuemb_torch as tpuemb
from tests.config import examples
from tests.ranks import run_ranks
from tpuemb_torch import ops
from tpuemb_torch.ops import system
from tpuemb_torch.optimizers import rules, slots_of

NAMES = ["parameters", *(f"auxiliary{i}" for i in range(1, 8))]
UNUSED = torch.empty(0, 0)

#: Every algorithm with what it needs to be valid.
OPTIMIZERS = {
    **{name: f"{name} {{}}" for name in rules()},
    "adagrad_momentum": "adagrad_momentum { exponent: 2 beta2: 1 }",
    "frequency_estimator": "frequency_estimator { tau: 0.1 max_delta: 9 outlier_threshold: 1 }",
    "user_defined_program": "",
}


@pytest.fixture(autouse=True)
def no_system_left() -> Iterator[None]:
    yield
    system._installed = None


def one_table(algorithm: str, status: str = "UNSPECIFIED", slots: int = 2) -> tpuemb.Config:
    proto = examples.with_program(examples.program(num_slots=slots))
    parameters = proto.table_descriptor[0].optimization_parameters
    if algorithm != "user_defined_program":
        proto = examples.with_optimizer(OPTIMIZERS[algorithm], dimension=1)
        parameters = proto.table_descriptor[0].optimization_parameters
    if algorithm == "frequency_aware_adagrad":
        parameters.learning_rate.constant = 0.1
    parameters.gradient_accumulation_status = (
        type(parameters)
        .DESCRIPTOR.fields_by_name["gradient_accumulation_status"]
        .enum_type.values_by_name[status]
        .number
    )
    return tpuemb.load_config(proto)


@pytest.mark.parametrize("status", ["UNSPECIFIED", "ENABLED", "DISABLED"])
@pytest.mark.parametrize("algorithm", sorted(OPTIMIZERS))
def test_slots_of_every_algorithm(algorithm: str, status: str) -> None:
    config = one_table(algorithm, status)
    ops.configure_tpu_embedding(config)
    slots = len(slots_of(config.tables[0].optimizer))
    accumulates = status != "DISABLED"
    out = ops.retrieve_all_tpu_embedding_parameters(len(config.tables), config, 1, 0)
    assert out._fields == tuple(NAMES)
    shape = (10, config.tables[0].dimension)
    used = 1 + slots + accumulates
    assert [tuple(tensor.shape) for (tensor,) in out] == [shape] * used + [(0, 0)] * (8 - used)
    assert all(tensor.dtype == torch.float32 for (tensor,) in out)
    if accumulates:
        assert (out[used - 1][0].view(torch.int32) == 1).all()
    # What was retrieved can be loaded, and arrives.
    changed = [[tensor + i if i < 1 + slots else tensor] for i, (tensor,) in enumerate(out)]
    ops.load_all_tpu_embedding_parameters(*changed, config, 1, 0)
    again = ops.retrieve_all_tpu_embedding_parameters(len(config.tables), config, 1, 0)
    assert all(torch.equal(a, b) for (a,), (b,) in zip(again, changed, strict=True))


def test_seven_slots_need_accumulation_off() -> None:
    config = one_table("user_defined_program", "DISABLED", slots=7)
    ops.configure_tpu_embedding(config)
    out = ops.retrieve_all_tpu_embedding_parameters(len(config.tables), config, 1, 0)
    assert [tuple(tensor.shape) for (tensor,) in out] == [(10, 8)] * 8


def test_argument_names_and_order() -> None:
    load = inspect.signature(ops.load_all_tpu_embedding_parameters)
    assert list(load.parameters) == [*NAMES, "config", "num_shards", "shard_id"]
    retrieve = inspect.signature(ops.retrieve_all_tpu_embedding_parameters)
    assert list(retrieve.parameters) == ["NumTables", "config", "num_shards", "shard_id"]


TWO_TABLES = """
mode: TRAINING num_hosts: 1 num_tensor_cores: 1 sharding_strategy: MOD
table_descriptor { name: "a" vocabulary_size: 5 dimension: 2 optimization_parameters {
    learning_rate { constant: 0.1 } lion { beta1: 0.9 beta2: 0.99 } } }
table_descriptor { name: "b" vocabulary_size: 3 dimension: 4 optimization_parameters {
    learning_rate { constant: 0.1 } stochastic_gradient_descent {} gradient_accumulation_status: DISABLED } }
feature_descriptor { name: "fa" table_id: 0 input_shape: 4 }
feature_descriptor { name: "fb" table_id: 1 input_shape: 4 }
"""


def numbered(rows: int, dim: int, first: float) -> torch.Tensor:
    return torch.arange(rows).float()[:, None].expand(rows, dim) + first


def test_shards_of_two_tables() -> None:
    """The hidden slot of table a stands in auxiliary2; b has none."""
    config = tpuemb.load_config(TWO_TABLES)
    embedding = ops.configure_tpu_embedding(config)
    whole = {"a": [numbered(5, 2, 0), numbered(5, 2, 100)], "b": [numbered(3, 4, 200)]}
    for shard in range(2):
        sentinel = torch.full_like(whole["a"][0][shard::2], 123.0)  # not used, whatever it holds
        ops.load_all_tpu_embedding_parameters(
            [whole["a"][0][shard::2], whole["b"][0][shard::2]],
            [whole["a"][1][shard::2], UNUSED],
            [sentinel, torch.empty(0)],
            *([[UNUSED, UNUSED]] * 5),
            config=config.serialize(),
            num_shards=2,
            shard_id=shard,
        )
    state = embedding.retrieve_parameters()
    assert torch.equal(state["a"]["parameters"], whole["a"][0]) and torch.equal(state["a"]["momenta"], whole["a"][1])
    assert torch.equal(state["b"]["parameters"], whole["b"][0])
    out = ops.retrieve_all_tpu_embedding_parameters(config=config, num_shards=2, shard_id=1, NumTables=2)
    assert torch.equal(out.parameters[0], whole["a"][0][1::2]) and torch.equal(out.auxiliary1[0], whole["a"][1][1::2])
    assert torch.equal(out.parameters[1], whole["b"][0][1::2])
    assert out.auxiliary2[0].view(torch.int32).unique().tolist() == [1] and out.auxiliary2[0].shape == (2, 2)
    assert out.auxiliary1[1].shape == out.auxiliary2[1].shape == (0, 0)
    # What is retrieved is a copy.
    out.parameters[0].zero_()
    assert torch.equal(embedding.retrieve_parameters()["a"]["parameters"], whole["a"][0])


def good() -> list[list[Any]]:
    """Inputs of LoadAll that fit, other than what the tables hold."""
    return [
        [torch.ones(5, 2), torch.ones(3, 4)],
        [torch.ones(5, 2), UNUSED],
        [torch.ones(5, 2), UNUSED],
        *([UNUSED, UNUSED] for _ in range(5)),
    ]


def put(slot: int, table: int, value: Any) -> Any:
    def change(inputs: list[list[Any]]) -> None:
        inputs[slot][table] = value

    return change


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda x: x[0].pop(), ValueError, "parameters: 1 tensors given, but the config has 2 tables"),
        (lambda x: x[7].append(UNUSED), ValueError, "auxiliary7: 3 tensors given"),
        (lambda x: x.__setitem__(1, UNUSED), ValueError, "auxiliary1: a tensor given, .* a list with one each"),
        (
            put(0, 0, torch.ones(4, 2)),
            ValueError,
            r"parameters, table 'a' \(lion\): .*\[4, 2\], but the shard has \[5, 2\]",
        ),
        (put(0, 1, torch.ones(3)), ValueError, r"parameters, table 'b' .*\[3\], but the shard has \[3, 4\]"),
        (put(1, 0, UNUSED), ValueError, r"auxiliary1, table 'a' .* momenta has shape \[0, 0\]"),
        (put(2, 0, UNUSED), ValueError, r"auxiliary2, table 'a' .* gradient_accumulators has shape \[0, 0\]"),
        (put(2, 0, torch.ones(5, 3)), ValueError, r"auxiliary2, table 'a' .* gradient_accumulators has shape \[5, 3\]"),
        (
            put(1, 1, torch.ones(3, 4)),
            ValueError,
            r"auxiliary1, table 'b' .*no such slot \(it has parameters\).*\[3, 4\]",
        ),
        (put(3, 0, torch.ones(5, 2)), ValueError, "it has parameters, momenta, gradient_accumulators"),
        (put(7, 0, torch.ones(1)), ValueError, "auxiliary7, table 'a'"),
        (put(0, 1, torch.ones(3, 4).double()), TypeError, "table 'b' .* parameters must be float32, got torch.float64"),
        (put(2, 0, torch.ones(5, 2).int()), TypeError, "gradient_accumulators must be float32, got torch.int32"),
    ],
)
def test_wrong_inputs_write_nothing(change: Any, error: type[Exception], message: str) -> None:
    config = tpuemb.load_config(TWO_TABLES)
    embedding = ops.configure_tpu_embedding(config)
    before = embedding.retrieve_parameters()
    inputs = good()
    change(inputs)
    with pytest.raises(error, match=message):
        ops.load_all_tpu_embedding_parameters(*inputs, config, 1, 0)
    after = embedding.retrieve_parameters()
    assert all(torch.equal(before[t][s], after[t][s]) for t in before for s in before[t])
    ops.load_all_tpu_embedding_parameters(*good(), config, 1, 0)
    assert (embedding.retrieve_parameters()["a"]["momenta"] == 1).all()


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ((0, 0), "num_shards must be at least 1"),
        ((2, 2), r"shard_id must be in \[0, 2\)"),
        ((4, 3), "would have no rows"),
    ],
)
def test_shards_that_there_are_not(shards: tuple[int, int], message: str) -> None:
    config = tpuemb.load_config(TWO_TABLES)
    ops.configure_tpu_embedding(config)
    with pytest.raises(ValueError, match=message):
        ops.retrieve_all_tpu_embedding_parameters(2, config, *shards)
    rows = [
        [torch.ones(len(range(s, v, n)), d) for v, d in ((5, 2), (3, 4))] for n, s in [shards if shards[0] else (1, 0)]
    ]
    with pytest.raises(ValueError, match=message):
        ops.load_all_tpu_embedding_parameters(
            rows[0], [rows[0][0], UNUSED], [rows[0][0], UNUSED], *([[UNUSED, UNUSED]] * 5), config, *shards
        )


def test_configs_and_counts_that_do_not_fit() -> None:
    config = tpuemb.load_config(TWO_TABLES)
    with pytest.raises(RuntimeError, match="no TPU embedding"):
        ops.retrieve_all_tpu_embedding_parameters(len(config.tables), config, 1, 0)
    ops.configure_tpu_embedding(config)
    other = tpuemb.load_config(TWO_TABLES.replace("0.99", "0.98"))
    with pytest.raises(ValueError, match="config differs"):
        ops.retrieve_all_tpu_embedding_parameters(2, other, 1, 0)
    with pytest.raises(ValueError, match="config differs"):
        ops.load_all_tpu_embedding_parameters(*good(), b"not a config", 1, 0)
    with pytest.raises(ValueError, match="config is empty"):
        ops.load_all_tpu_embedding_parameters(*good(), b"", 1, 0)
    with pytest.raises(ValueError, match="NumTables is 3, but the config has 2 tables"):
        ops.retrieve_all_tpu_embedding_parameters(3, config, 1, 0)


def on_ranks(rank: int, world: int) -> Any:
    """Each rank loads its host's shard and reads the other's; then one of them is wrong."""
    config = tpuemb.load_config(TWO_TABLES)
    embedding = ops.use(tpuemb.shard(tpuemb.TPUEmbedding(config, device="meta"), "row_wise"))
    rows = [numbered(5, 2, 0)[rank::world], numbered(3, 4, 50)[rank::world]]
    slot = [rows[0] + 100, UNUSED]
    inputs = [rows, slot, [rows[0], UNUSED], *([[UNUSED, UNUSED]] * 5)]
    ops.load_all_tpu_embedding_parameters(*inputs, config, world, rank)
    out = ops.retrieve_all_tpu_embedding_parameters(2, config, world, 1 - rank)
    read = [[tensor.numpy() for tensor in tensors] for tensors in out]
    if rank == 1:
        inputs[1] = [slot[0][:1], UNUSED]
    else:
        inputs[0] = [rows[0] + 7, rows[1]]
    with pytest.raises(ValueError, match="momenta") as caught:
        ops.load_all_tpu_embedding_parameters(*inputs, config, world, rank)
    assert torch.equal(embedding.retrieve_parameters()["a"]["parameters"], numbered(5, 2, 0))
    return read, str(caught.value)


def test_sharded_over_two_ranks() -> None:
    results = run_ranks(2, on_ranks)
    for rank, (read, _) in enumerate(results):
        other = 1 - rank
        np.testing.assert_array_equal(read[0][0], numbered(5, 2, 0)[other::2].numpy())
        np.testing.assert_array_equal(read[1][0], numbered(5, 2, 100)[other::2].numpy())
        np.testing.assert_array_equal(read[0][1], numbered(3, 4, 50)[other::2].numpy())
        assert (read[2][0].view(np.int32) == 1).all()
    assert "rank 1" in results[0][1]
