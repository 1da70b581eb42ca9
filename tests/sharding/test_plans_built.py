"""Every plan that is returned can be built, stores what it says, and gives the numbers of one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import tpuemb_torch as tpuemb
from tests.ranks import run_ranks
from tests.sharding.plan_cases import BATCH, Drawn, config_of, drawn, one_step
from tpuemb_torch.planning import Plan, PlanError, make_plan, save_plan
from tpuemb_torch.sharding import model_plan

FOUR = config_of([(23, 4, "ftrl", True), (9, 12, "adagrad", True), (5, 2, "sgd", True)], "MOD")


def build_all(rank: int, world: int, local: int, plans: list[tuple[tpuemb.Config, Any]]) -> list[Any]:
    os.environ.update(LOCAL_WORLD_SIZE=str(local), LOCAL_RANK=str(rank % local))
    results = []
    for config, plan in plans:
        embedding = tpuemb.shard(tpuemb.TPUEmbedding(config, seed=1), plan)
        stored = [
            (s.part.table.name, {k: t.numel() * 4 for k, t in s.tensors.items()}) for s in embedding.collection.stored()
        ]
        results.append((*one_step(embedding, [rank]), stored))
    return results


def check(config: tpuemb.Config, plan: Plan, by_rank: list[Any], steps_per_rank: bool) -> None:
    """Compares with one process, and what is stored with the plan's arithmetic."""
    for usage, (_, _, stored) in zip(plan.usage, by_rank, strict=True):
        weights = sum(sizes["parameters"] for _, sizes in stored)
        assert weights == usage.weight_bytes
        assert sum(sum(sizes.values()) for _, sizes in stored) - weights == usage.slot_bytes
        assert len([name for name, sizes in stored if sizes["parameters"]]) == usage.tables
    alone = tpuemb.TPUEmbedding(config, seed=1)
    expected, parameters = one_step(alone, range(plan.world_size))
    for rank, (activations, _, _) in enumerate(by_rank):
        for found, whole in zip(activations, expected, strict=True):
            np.testing.assert_allclose(found, whole[rank * BATCH : (rank + 1) * BATCH], rtol=1e-5, atol=1e-6)
    if steps_per_rank:
        return  # each rank's contribution is a step of its own, so one process has other numbers
    for _, found, _ in by_rank:
        for table, slots in parameters.items():
            for slot, values in slots.items():
                np.testing.assert_allclose(found[table][slot], values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("world", "local"), [(1, 1), (2, 2), (3, 3), (2, 1)])
@given(cases=st.lists(drawn(), min_size=4, max_size=6))
@settings(
    max_examples=2,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],  # each try starts processes: too slow to shrink
    suppress_health_check=list(HealthCheck),
)
def test_random_plans(world: int, local: int, cases: list[Drawn]) -> None:
    planned: list[tuple[Drawn, Plan]] = []
    for case in cases:
        for sharding in (case.sharding, "auto"):
            try:
                planned.append((case, make_plan(case.config, world, local, sharding)))
            except PlanError as error:
                assert "table 't" in str(error)
    results = run_ranks(world, build_all, local, [(case.config, plan) for case, plan in planned])
    for number, (case, plan) in enumerate(planned):
        steps = world > 1 and not all(accumulated for *_, accumulated in case.tables)
        check(case.config, plan, [own[number] for own in results], steps)


def test_two_nodes_of_two(tmp_path: Path) -> None:
    kinds = {"t0": "table_row_wise", "t1": "column_wise", "t2": "table_wise"}
    plan = make_plan(FOUR, 4, 2, kinds)
    save_plan(plan, tmp_path / "plan.yaml")
    results = run_ranks(
        4, build_all, 2, [(FOUR, plan), (FOUR, tmp_path / "plan.yaml"), (FOUR, str(tmp_path / "plan.yaml"))]
    )
    for number in range(3):
        check(FOUR, plan, [own[number] for own in results], False)


