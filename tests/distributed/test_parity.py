"""Several ranks give the numbers of one process on the concatenated batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tpuemb_torch as tpuemb
from tests.distributed import cases
from tests.ranks import run_ranks

STEPS = 3
#: Samples of each rank in each step: unequal, and one rank without any.
SIZES = {2: [(6, 4), (0, 5), (3, 3)], 3: [(6, 4, 5), (0, 2, 1), (3, 3, 3)]}


def part_seed(step: int, rank: int, size: int) -> int:
    # The size rides along so that `train` knows how many gradient rows each part has.
    return size * 100 + step * 10 + rank


def sharded_run(rank: int, world: int, optimizer: str, strategy: str, plan: Any, divide: bool) -> Any:
    from torchrec.distributed.comm_ops import get_gradient_division, set_gradient_division

    set_gradient_division(divide)
    cfg = tpuemb.load_config(cases.config_text(optimizer, strategy))
    if plan == "dmp":
        embedding = with_distributed_model_parallel(cfg)
    else:
        embedding = tpuemb.shard(tpuemb.TPUEmbedding(cfg, cases.COMBINERS, seed=3), plan, exchange="pooled")
    sizes = [SIZES[world][t][rank] for t in range(STEPS)]
    batches = [cases.make_batch(sizes[t], part_seed(t, rank, sizes[t])) for t in range(STEPS)]
    seeds = [[part_seed(t, rank, sizes[t])] for t in range(STEPS)]
    activations = cases.train(embedding, batches, seeds)
    assert get_gradient_division() is divide
    shards = {t: len(s.part.rows) for s in embedding.collection.stored() for t in [s.part.table.name]}
    return activations, cases.to_numpy(embedding.retrieve_parameters()), shards


def with_distributed_model_parallel(cfg: tpuemb.Config) -> tpuemb.TPUEmbedding:
    from torchrec.distributed import DistributedModelParallel

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = tpuemb.TPUEmbedding(cfg, cases.COMBINERS, seed=3)
            self.over = nn.Linear(8, 1)

    model = DistributedModelParallel(Model(), device=torch.device("cpu"), sharders=tpuemb.sharders())
    embedding = model.module.embedding
    assert type(embedding.collection).__name__ == "ShardedTPUEmbeddingBagCollection"
    return embedding


def one_process(optimizer: str, strategy: str, world: int) -> Any:
    cfg = tpuemb.load_config(cases.config_text(optimizer, strategy))
    embedding = tpuemb.TPUEmbedding(cfg, cases.COMBINERS, seed=3)
    sizes = SIZES[world]
    seeds = [[part_seed(t, rank, size) for rank, size in enumerate(sizes[t])] for t in range(STEPS)]
    batches = [
        cases.concatenate([cases.make_batch(size, seeds[t][rank]) for rank, size in enumerate(sizes[t])])
        for t in range(STEPS)
    ]
    return cases.train(embedding, batches, seeds), cases.to_numpy(embedding.retrieve_parameters())


def assert_equal_to_one_process(results: Any, expected: Any, world: int) -> None:
    expected_activations, expected_parameters = expected
    for t in range(STEPS):
        for name, whole in expected_activations[t].items():
            parts = np.concatenate([activations[t][name] for activations, _, _ in results])
            np.testing.assert_allclose(parts, whole, rtol=1e-5, atol=1e-6, err_msg=f"{name}, step {t}")
    for _, parameters, _ in results:
        for table, slots in expected_parameters.items():
            for slot, whole in slots.items():
                # Linears are sums of terms that cancel: an ulp of the terms may be more than 1e-6.
                atol = 1e-6 * max(1.0, float(np.abs(whole).max()) if slot == "linears" else 1.0)
                np.testing.assert_allclose(
                    parameters[table][slot], whole, rtol=1e-5, atol=atol, err_msg=f"{table} {slot}"
                )


@pytest.mark.parametrize("optimizer", list(cases.OPTIMIZERS))
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("plan", ["row_wise", "table_wise"])
def test_every_optimizer_equals_one_process(optimizer: str, world: int, plan: str) -> None:
    strategy = "MOD" if world == 3 else "DIV_DEFAULT"
    results = run_ranks(world, sharded_run, optimizer, strategy, plan, True)
    assert_equal_to_one_process(results, one_process(optimizer, strategy, world), world)


@pytest.mark.parametrize("strategy", ["DIV_DEFAULT", "MOD"])
@pytest.mark.parametrize("plan", ["dmp", "auto", {"user": "row_wise", "item": "table_wise", "tiny": "row_wise"}])
@pytest.mark.parametrize("divide", [True, False])
def test_every_way_to_shard_and_gradient_switch(strategy: str, plan: Any, divide: bool) -> None:
    results = run_ranks(2, sharded_run, "adagrad", strategy, plan, divide)
    assert_equal_to_one_process(results, one_process("adagrad", strategy, 2), 2)


def test_column_wise() -> None:
    results = run_ranks(2, sharded_run, "adam", "DIV_DEFAULT", "column_wise", True)
    assert_equal_to_one_process(results, one_process("adam", "DIV_DEFAULT", 2), 2)


def test_row_wise_shards_have_the_sizes_of_hosts() -> None:
    results = run_ranks(3, sharded_run, "sgd", "DIV_DEFAULT", "row_wise", True)
    assert [shards for _, _, shards in results] == [
        {"user": 8, "item": 3, "tiny": 1},
        {"user": 8, "item": 2, "tiny": 1},
        {"user": 7, "item": 2, "tiny": 0},
    ]
