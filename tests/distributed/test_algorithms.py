"""Every algorithm on several ranks: one config with a table for each gives what one process and float64 loops give."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import tpuemb_torch as tpuemb
from tests.optimizers.cases import CASES, Case, state
from tests.ranks import run_ranks
from tpuemb_torch.config import Table
from tpuemb_torch.optimizers import create_rule, reference_step
from tpuemb_torch.protos import tpu_embedding_configuration_pb2 as configuration_pb2

ROWS, DIM = 11, 4
#: Samples of each rank in each step: unequal, and one rank without any.
SIZES = [(6, 4), (0, 5), (3, 3)]
#: Dynamic inputs by tag in each step: step counters, a rate, and the global step of the frequency estimator.
RATES = [(30.0, 0.2, 20.0), (31.0, 0.1, 21.0), (32.0, 0.05, 22.0)]
STEP_COUNTER, RATE, GLOBAL_STEP = 0, 1, 2
#: These also run with gradient accumulation off: a step for each rank, in the order of the ranks.
DISABLED = ("adagrad", "momentum", "ftrl-all", "user_defined_program-momentum")

State = dict[str, dict[str, np.ndarray]]


@cache
def tables() -> dict[str, Case]:
    """Cases by table name."""
    accumulated = {case.id: case for case in CASES}
    return accumulated | {f"{name}-disabled": accumulated[name] for name in DISABLED}


@cache
def config() -> tpuemb.Config:
    """A table with two features for every case; rates are constant or dynamic by turns, some tables clip and decay."""
    proto = configuration_pb2.TPUEmbeddingConfiguration(mode="TRAINING", num_hosts=1, num_tensor_cores=1)
    for index, (name, case) in enumerate(tables().items()):
        table = proto.table_descriptor.add(name=name, vocabulary_size=ROWS, dimension=DIM)
        parameters = table.optimization_parameters
        message = getattr(parameters, case.algorithm)
        message.SetInParent()
        for field, value in case.hyperparameters.items():
            setattr(message, field, value)
        if case.program is not None:
            message.program.ParseFromString(case.program)
        if case.algorithm == "frequency_aware_adagrad":
            message.step_counter.tag = STEP_COUNTER
        if case.algorithm == "frequency_estimator":
            parameters.learning_rate.dynamic.tag = GLOBAL_STEP
        elif index % 2 or case.program is not None:
            parameters.learning_rate.dynamic.tag = RATE
        else:
            parameters.learning_rate.constant = 0.1
        if name.endswith("-disabled"):
            parameters.gradient_accumulation_status = 2
        elif index % 3 == 0 and case.algorithm != "mdl_adagrad_light":
            parameters.weight_decay_factor = 0.01
            parameters.gradient_clipping_limits.lower.value = -0.9
            parameters.clipping_limits.upper.value = 0.75
        for feature in ("ids", "bags"):
            proto.feature_descriptor.add(name=f"{name}/{feature}", table_id=index, input_shape=[6])
    return tpuemb.load_config(proto)


def start() -> State:
    """Weights and slots to load, by table."""
    loaded: State = {}
    for index, (name, case) in enumerate(tables().items()):
        w, _, slots = state(case, np.random.default_rng(index), (ROWS, DIM))
        loaded[name] = {"parameters": w, **dict(zip(case.slot_names, slots, strict=True))}
    return loaded


@cache
def part(step: int, rank: int) -> dict[str, Any]:
    """One rank's batch of one step: an id a sample, and weighted bags; ids occur more than once."""
    rng = np.random.default_rng([step, rank])
    size = SIZES[step][rank]
    batch: dict[str, Any] = {}
    for name in tables():
        lengths = rng.integers(0, 4, size)
        count = int(lengths.sum())
        batch[f"{name}/ids"] = torch.tensor(rng.integers(0, ROWS - 2, size))  # the last rows see no lookup
        batch[f"{name}/bags"] = tpuemb.Ragged(
            torch.tensor([0, *lengths.cumsum()], dtype=torch.int64),
            torch.tensor(rng.integers(0, ROWS - 2, count), dtype=torch.int64),
            torch.tensor(rng.uniform(0.5, 2.0, count), dtype=torch.float32),
        )
    return batch