def shard_wrongly(rank: int, world: int, folder: str) -> list[str]:
    messages = []
    other = config_of([(24, 4, "ftrl", True), (9, 12, "adagrad", True), (5, 2, "sgd", True)], "MOD")
    on_nodes = make_plan(FOUR, 2, 1)
    by_node = make_plan(FOUR, 2, 2, "table_row_wise")
    for plan, local in [
        (make_plan(FOUR, 3), 2),
        (make_plan(other, 2), 2),
        (by_node, 1),
        (f"{folder}/of_rank_{0}.yaml" if rank else f"{folder}/none.yaml", 2),
        ("rowwise", 2),
        ({"t0": "row_wise"}, 2),
    ]:
        os.environ["LOCAL_WORLD_SIZE"] = str(local)
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            tpuemb.shard(tpuemb.TPUEmbedding(FOUR), plan)
        messages.append(str(caught.value))
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    tpuemb.shard(tpuemb.TPUEmbedding(FOUR), on_nodes)  # nodes matter to table_row_wise alone
    return messages


def test_plans_for_something_else_are_refused_on_every_rank(tmp_path: Path) -> None:
    save_plan(make_plan(FOUR, 2), tmp_path / "of_rank_0.yaml")
    results = run_ranks(2, shard_wrongly, str(tmp_path))
    expected = [
        "the plan is for 3 ranks, the process group has 2",
        "tables.t0: vocabulary_size is 24 in the plan, 23 in the configuration: plan it anew",
        "the plan is for 2 ranks on each node, this one has 1",
        "none.yaml: no such file",
        "'rowwise' is not one of auto, row_wise, table_wise, column_wise, table_row_wise",
        "names tables ['t0'], the config has ['t0', 't1', 't2']",
    ]
    for messages in results:
        for message, words in zip(messages, expected, strict=True):
            assert words in message


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"embedding": tpuemb.TPUEmbedding(FOUR, seed=1)})
        self.over = nn.Linear(4, 1)


def in_a_model(rank: int, world: int, plan: Plan) -> Any:
    from torchrec.distributed import DistributedModelParallel

    model = Model()
    device = torch.device("cpu")
    sharded = DistributedModelParallel(model, device=device, plan=model_plan(model, plan), sharders=tpuemb.sharders())
    embedding = sharded.module.inner["embedding"]
    stored = [
        (s.part.table.name, {k: t.numel() * 4 for k, t in s.tensors.items()}) for s in embedding.collection.stored()
    ]
    return (*one_step(embedding, [rank]), stored)


def test_distributed_model_parallel_takes_the_plan() -> None:
    plan = make_plan(FOUR, 2, sharding={"t0": "row_wise", "t1": "column_wise", "t2": "table_wise"})
    check(FOUR, plan, run_ranks(2, in_a_model, plan), False)
    with pytest.raises(ValueError, match="Linear contains no TPUEmbedding"):
        model_plan(nn.Linear(1, 1), plan)


def with_little_memory(rank: int, world: int) -> list[str]:
    from tpuemb_torch.sharding import plans

    messages = []
    # One rank alone has little, as on a smaller machine: all plan for it.
    plans._own_memory = lambda device, world: 1000 if rank == 1 else 2**40
    for plan in ("auto", {"t0": "auto", "t1": "row_wise", "t2": "row_wise"}):
        with pytest.raises(PlanError) as caught:
            tpuemb.shard(tpuemb.TPUEmbedding(FOUR), plan)
        messages.append(str(caught.value))
    tpuemb.shard(tpuemb.TPUEmbedding(FOUR), "row_wise")  # what is asked for by name is tried
    return messages


def test_auto_keeps_to_the_smallest_memory_of_all_ranks() -> None:
    first, second = run_ranks(2, with_little_memory)
    assert first == second
    assert all("available are 1,000 bytes" in message for message in first)
