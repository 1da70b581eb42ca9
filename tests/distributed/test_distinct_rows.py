"""Ranks that exchange distinct rows: the numbers of one process, whatever else the ranks do with them."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import tpuemb_torch as tpuemb
from tests.distributed import cases
from tests.ranks import run_ranks
from tpuemb_torch.sharding.torchrec.distinct import DistinctSharding

SIZES = (3, 5, 0, 2)
STEPS = 3
QUANTIZED = (
    "simulated_quantization { enabled: true num_buckets: 5 clipping_limits { lower { value: -1 } upper { value: 1 } } }"
)


def seed(step: int, rank: int) -> int:
    return 100 * SIZES[rank] + 10 * step + rank


def part(step: int, rank: int) -> dict[str, Any]:
    return cases.make_batch(SIZES[rank], seed(step, rank))


def config_of(optimizer: str, extra: str = "", strategy: str = "DIV_DEFAULT") -> tpuemb.Config:
    text = cases.config_text(optimizer, strategy)
    return tpuemb.load_config(text.replace("optimization_parameters {", f"optimization_parameters {{ {extra}"))


def trained(rank: int, world: int, optimizer: str, extra: str, plan: Any, exchange: Any, kernel: str) -> Any:
    os.environ.update(LOCAL_WORLD_SIZE=str(max(1, world // 2)), LOCAL_RANK=str(rank % max(1, world // 2)))
    embedding = tpuemb.TPUEmbedding(config_of(optimizer, extra), cases.COMBINERS, seed=3, kernel=kernel)
    embedding = tpuemb.shard(embedding, plan, exchange=exchange)
    kinds = [type(sharding) for sharding in embedding.collection._embedding_shardings]
    seen = cases.train(embedding, [part(s, rank) for s in range(STEPS)], [[seed(s, rank)] for s in range(STEPS)])
    distinct = sum(issubclass(kind, DistinctSharding) for kind in kinds)
    return seen, cases.to_numpy(embedding.retrieve_parameters()), (len(kinds), distinct)


def alone(world: int, optimizer: str, extra: str, kernel: str) -> Any:
    embedding = tpuemb.TPUEmbedding(config_of(optimizer, extra), cases.COMBINERS, seed=3, kernel=kernel)
    whole = [cases.concatenate([part(s, rank) for rank in range(world)]) for s in range(STEPS)]
    seeds = [[seed(s, rank) for rank in range(world)] for s in range(STEPS)]
    seen = cases.train(embedding, whole, seeds)
    return seen, cases.to_numpy(embedding.retrieve_parameters())


@pytest.mark.parametrize(
    ("world", "optimizer", "extra", "plan", "exchange", "kernel", "groups"),
    [
        (1, "adagrad", "", "row_wise", "distinct", "eager", (1, 1)),
        (2, "ftrl", "", "row_wise", "distinct", "compiled", (1, 1)),
        (3, "adam_non_lazy", "", "table_wise", "distinct", "eager", (1, 1)),
        (4, "adam", "", "table_row_wise", "distinct", "eager", (1, 1)),
        (3, "adagrad", QUANTIZED, "row_wise", "distinct", "eager", (1, 1)),
        (3, "adagrad", "", "row_wise", {"user": "pooled", "item": "distinct"}, "eager", (2, 1)),
        (
            4,
            "ftrl",
            "",
            {"user": "row_wise", "item": "table_row_wise", "tiny": "table_wise"},
            {"tiny": "pooled"},
            "eager",
            (3, 2),
        ),
    ],
)
def test_same_numbers_as_one_process(
    world: int, optimizer: str, extra: str, plan: Any, exchange: Any, kernel: str, groups: tuple[int, int]
) -> None:
    expected, tables = alone(world, optimizer, extra, "eager")
    results = run_ranks(world, trained, optimizer, extra, plan, exchange, kernel)
    for step in range(STEPS):
        first = 0
        for rank in range(world):
            for name, whole in expected[step].items():
                found = results[rank][0][step][name]
                np.testing.assert_allclose(found, whole[first : first + SIZES[rank]], rtol=1e-5, atol=1e-6)
            first += SIZES[rank]
    for _, found, counts in results:
        assert counts == groups
        for table, slots in tables.items():
            for slot, values in slots.items():
                np.testing.assert_allclose(found[table][slot], values, rtol=1e-5, atol=1e-6, err_msg=f"{table} {slot}")


def plain_config(optimizer: str = "stochastic_gradient_descent {}", dims: tuple[int, int] = (4, 4)) -> tpuemb.Config:
    return tpuemb.load_config(f"""
        mode: TRAINING num_hosts: 1 num_tensor_cores: 1 sharding_strategy: MOD
        table_descriptor {{ name: "a" vocabulary_size: 9 dimension: {dims[0]} optimization_parameters {{
            learning_rate {{ constant: 0.5 }} {optimizer} }} }}
        table_descriptor {{ name: "b" vocabulary_size: 5 dimension: {dims[1]} optimization_parameters {{
            learning_rate {{ constant: 0.25 }} {optimizer} }} }}
        feature_descriptor {{ name: "x" table_id: 0 input_shape: 3 }}
        feature_descriptor {{ name: "y" table_id: 1 input_shape: 3 }}
        feature_descriptor {{ name: "z" table_id: 0 input_shape: 3 }}""")


def ids_of(rank: int) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(rank)
    return {name: torch.from_numpy(rng.integers(0, n, 3)) for name, n in (("x", 9), ("y", 5), ("z", 9))}


def fbgemm_and_eager(rank: int, world: int) -> Any:
    tables = []
    for kernel in ("fbgemm", "eager"):
        embedding = tpuemb.TPUEmbedding(plain_config(), seed=4, kernel=kernel)
        embedding = tpuemb.shard(embedding, "row_wise", exchange="distinct")
        for step in range(3):
            out = embedding(ids_of(10 * step + rank))
            sum((value + 1).square().sum() for value in out.values()).backward()
        tables.append(cases.to_numpy(embedding.retrieve_parameters()))
    return tables


def test_the_fbgemm_kernel_steps_rows_that_ranks_asked_for() -> None:
    for fbgemm, eager in run_ranks(2, fbgemm_and_eager):
        for table, slots in eager.items():
            np.testing.assert_allclose(fbgemm[table]["parameters"], slots["parameters"], rtol=1e-5, atol=1e-6)


def sparse_rows(rank: int, world: int) -> Any:
    """Two rows over three ranks: one has none to step, and FBGEMM's SGD takes no table without rows."""
    text = """mode: TRAINING num_hosts: 1 num_tensor_cores: 1
        table_descriptor { name: "a" vocabulary_size: 2 dimension: 4 optimization_parameters {
            learning_rate { constant: 0.5 } stochastic_gradient_descent {} } }
        feature_descriptor { name: "x" table_id: 0 input_shape: 3 }"""
    found = []
    for kernel in ("fbgemm", "eager"):
        embedding = tpuemb.shard(tpuemb.TPUEmbedding(text, kernel=kernel), "row_wise", exchange="distinct")
        embedding({"x": torch.tensor([0, 1, rank % 2])})["x"].square().sum().backward()
        found.append(embedding.retrieve_parameters()["a"]["parameters"].numpy())
    return found


