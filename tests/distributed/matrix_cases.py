"""Tables of every optimizer and combiner, batches for them, and what one process makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import tpuemb_torch as tpuemb
from tests.distributed.cases import concatenate, to_numpy

OPTIMIZERS = {
    "sgd": "stochastic_gradient_descent {}",
    "adagrad": "adagrad {}",
    "adagrad_disabled": "adagrad {} gradient_accumulation_status: DISABLED",
    "bounded_adagrad": "bounded_adagrad { update_accumulator_first: true max_accumulator: 5 max_var_update: 0.5 }",
    "ftrl": "ftrl { lr_power: -0.5 l1: 0.01 l2: 0.02 beta: 0.1 }",
    "ftrl_multiply": "ftrl { lr_power: -0.5 l1: 0.01 l2: 0.02 multiply_linear_by_lr: true }",
    "adam": "adam { beta1: 0.9 beta2: 0.99 epsilon: 0.001 }",
    "adam_non_lazy": "adam { beta1: 0.9 beta2: 0.99 epsilon: 0.001 use_non_lazy_adam: true }",
    "momentum": "momentum { momentum: 0.8 use_nesterov: true }",
    "rms_prop": "rms_prop { rho: 0.9 momentum: 0.5 epsilon: 0.01 }",
    "lion": "lion { beta1: 0.9 beta2: 0.99 }",
}
COMBINERS = ("sum", "mean", "sqrtn")
#: Dynamic rates of each step, by tag.
RATES = [(0.2, 0.1), (0.1, 0.3), (0.05, 0.2)]
STEPS = len(RATES)

Features = dict[str, Any]
Values = dict[str, dict[str, np.ndarray]]


@dataclass(frozen=True)
class TableCase:
    """One table; its name says what it is of."""

    optimizer: str
    combiner: str
    rows: int
    columns: int

    @property
    def name(self) -> str:
        return f"{self.optimizer}-{self.combiner}-{self.rows}x{self.columns}"

    @property
    def apart(self) -> bool:
        """Whether the gradients of each rank are a step of its own."""
        return self.optimizer == "adagrad_disabled"


def config(tables: Sequence[TableCase], strategy: str) -> tpuemb.Config:
    """Every table has a feature of one id a sample, and bags with weights and without."""
    lines = [f"mode: TRAINING num_hosts: 1 num_tensor_cores: 1 sharding_strategy: {strategy}"]
    for number, table in enumerate(tables):
        lines.append(f"""table_descriptor {{
            name: "{table.name}" vocabulary_size: {table.rows} dimension: {table.columns} optimization_parameters {{
            learning_rate {{ dynamic {{ tag: {number % 2} }} }} {OPTIMIZERS[table.optimizer]} }} }}""")
        for kind in ("id", "weighted", "bag"):
            lines.append(f'feature_descriptor {{ name: "{table.name}/{kind}" table_id: {number} input_shape: 6 }}')
    return tpuemb.load_config("\n".join(lines))


def layer(tables: Sequence[TableCase], strategy: str, *, seed: int = 5, **options: Any) -> tpuemb.TPUEmbedding:
    combiners = {table.name: table.combiner for table in tables}
    return tpuemb.TPUEmbedding(config(tables, strategy), combiners, seed=seed, **options)


def exchanges(tables: Sequence[TableCase], plan: Mapping[str, str], exchange: str) -> dict[str, str]:
    """What the ranks of each table exchange: `exchange`, but where the kind of sharding has one alone."""
    found = {}
    for table in tables:
        kind = plan[table.name]
        # Pooling over nodes does not keep the order of the ranks.
        ordered = table.apart and kind == "table_row_wise"
        found[table.name] = "pooled" if kind == "column_wise" else "distinct" if ordered else exchange
    return found


def batch(tables: Sequence[TableCase], size: int, seed: Sequence[int], ids: str | None = None) -> Features:
    """One rank's features of `size` samples.

    Args:
        tables: what to look up.
        size: number of samples.
        seed: of this batch.
        ids: "all" rows of the tables, the "first" row only, or "none"; None: all, single ids as a dense tensor.
    """
    rng = np.random.default_rng(list(seed))

    def bags(rows: int, least: int, most: int, weighted: bool = False) -> tpuemb.Ragged:
        lengths = rng.integers(least, most + 1, size) * (ids != "none")
        splits = torch.tensor([0, *lengths.cumsum()], dtype=torch.int64)
        found = torch.tensor(rng.integers(0, rows, int(lengths.sum())))
        weights = torch.tensor(rng.uniform(0.5, 2.0, found.numel()), dtype=torch.float32) if weighted else None
        return tpuemb.Ragged(splits, found, weights)

    features: Features = {}
    for table in tables:
        rows = 1 if ids == "first" else table.rows
        single = bags(rows, 1, 1)
        features[f"{table.name}/id"] = single.ids if ids is None else single
        features[f"{table.name}/weighted"] = bags(rows, 0, 3, weighted=True)
        features[f"{table.name}/bag"] = bags(rows, 0, 3)
    return features


def gradients(tables: Sequence[TableCase], size: int, seed: Sequence[int]) -> list[torch.Tensor]:
    rng = np.random.default_rng([*seed, 1])
    shapes = [(size, table.columns) for table in tables for _ in range(3)]
    return [torch.tensor(rng.normal(size=shape), dtype=torch.float32) for shape in shapes]


@dataclass(frozen=True)
class Work:
    """What each rank does: `sizes[step][rank]` samples, with the ids that `batch` calls `ids[step][rank]`."""

    tables: tuple[TableCase, ...]
    strategy: str
    sizes: tuple[tuple[int, ...], ...]
    ids: tuple[tuple[str, ...], ...] = ()

    def part(self, step: int, rank: int) -> tuple[Features, list[torch.Tensor]]:
        """One rank's features and gradients in a step."""
        size, ids = self.sizes[step][rank], self.ids[step][rank] if self.ids else None
        seed = (step, rank)
        return batch(self.tables, size, seed, ids), gradients(self.tables, size, seed)

    def parts(self, step: int) -> list[tuple[Features, list[torch.Tensor]]]:
        return [self.part(step, rank) for rank in range(len(self.sizes[step]))]