@cache
def gradients(step: int, rank: int) -> list[torch.Tensor]:
    rng = np.random.default_rng([step, rank, 1])
    shape = (2 * len(tables()), SIZES[step][rank], DIM)
    return list(torch.tensor(rng.normal(size=shape), dtype=torch.float32))


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The batch of all ranks."""

    def join(values: list[Any]) -> Any:
        if isinstance(values[0], torch.Tensor):
            return torch.cat(values)
        lengths = torch.cat([v.row_splits.diff() for v in values])
        splits = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        return tpuemb.Ragged(splits, torch.cat([v.ids for v in values]), torch.cat([v.weights for v in values]))

    return {name: join([p[name] for p in parts]) for name in parts[0]}


def train(embedding: tpuemb.TPUEmbedding, batches: list[dict[str, Any]], sent: list[list[torch.Tensor]]) -> State:
    embedding.load_parameters(start())
    for batch, grads, rates in zip(batches, sent, RATES, strict=True):
        embedding.enqueue(batch)
        embedding.recv_activations()
        embedding.send_gradients(grads, rates)
    parameters = embedding.retrieve_parameters()
    return {table: {slot: t.numpy() for slot, t in slots.items()} for table, slots in parameters.items()}


def on_ranks(rank: int, world: int, plan: str, exchange: str) -> State:
    embedding = tpuemb.TPUEmbedding(config(), device="meta", experimental={"mdl_adagrad_light"})
    steps = range(len(SIZES))
    sharded = tpuemb.shard(embedding, plan, exchange=exchange)
    return train(sharded, [part(t, rank) for t in steps], [gradients(t, rank) for t in steps])


def one_process() -> State:
    embedding = tpuemb.TPUEmbedding(config(), experimental={"mdl_adagrad_light"})
    batches = [joined([part(t, rank) for rank in range(2)]) for t in range(len(SIZES))]
    both = [[gradients(t, rank) for rank in range(2)] for t in range(len(SIZES))]
    return train(embedding, batches, [[torch.cat(pair) for pair in zip(*grads, strict=True)] for grads in both])


def folded(table: Table, step: int, ranks: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Rows of a table that occur in a step on these ranks, and the sums of their gradients, in float64."""
    total, seen = np.zeros((ROWS, DIM)), np.zeros(ROWS, dtype=bool)
    index = 2 * list(tables()).index(table.name)
    for rank in ranks:
        batch, grads = part(step, rank), gradients(step, rank)
        for sample, row in enumerate(batch[f"{table.name}/ids"].tolist()):
            total[row] += grads[index][sample].double().numpy()
            seen[row] = True
        bags = batch[f"{table.name}/bags"]
        for sample in range(SIZES[step][rank]):
            for position in range(bags.row_splits[sample], bags.row_splits[sample + 1]):
                row = bags.ids[position]
                total[row] += float(bags.weights[position]) * grads[index + 1][sample].double().numpy()
                seen[row] = True
    rows = np.arange(ROWS) if create_rule(table.optimizer).sweeps_all_rows else np.flatnonzero(seen)
    return rows, total[rows]


def float64() -> State:
    """Plain loops over the float64 references."""
    expected: State = {}
    for table in config().tables:
        values = {slot: x.astype(np.float64) for slot, x in start()[table.name].items()}
        rate = table.optimizer.learning_rate
        for step, inputs in enumerate(RATES):
            lr = np.float64(np.float32(inputs[rate.tag] if rate.tag is not None else rate.constant))
            for ranks in [[0], [1]] if table.optimizer.accumulation == "disabled" else [[0, 1]]:
                rows, g = folded(table, step, ranks)
                w, *slots = (x[rows] for x in values.values())
                new = reference_step(table.optimizer, w, g, lr, *slots, step=inputs[STEP_COUNTER])
                for x, value in zip(values.values(), new, strict=True):
                    x[rows] = value
        expected[table.name] = values
    return expected


def assert_close(actual: State, expected: State, rtol: float, atol: float, skip: str = "none") -> None:
    assert actual.keys() == expected.keys()
    for table, slots in expected.items():
        if table.endswith(skip):
            continue
        for slot, values in slots.items():
            np.testing.assert_allclose(actual[table][slot], values, rtol=rtol, atol=atol, err_msg=f"{table} {slot}")


@pytest.mark.parametrize(
    ("plan", "exchange"), [("row_wise", "pooled"), ("row_wise", "distinct"), ("table_wise", "pooled")]
)
def test_every_algorithm_equals_one_process_and_float64(plan: str, exchange: str) -> None:
    single, double = one_process(), float64()
    assert_close(single, double, rtol=1e-4, atol=1e-5, skip="-disabled")  # there the ranks are steps of their own
    for result in run_ranks(2, on_ranks, plan, exchange):
        assert_close(result, single, rtol=1e-5, atol=1e-6, skip="-disabled")
        assert_close(result, double, rtol=1e-4, atol=1e-5)


def test_the_oracle_tells_one_step_per_rank_from_one_step() -> None:
    double = float64()
    for name in DISABLED:
        assert np.abs(double[name]["parameters"] - double[f"{name}-disabled"]["parameters"]).max() > 1e-3
    sweeping = [case.id for case in CASES if case.rule.sweeps_all_rows]
    begin = start()
    for name, slots in double.items():
        untouched = np.array_equal(slots["parameters"][-2:], begin[name]["parameters"][-2:])
        assert untouched != (name in sweeping)