def test_a_rank_without_rows_steps_none() -> None:
    for fbgemm, eager in run_ranks(3, sparse_rows):
        np.testing.assert_allclose(fbgemm, eager, rtol=1e-5, atol=1e-6)


def with_default_dtypes(rank: int, world: int) -> dict[tuple[str, str], Any]:
    found = {}
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        torch.set_default_dtype(dtype)
        for exchange in ("pooled", "distinct"):
            embedding = tpuemb.TPUEmbedding(
                plain_config("momentum { momentum: 0.9 }"), ["mean", "sum"], seed=4, kernel="compiled"
            )
            # One rank has no table.
            embedding = tpuemb.shard(embedding, {"a": "table_wise", "b": "table_wise"}, exchange=exchange)
            out = embedding({name: ids[:, None] for name, ids in ids_of(rank).items()})
            sum(value.square().sum() for value in out.values()).backward()
            assert {value.dtype for value in out.values()} == {torch.float32}
            found[str(dtype), exchange] = cases.to_numpy(embedding.retrieve_parameters())
    return found


def test_torchs_default_dtype_is_not_that_of_tables() -> None:
    for by_case in run_ranks(3, with_default_dtypes):
        expected = by_case["torch.float32", "pooled"]
        assert len(by_case) == 6
        for case, found in by_case.items():
            for table, slots in expected.items():
                for slot, values in slots.items():
                    np.testing.assert_allclose(found[table][slot], values, rtol=1e-5, atol=1e-6, err_msg=str(case))