def one_step(embedding: tpuemb.TPUEmbedding, part: tuple[Features, list[torch.Tensor]], step: int) -> list[np.ndarray]:
    """A step of the protocol; returns the activations."""
    embedding.enqueue(part[0])
    activations = embedding.recv_activations()
    embedding.send_gradients(part[1], RATES[step][: embedding.config.num_learning_rates])
    return [activation.numpy() for activation in activations]


def on_rank(embedding: tpuemb.TPUEmbedding, work: Work, rank: int) -> tuple[list[list[np.ndarray]], Values]:
    """Activations by step and feature, and the tables at the end."""
    seen = [one_step(embedding, work.part(step, rank), step) for step in range(STEPS)]
    return seen, to_numpy(embedding.retrieve_parameters())


def one_process(work: Work) -> tuple[list[list[np.ndarray]], Values]:
    """The same of one process that has the batches of all ranks.

    It takes them as one batch, except for tables whose gradients are not accumulated: there each rank's is a step.
    """
    together, apart = layer(work.tables, work.strategy), layer(work.tables, work.strategy)
    seen = []
    for step in range(STEPS):
        parts = work.parts(step)
        whole = concatenate([features for features, _ in parts])
        apart.enqueue(whole, "inference")
        stepped_apart = [activation.numpy() for activation in apart.recv_activations()]
        joined = [torch.cat(own) for own in zip(*(grads for _, grads in parts), strict=True)]
        stepped_together = one_step(together, (whole, joined), step)
        for part in parts:
            one_step(apart, part, step)
        seen.append(
            [
                (own_apart if work.tables[n // 3].apart else own)
                for n, (own, own_apart) in enumerate(zip(stepped_together, stepped_apart, strict=True))
            ]
        )
    both = [to_numpy(embedding.retrieve_parameters()) for embedding in (together, apart)]
    return seen, {table.name: both[table.apart][table.name] for table in work.tables}


def assert_same(
    by_rank: Sequence[tuple[list[list[np.ndarray]], Values]],
    expected: tuple[list[list[np.ndarray]], Values],
    work: Work,
    what: str,
) -> None:
    """Compares what the ranks have with one process; `what` names the case in a failure."""
    names = [f"{table.name}/{kind}" for table in work.tables for kind in ("id", "weighted", "bag")]
    for step in range(STEPS):
        for number, name in enumerate(names):
            found = np.concatenate([seen[step][number] for seen, _ in by_rank])
            np.testing.assert_allclose(
                found, expected[0][step][number], rtol=1e-5, atol=2e-6, err_msg=f"{what}, {name}, step {step}"
            )
    for rank, (_, parameters) in enumerate(by_rank):
        assert parameters.keys() == expected[1].keys()
        for table, slots in expected[1].items():
            assert parameters[table].keys() == slots.keys()
            for slot, whole in slots.items():
                # Sums of terms that cancel: an ulp of the terms may be more than 1e-5 of the sum.
                atol = 2e-6 * max(1.0, float(np.abs(whole).max()))
                np.testing.assert_allclose(
                    parameters[table][slot], whole, rtol=1e-5, atol=atol, err_msg=f"{what}, {table} {slot}, rank {rank}"
                )
