"""Checkpoints on one process: what is kept, what is refused, and what a damaged one says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tpuemb_torch as tpuemb
from tests.distributed.cases import COMBINERS, config_text
from tests.embedding.test_steps import same, snapshot
from tpuemb_torch.checkpoint import CheckpointError, load, save


class Model(nn.Module):
    def __init__(self, seed: int, optimizer: str = "ftrl") -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = tpuemb.TPUEmbedding(tpuemb.load_config(config_text(optimizer)), COMBINERS, seed=seed)
        self.over = nn.Linear(8, 1)
        self.norm = nn.BatchNorm1d(8)


def data_folder(path: Path) -> Path:
    return path / (path / "latest").read_text()


def test_tables_slots_and_the_dense_part_come_back(tmp_path: Path) -> None:
    model, other = Model(1), Model(2)
    save(tmp_path, model, step=3, extra={"epoch": 2, "state": [torch.ones(2)]})
    assert not same(snapshot(model.embedding), snapshot(other.embedding))
    extra = load(tmp_path, other)
    assert extra["epoch"] == 2
    assert torch.equal(extra["state"][0], torch.ones(2))
    assert same(snapshot(model.embedding), snapshot(other.embedding))
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


def test_a_save_replaces_the_last_one_and_leaves_other_folders_alone(tmp_path: Path) -> None:
    (tmp_path / "step-100").mkdir()
    (tmp_path / "step-100" / "mine.txt").write_text("keep")
    stopped = tmp_path / "step-1-0123abcd"  # what a stopped save leaves
    stopped.mkdir()
    save(tmp_path, Model(1), step=1)
    first = data_folder(tmp_path)
    save(tmp_path, Model(2), step=2)
    assert not first.exists()
    assert not stopped.exists()
    assert (tmp_path / "step-100" / "mine.txt").read_text() == "keep"


@pytest.mark.parametrize("extra", [{"auc": np.float64(0.8)}, {"path": Path("x")}, {"f": lambda: None}])
def test_extra_that_could_not_be_read_back_is_refused_before_anything_is_lost(tmp_path: Path, extra: Any) -> None:
    model = Model(1)
    save(tmp_path, model, extra={"epoch": 1})
    with pytest.raises(CheckpointError, match="extra holds what cannot be read back"):
        save(tmp_path, model, extra=extra)
    assert load(tmp_path, model) == {"epoch": 1}


def test_a_flipped_bit_or_a_missing_file_is_named(tmp_path: Path) -> None:
    model = Model(1)
    save(tmp_path, model)
    rng = np.random.default_rng(0)
    other = Model(2)
    before = snapshot(other.embedding)
    for file in sorted(data_folder(tmp_path).iterdir()):
        original = file.read_bytes()
        for _ in range(20 if file.name == "checkpoint.json" else 5):
            damaged = bytearray(original)
            damaged[rng.integers(len(damaged))] ^= 1 << int(rng.integers(8))
            file.write_bytes(bytes(damaged))
            if file.name == "checkpoint.json":
                # A changed blank changes nothing; anything else is noticed.
                try:
                    load(tmp_path, Model(3))
                except CheckpointError:
                    continue
                assert json.loads(damaged) == json.loads(original)
            else:
                with pytest.raises(CheckpointError, match=f"damaged: file {file.name} is not as it was written"):
                    load(tmp_path, other)
        file.unlink()
        with pytest.raises(CheckpointError, match=rf"{file.name}"):
            load(tmp_path, other)
        file.write_bytes(original)
    assert same(before, snapshot(other.embedding))
    load(tmp_path, other)


def test_another_model_and_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        load(tmp_path, Model(1))
    save(tmp_path, Model(1))
    other = Model(2, "adam")
    before = snapshot(other.embedding)
    with pytest.raises(CheckpointError, match=r"table 'item'.*'ftrl'.*'adam'"):
        load(tmp_path, other)
    assert same(before, snapshot(other.embedding))
    with pytest.raises(CheckpointError, match="Linear contains no TPUEmbedding"):
        save(tmp_path, nn.Linear(2, 2))
