"""Random configurations and plans, and one training step to compare them by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

import tpuemb_torch as tpuemb
from tests.distributed import cases
from tpuemb_torch.planning import SHARDINGS

BATCH = 4
_OPTIMIZERS = ("sgd", "adagrad", "ftrl", "adam")


@dataclass(frozen=True)
class Drawn:
    """A configuration, and what was asked of the planner."""

    tables: tuple[tuple[int, int, str, bool], ...]  # rows, columns, optimizer, whether gradients are accumulated
    strategy: str
    kinds: tuple[str, ...]

    @property
    def config(self) -> tpuemb.Config:
        return config_of(self.tables, self.strategy)

    @property
    def sharding(self) -> dict[str, str]:
        return {f"t{i}": kind for i, kind in enumerate(self.kinds)}


def config_of(tables: Sequence[tuple[int, int, str, bool]], strategy: str = "DIV_DEFAULT") -> tpuemb.Config:
    """Tables of (rows, columns, optimizer, accumulated), with one feature of `BATCH` samples each."""
    lines = [f"mode: TRAINING num_hosts: 1 num_tensor_cores: 1 sharding_strategy: {strategy}"]
    for i, (rows, columns, optimizer, accumulated) in enumerate(tables):
        status = "" if accumulated else "gradient_accumulation_status: DISABLED"
        lines.append(
            f'table_descriptor {{ name: "t{i}" vocabulary_size: {rows} dimension: {columns} optimization_parameters {{ '
            f"learning_rate {{ constant: 0.1 }} {cases.OPTIMIZERS[optimizer]} {status} }} }}"
        )
        lines.append(f'feature_descriptor {{ name: "f{i}" table_id: {i} input_shape: {BATCH} }}')
    return tpuemb.load_config("\n".join(lines))


@st.composite
def drawn(draw: st.DrawFn) -> Drawn:
    """Tables of few rows, so that shards without rows and of one row occur."""
    sizes = st.tuples(
        st.integers(1, 30),
        st.sampled_from([1, 2, 3, 4, 12]),
        st.sampled_from(_OPTIMIZERS),
        st.sampled_from([True, True, False]),
    )
    tables = tuple(draw(st.lists(sizes, min_size=1, max_size=5)))
    kinds = st.lists(st.sampled_from(["auto", *SHARDINGS]), min_size=len(tables), max_size=len(tables))
    return Drawn(tables, draw(st.sampled_from(["DIV_DEFAULT", "MOD"])), tuple(draw(kinds)))


def one_step(embedding: tpuemb.TPUEmbedding, ranks: Sequence[int]) -> tuple[list[np.ndarray], Any]:
    """A step on the batches of some ranks, one after the other: activations, and parameters afterwards."""
    config = embedding.config
    ids = [
        [_numbers(rank, i).integers(0, f.table.vocabulary_size, BATCH) for rank in ranks] for i, f in _features(config)
    ]
    embedding.enqueue([torch.from_numpy(np.concatenate(own)) for own in ids])
    activations = embedding.recv_activations()
    gradients = [
        torch.from_numpy(
            np.concatenate([_numbers(rank, 100 + i).normal(size=(BATCH, f.table.dimension)) for rank in ranks]).astype(
                np.float32
            )
        )
        for i, f in _features(config)
    ]
    embedding.send_gradients(gradients)
    return [a.numpy().copy() for a in activations], cases.to_numpy(embedding.retrieve_parameters())


def _features(config: tpuemb.Config) -> list[tuple[int, tpuemb.Feature]]:
    return list(enumerate(config.features))


def _numbers(rank: int, index: int) -> np.random.Generator:
    return np.random.default_rng([rank, index])
