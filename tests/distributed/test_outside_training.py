"""What trains, clips, schedules or replicates a sharded table from outside is warned of or refused, on every rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

import tpuemb_torch as tpuemb
from tests.distributed import torchrec_cases as cases
from tests.ranks import run_ranks

BATCH = {"features": {"viewer": torch.tensor([0, 1, 2]), "seen": torch.tensor([3, 3, 0])}}
#: 14 and 8 rows: shards of the same shape on two ranks, which DistributedDataParallel would take for copies.
EVEN = tpuemb.load_config("""
mode: TRAINING num_hosts: 1 num_tensor_cores: 1 sharding_strategy: MOD
table_descriptor { name: "user" vocabulary_size: 14 dimension: 4 optimization_parameters {
    learning_rate { constant: 0.2 } adagrad {} } }
table_descriptor { name: "item" vocabulary_size: 8 dimension: 4 optimization_parameters {
    learning_rate { constant: 0.2 } adagrad {} } }
feature_descriptor { name: "viewer" table_id: 0 input_shape: 3 }
feature_descriptor { name: "seen" table_id: 1 input_shape: 3 }
""")


class Model(nn.Module):
    def __init__(self, plan: str | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        embedding = tpuemb.TPUEmbedding(EVEN, seed=1)
        self.embedding = embedding if plan is None else tpuemb.shard(embedding, plan)
        self.over = nn.Linear(8, 1)

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.over(torch.cat(list(self.embedding(batch["features"]).values()), dim=1))
        return out.square().sum(), out


def messages(run: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(w.message) for w in caught if "fused optimizer" in str(w.message)]


def warned_of(rank: int, world: int, plan: str) -> dict[str, list[str]]:
    def run(optimizer_of: Callable[[nn.Module], Any], clip: bool = False, schedule: bool = False) -> list[str]:
        model = cases.distributed(cases.Model("collection"), "embedding", plan, "fused")
        model.module.embedding.set_learning_rates([cases.RATE])

        def train() -> None:
            optimizer = optimizer_of(model)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) if schedule else None
            for step in range(2):
                optimizer.zero_grad()
                model(cases.batch(step, [3, 3], [rank]))[0].backward()
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                if scheduler is not None:
                    scheduler.step()

        return messages(train)

    def warmed_up(model: nn.Module) -> WarmupOptimizer:
        stage = WarmupStage(policy=WarmupPolicy.LINEAR, max_iters=2, value=0.1)
        return WarmupOptimizer(cases.optimizer_of(model), [stage], lr=0.5)

    with pytest.raises(RuntimeError, match=r"learning rate [\d.]+ set on a fused optimizer.*set_learning_rates"):
        run(warmed_up)
    return {
        "idiom": run(cases.optimizer_of),
        "optimizer": run(lambda model: torch.optim.Adam(model.parameters())),
        "clip": run(cases.optimizer_of, clip=True),
        "scheduler": run(cases.optimizer_of, schedule=True),
    }


@pytest.mark.parametrize("plan", ["row_wise", "table_wise"])
def test_training_from_outside_is_warned_of_once_a_table_on_every_rank(plan: str) -> None:
    scheduled = set()
    for found in run_ranks(2, warned_of, plan):
        assert found["idiom"] == []
        for what, by in (("optimizer", "the optimizer Adam"), ("clip", "gradient clipping")):
            assert sorted(message.split(" was given")[0] for message in found[what]) == [
                f"table 'item': {by}",
                f"table 'user': {by}",
            ]
        assert all("LearningRates" in message for message in found["scheduler"])
        scheduled |= {message.split(":")[0] for message in found["scheduler"]}
    assert scheduled == {"tables ['user']", "tables ['item']"}


def replicated(rank: int, world: int) -> dict[str, str]:
    found = {}

    def attempt(name: str, run: Callable[[], Any]) -> None:
        try:
            run()
            found[name] = "trains"
        except RuntimeError as error:
            found[name] = str(error)

    def step(model: nn.Module) -> None:
        model(BATCH)[0].backward()

    def frozen() -> None:
        model = Model()
        model.embedding.eval()
        step(DistributedDataParallel(model))

    def pipelined() -> None:
        model = DistributedDataParallel(Model("row_wise"))
        tpuemb.TrainPipeline(model, None).progress(iter([BATCH, BATCH]))

    def ignoring() -> None:
        model = Model("row_wise")
        names = [name for name, _ in model.named_parameters() if name.startswith("embedding.")]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
        trains(model, DistributedDataParallel(model))

    def trains(model: Model, whole: nn.Module) -> None:
        expected = tpuemb.TPUEmbedding(EVEN, seed=1).retrieve_parameters(["user"])["user"]["parameters"]
        assert torch.equal(model.embedding.retrieve_parameters(["user"])["user"]["parameters"], expected)
        for _ in range(3):
            step(whole)
        assert not torch.equal(model.embedding.retrieve_parameters(["user"])["user"]["parameters"], expected)

    def sharded_before() -> None:
        model = Model("row_wise")
        trains(model, DistributedModelParallel(model, plan=ShardingPlan({}), sharders=tpuemb.sharders()))

    attempt("unsharded", lambda: step(DistributedDataParallel(Model())))
    attempt("frozen", frozen)
    attempt("sharded", lambda: step(DistributedDataParallel(Model("row_wise"))))
    attempt("pipelined", pipelined)
    attempt("no sharders", lambda: step(DistributedModelParallel(Model(), plan=ShardingPlan({}))))
    attempt("ignoring", ignoring)
    attempt("sharded before", sharded_before)
    return found


def test_copies_of_tables_are_refused() -> None:
    for found in run_ranks(2, replicated):
        for name in ("unsharded", "no sharders"):
            assert "each trained by its own rank alone" in found[name]
            assert "sharders=tpuemb_torch.sharders()" in found[name]
        for name in ("sharded", "pipelined"):
            assert "overwrites the rows of all ranks" in found[name]
        for name in ("frozen", "ignoring", "sharded before"):
            assert found[name] == "trains"


def alone(rank: int, world: int) -> bool:
    model = DistributedDataParallel(Model())
    model(BATCH)[0].backward()
    return True


def test_one_rank_has_no_copies() -> None:
    assert run_ranks(1, alone) == [True]


def not_replaced(rank: int, world: int) -> Any:
    """FSDP around an unsharded layer, assignment to a sharded one, and what a rank without a table shows of it."""
    mesh = init_device_mesh("cpu", (world,))
    unsharded = Model()
    fully_shard(unsharded, mesh=mesh)
    with pytest.raises(RuntimeError, match=r"as fully_shard \(FSDP\) does"):
        unsharded(BATCH)
    found = []
    for plan in ("row_wise", "table_wise"):
        model = Model(plan)
        state = model.state_dict()
        with pytest.raises(RuntimeError, match=r"load_state_dict\(assign=True\) cannot put"):
            model.load_state_dict(state, assign=True)
        model.load_state_dict(state)
        found.append([(name, p.requires_grad) for name, p in model.embedding.named_parameters()])
    return found


def test_parameters_are_not_put_in_place_of_tables() -> None:
    for found in run_ranks(2, not_replaced):
        for parameters in found:
            assert len(parameters) == 2
            assert not any(requires_grad for _, requires_grad in parameters)