def without_rates(rank: int, world: int) -> list[bool]:
    """Table b is on one rank: the other must not wait for the exchange that follows the step of b."""
    config = plain_config().to_proto()
    config.table_descriptor[1].optimization_parameters.learning_rate.dynamic.tag = 0
    embedding = tpuemb.shard(tpuemb.TPUEmbedding(config), {"a": "row_wise", "b": "table_wise"}, exchange="distinct")
    loss = sum(value.sum() for value in embedding(ids_of(rank)).values())
    with pytest.raises(RuntimeError, match="call set_learning_rates"):
        loss.backward()
    embedding.set_learning_rates([0.5])
    before = cases.to_numpy(embedding.retrieve_parameters())
    sum(value.sum() for value in embedding(ids_of(rank)).values()).backward()
    after = cases.to_numpy(embedding.retrieve_parameters())
    return [bool((before[name]["parameters"] != after[name]["parameters"]).any()) for name in ("a", "b")]


def test_rates_that_are_not_set_stop_all_ranks_at_once() -> None:
    assert run_ranks(2, without_rates, timeout=20) == [[True, True]] * 2


def sums_by_hand(rank: int, world: int) -> Any:
    """What is bitwise: a forward sums the same rows in the same order as one process."""
    rng = np.random.default_rng(rank)
    lengths = torch.from_numpy(rng.integers(0, 9, 40))
    splits = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    ids = [torch.from_numpy(rng.integers(0, n, int(splits[-1]))) for n in (9, 5, 9)]
    weights = torch.from_numpy(rng.normal(size=int(splits[-1])).astype(np.float32))
    features = [tpuemb.Ragged(splits, values, weights) for values in ids]
    alone = tpuemb.TPUEmbedding(plain_config(dims=(24, 3)), ["mean", "sqrtn"], seed=4)
    embedding = tpuemb.shard(alone, {"a": "row_wise", "b": "table_wise"}, exchange="distinct")
    with torch.no_grad():
        pairs = [(embedding(features)[name].numpy(), alone(features)[name].numpy()) for name in ("x", "y", "z")]
    dist.barrier()
    return pairs


def test_lookups_are_bitwise_those_of_one_process() -> None:
    for pairs in run_ranks(3, sums_by_hand):
        for found, expected in pairs:
            assert np.abs(expected).max() > 0
            np.testing.assert_array_equal(found, expected)


def untouched_losses(rank: int, world: int) -> Any:
    """In the second step, rank 1 sends gradients of zero: momentum moves its rows all the same."""
    momentum = "momentum { momentum: 0.9 }"
    embedding = tpuemb.shard(tpuemb.TPUEmbedding(plain_config(momentum), seed=4), "row_wise", exchange="distinct")
    for step in range(2):
        embedding.enqueue(ids_of(10 * step + rank))
        activations = embedding.recv_activations()
        embedding.send_gradients([None if rank and step else torch.cos(a) for a in activations])
    return cases.to_numpy(embedding.retrieve_parameters())


def test_rows_without_gradient_take_their_step() -> None:
    alone = tpuemb.TPUEmbedding(plain_config("momentum { momentum: 0.9 }"), seed=4)
    for step in range(2):
        parts = [ids_of(10 * step + rank) for rank in range(2)]
        alone.enqueue({name: torch.cat([part[name] for part in parts]) for name in parts[0]})
        gradients = [torch.cos(a) for a in alone.recv_activations()]
        if step:
            for gradient in gradients:
                gradient[3:] = 0
        alone.send_gradients(gradients)
    expected = cases.to_numpy(alone.retrieve_parameters())
    for found in run_ranks(2, untouched_losses):
        for table, slots in expected.items():
            for slot, values in slots.items():
                np.testing.assert_allclose(found[table][slot], values, rtol=1e-5, atol=1e-6)


def refused(rank: int, world: int) -> list[str]:
    messages = []
    plan = tpuemb.make_plan(plain_config(), 2, exchange="distinct")
    for arguments in (
        {"plan": "column_wise", "exchange": "distinct"},
        {"plan": plan, "exchange": "pooled"},
        {"plan": "row_wise", "exchange": {"c": "pooled"}},
        {"plan": "row_wise", "exchange": "rows"},
    ):
        try:
            tpuemb.shard(tpuemb.TPUEmbedding(plain_config()), **arguments)
        except ValueError as error:
            messages.append(str(error))
    with pytest.raises(TypeError, match="plan must be a kind of sharding"):
        tpuemb.shard(tpuemb.TPUEmbedding(plain_config()), None)
    return messages


def test_what_cannot_be_exchanged_is_refused_by_name() -> None:
    words = ("column_wise exchanges sums of bags", "give it to make_plan", "no table 'c'", "'rows' is not one of")
    for messages in run_ranks(2, refused):
        assert len(messages) == len(words)
        for message, part in zip(messages, words, strict=True):
            assert part in message
