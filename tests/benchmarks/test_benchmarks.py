"""The benchmarks measure what they say, on workloads small enough for a test."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from tpuemb_torch.benchmarks.config import bench_config
from tpuemb_torch.benchmarks.growth import bench_growth, plot_growth
from tpuemb_torch.benchmarks.implementations import IMPLEMENTATIONS, OPTIMIZERS, Batch, EmbeddingBags, Fbgemm, Ours
from tpuemb_torch.benchmarks.measure import distinct_rows, error_of_first_step, peak_memory, random_gradient
from tpuemb_torch.benchmarks.step import bench_step
from tpuemb_torch.benchmarks.workloads import WORKLOADS, Workload, draw_ids
from tpuemb_torch.cli import app

SMALL = Workload("small", (50, 70), 8, 6, (3, 2), 1.2)


def batch_of(workload: Workload) -> Batch:
    ids, offsets = workload.draw(seed=0)
    return Batch(workload, ids, offsets, random_gradient(workload.bags, workload.dim * len(workload.rows)))


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
@pytest.mark.parametrize("build", [Ours, Fbgemm, EmbeddingBags])
def test_all_implementations_do_the_same_work(build: type, optimizer: str) -> None:
    if build is Fbgemm and optimizer == "adam":
        pytest.skip("FBGEMM has no Adam on the CPU")
    implementation = build(SMALL, OPTIMIZERS[optimizer], "eager", "cpu")
    batch = batch_of(SMALL)
    implementation.load(batch)
    before = implementation.weights(1).clone()
    assert error_of_first_step(implementation, batch, OPTIMIZERS[optimizer]) < 1e-4
    changed = (implementation.weights(1) != before).any(dim=1).nonzero().flatten()
    assert torch.equal(changed, torch.unique(batch.per_feature()[1][0]))


def test_a_wrong_step_shows_in_the_error() -> None:
    ours, batch = Ours(SMALL, OPTIMIZERS["adagrad"], "eager", "cpu"), batch_of(SMALL)
    ours.load(batch)
    assert error_of_first_step(ours, batch, OPTIMIZERS["sgd"]) > 1e-3


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_can_be_measured(optimizer: str) -> None:
    config = SMALL.config(OPTIMIZERS[optimizer])
    assert config.tables[0].optimizer.algorithm in OPTIMIZERS[optimizer]


def test_workloads() -> None:
    zipf = WORKLOADS["zipf"]
    assert (len(zipf.rows), zipf.ids) == (8, 327_680)
    assert 50_000 < distinct_rows(batch_of(Workload("", zipf.rows, 1, zipf.batch, zipf.hots, 1.2))) < 80_000
    assert len(WORKLOADS["dlrm"].rows) == len(WORKLOADS["dlrm"].hots) == 26
    assert max(WORKLOADS["dlrm"].rows) == 1_000_000
    assert (len(WORKLOADS["tiny"].rows), WORKLOADS["large"].rows) == (1_000, (20_000_000,))
    rng = np.random.default_rng(0)
    for exponent in (None, 1.2):
        ids = draw_ids(rng, 1000, 30, exponent)
        assert len(ids) == 1000 and ids.min() >= 0 and ids.max() < 30 and len(np.unique(ids)) > 20


def test_peak_memory_counts_what_is_held_at_once() -> None:
    ours, batch = Ours(SMALL, OPTIMIZERS["sgd"], "eager", "cpu"), batch_of(SMALL)
    ours.load(batch)
    ours.forward()
    ours.backward()
    peak = peak_memory(ours)
    assert peak is not None and 4 * SMALL.batch * 16 <= peak < 100_000


def test_one_row_for_each_implementation() -> None:
    names = ["eager", "fbgemm", "embedding-bag", "by-name"]
    result = bench_step(["zipf"], ["adagrad"], names, repeats=2, scale=0.001)
    assert [row["implementation"] for row in result["rows"]] == [IMPLEMENTATIONS[name].label for name in names]
    for row in result["rows"]:
        assert row["step_ms"] > row["forward_ms"] > 0 and row["max_error"] < 1e-5 and row["distinct_rows"] > 0
    json.dumps(result, allow_nan=False)


def test_command(tmp_path: Path) -> None:
    arguments = "bench tiny --scale 0.01 --repeats 1 --optimizers sgd --implementations eager --out".split()
    done = CliRunner().invoke(app, [*arguments, str(tmp_path / "out.json")])
    assert done.exit_code == 0, done.output
    assert "ours, eager" in done.output
    assert json.loads((tmp_path / "out.json").read_text())["ok"]
    for wrong in (["bench", "big"], ["bench", "--optimizers", "sdg"], ["bench", "--implementations", "jax"]):
        refused = CliRunner().invoke(app, wrong)
        assert refused.exit_code == 2 and "is not one of" in refused.output


def test_growth(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = bench_growth("sgd", repeats=1, factor=0.002)
    assert {row["quantity"] for row in result["rows"]} == {
        "ids", "distinct rows", "rows of the table", "tables", "dimension",
    }  # fmt: skip
    plot_growth(result, tmp_path / "growth.png")
    assert (tmp_path / "growth.png").stat().st_size > 1000


def test_config() -> None:
    result = bench_config([3], [2, 4], repeats=1)
    assert [(row["tables"], row["ranks"]) for row in result["rows"]] == [(3, 2), (3, 4)]
    assert all(row["load_s"] > 0 and row["plan_s"] > 0 for row in result["rows"])
