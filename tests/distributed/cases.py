"""Configs and batches for the multi-process tests, and one training loop for one or several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

import tpuemb_torch as tpuemb

OPTIMIZERS = {
    "sgd": "stochastic_gradient_descent {}",
    "adagrad": "adagrad {}",
    "ftrl": "ftrl { lr_power: -0.5 l1: 0.01 l2: 0.02 beta: 0.1 }",
    "ftrl_multiply": "ftrl { lr_power: -0.5 l1: 0.01 l2: 0.02 multiply_linear_by_lr: true }",
    "adam": "adam { beta1: 0.9 beta2: 0.99 epsilon: 0.001 use_sum_inside_sqrt: true }",
    "adam_non_lazy": "adam { beta1: 0.9 beta2: 0.99 epsilon: 0.001 use_non_lazy_adam: true }",
}


def config_text(optimizer: str, strategy: str = "DIV_DEFAULT", batch: int = 6) -> str:
    """Three tables (one shared, one small), bags, a sequence and an N-D feature; a dynamic and a constant rate."""
    common = """
        gradient_clipping_limits { lower { value: -0.9 } upper { value: 0.8 } }
        clipping_limits { upper { value: 1.5 } }
        weight_decay_factor: 0.01
    """
    return f"""
    mode: TRAINING num_hosts: 1 num_tensor_cores: 1 sharding_strategy: {strategy}
    table_descriptor {{ name: "user" vocabulary_size: 23 dimension: 8 optimization_parameters {{
        learning_rate {{ dynamic {{ tag: 0 }} }} {OPTIMIZERS[optimizer]} {common} }} }}
    table_descriptor {{ name: "item" vocabulary_size: 7 dimension: 4 optimization_parameters {{
        learning_rate {{ constant: 0.1 }} {OPTIMIZERS[optimizer]} }} }}
    table_descriptor {{ name: "tiny" vocabulary_size: 2 dimension: 4 optimization_parameters {{
        learning_rate {{ dynamic {{ tag: 1 }} }} {OPTIMIZERS[optimizer]} {common}
        multiply_weight_decay_factor_by_learning_rate: true }} }}
    feature_descriptor {{ name: "viewer" table_id: 0 input_shape: {batch} }}
    feature_descriptor {{ name: "friends" table_id: 0 input_shape: {batch} }}
    feature_descriptor {{ name: "history" table_id: 1 input_shape: {batch} input_shape: 3 }}
    feature_descriptor {{ name: "grid" table_id: 1 input_shape: {batch} input_shape: 2 }}
    feature_descriptor {{ name: "flag" table_id: 2 input_shape: {batch} }}
    """


COMBINERS = {"user": "mean", "item": "sqrtn", "tiny": "sum"}
RATES = [(0.2, 0.3), (0.1, 0.0), (0.05, 0.2)]


def make_batch(size: int, seed: int) -> dict[str, Any]:
    """Features of `size` samples; every feature has some empty samples."""
    rng = np.random.default_rng(seed)

    def ragged(rows: int, vocabulary: int, longest: int, weighted: bool) -> tpuemb.Ragged:
        lengths = rng.integers(0, longest + 1, rows)
        count = int(lengths.sum())
        splits = torch.tensor(np.concatenate([[0], lengths.cumsum()]), dtype=torch.int64)
        ids = torch.tensor(rng.integers(0, vocabulary, count), dtype=torch.int64)
        weights = torch.tensor(rng.normal(size=count), dtype=torch.float32) if weighted else None
        return tpuemb.Ragged(splits, ids, weights)

    return {
        "viewer": torch.tensor(rng.integers(0, 23, size)),
        "friends": ragged(size, 23, 5, weighted=True),
        "history": ragged(size, 7, 5, weighted=False),
        "grid": torch.tensor(rng.integers(0, 7, (size, 2, 2))),
        "flag": ragged(size, 2, 2, weighted=False),
    }


def concatenate(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The global batch of several ranks' batches."""

    def join(values: Sequence[Any]) -> Any:
        if isinstance(values[0], torch.Tensor):
            return torch.cat(list(values))
        lengths = torch.cat([v.row_splits.diff() for v in values])
        weights = None if values[0].weights is None else torch.cat([v.weights for v in values])
        splits = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        return tpuemb.Ragged(splits, torch.cat([v.ids for v in values]), weights)

    return {name: join([part[name] for part in parts]) for name in parts[0]}


def gradient(name: str, shape: Sequence[int], seed: int) -> torch.Tensor:
    """A gradient for one activation, the same rows for the same seed."""
    rng = np.random.default_rng([seed, *name.encode()])
    return torch.tensor(rng.normal(size=tuple(shape)), dtype=torch.float32)


def train(
    embedding: tpuemb.TPUEmbedding, batches: Sequence[dict[str, Any]], seeds: Sequence[Sequence[int]]
) -> list[dict[str, np.ndarray]]:
    """Steps an embedding; `seeds[t]` are the gradient seeds of the parts of batch t. Returns the activations."""
    seen = []
    for batch, part_seeds, rates in zip(batches, seeds, RATES, strict=True):
        embedding.enqueue(batch)
        activations = embedding.recv_activations()
        names = [feature.name for feature in embedding.config.features]
        seen.append({n: a.numpy() for n, a in zip(names, activations, strict=True)})
        sizes = [s // 100 for s in part_seeds]
        grads = []
        for name, activation in zip(names, activations, strict=True):
            parts = [
                gradient(name, (size, *activation.shape[1:]), seed)
                for size, seed in zip(sizes, part_seeds, strict=True)
            ]
            grads.append(torch.cat(parts))
        embedding.send_gradients(grads, rates)
    return seen


def to_numpy(parameters: dict[str, dict[str, torch.Tensor]]) -> dict[str, dict[str, np.ndarray]]:
    return {table: {slot: t.numpy() for slot, t in slots.items()} for table, slots in parameters.items()}
