"""Options whose result depends on the ranks, or that the kernel treats apart: the same on several ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import tpuemb_torch as tpuemb
from tests.distributed import cases
from tests.ranks import run_ranks
from tpuemb_torch.optimizers import reference_step

IDS = [[3, 3, 1, 0], [3, 2, 2, 0]]  # by rank


def one_table(extra: str, layout: str = "feature") -> tpuemb.Config:
    features = 'feature_descriptor { name: "f" table_id: 0 input_shape: 4 }' if layout == "feature" else ""
    sizes = "" if layout == "feature" else "batch_size_per_tensor_core: 2"
    return tpuemb.load_config(f"""
        mode: TRAINING num_hosts: 1 num_tensor_cores: 2 sharding_strategy: MOD {sizes}
        table_descriptor {{ name: "f" vocabulary_size: 5 dimension: 3
            {"" if layout == "feature" else "num_features: 2"} optimization_parameters {{
            learning_rate {{ constant: 0.5 }} adagrad {{}} {extra} }} }}
        {features}""")


def gradient(rank: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(rank).normal(size=(4, 3)).astype(np.float32))


def one_step(rank: int, world: int, extra: str, layout: str, plan: str, exchange: str = "auto") -> Any:
    embedding = tpuemb.shard(tpuemb.TPUEmbedding(one_table(extra, layout), seed=1), plan, exchange=exchange)
    before = cases.to_numpy(embedding.retrieve_parameters())["f"]
    embedding.enqueue([torch.tensor(IDS[rank])])
    (activation,) = embedding.recv_activations()
    embedding.send_gradients([gradient(rank)])
    return before, activation.numpy(), cases.to_numpy(embedding.retrieve_parameters())["f"]


@pytest.mark.parametrize("exchange", ["pooled", "distinct"])
@pytest.mark.parametrize("plan", ["row_wise", "table_wise"])
def test_without_accumulation_each_rank_is_a_step_in_rank_order(plan: str, exchange: str) -> None:
    extra = "gradient_accumulation_status: DISABLED gradient_clipping_limits { upper { value: 0.5 } }"
    results = run_ranks(2, one_step, extra, "feature", plan, exchange)
    before, _, _ = results[0]
    optimizer = one_table(extra).tables[0].optimizer
    w, a = before["parameters"].astype(np.float64), before["accumulators"].astype(np.float64)
    for rank, ids in enumerate(IDS):
        grads = gradient(rank).numpy().astype(np.float64)
        for row in sorted(set(ids)):
            folded = grads[[i for i, found in enumerate(ids) if found == row]].sum(0)
            w[row], a[row] = reference_step(optimizer, w[row], folded, 0.5, a[row])
    for _, _, after in results:
        np.testing.assert_allclose(after["parameters"], w, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(after["accumulators"], a, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("exchange", ["pooled", "distinct"])
@pytest.mark.parametrize("plan", ["row_wise", "table_wise"])
def test_gradients_are_clipped_after_the_sum_over_ranks(plan: str, exchange: str) -> None:
    extra = "gradient_clipping_limits { lower { value: -0.5 } upper { value: 0.5 } }"
    results = run_ranks(2, one_step, extra, "feature", plan, exchange)
    before, _, _ = results[0]
    folded = np.zeros((5, 3))
    for rank, ids in enumerate(IDS):
        np.add.at(folded, ids, gradient(rank).numpy())
    optimizer = one_table(extra).tables[0].optimizer
    w, a = reference_step(optimizer, before["parameters"], folded, 0.5, before["accumulators"])
    touched = sorted({row for ids in IDS for row in ids})
    for _, _, after in results:
        np.testing.assert_allclose(after["parameters"][touched], w[touched], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(after["accumulators"][touched], a[touched], rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(after["parameters"][4], before["parameters"][4])


@pytest.mark.parametrize("exchange", ["pooled", "distinct"])
@pytest.mark.parametrize("plan", ["row_wise", "table_wise"])
def test_simulated_quantization(plan: str, exchange: str) -> None:
    extra = """simulated_quantization { enabled: true num_buckets: 5
        clipping_limits { lower { value: -0.4 } upper { value: 0.4 } } }"""
    for rank, (before, activation, _) in enumerate(run_ranks(2, one_step, extra, "feature", plan, exchange)):
        step = np.float32(0.8) / 4
        rows = np.clip(before["parameters"][IDS[rank]], -0.4, 0.4)
        np.testing.assert_allclose(activation, np.floor((rows + 0.4) / step + 0.5) * step - 0.4, rtol=1e-5, atol=1e-6)


def test_table_layout() -> None:
    for rank, (before, activation, _) in enumerate(run_ranks(2, one_step, "", "table", "row_wise")):
        assert activation.shape == (4, 3)
        np.testing.assert_array_equal(activation, before["parameters"][IDS[rank]])
