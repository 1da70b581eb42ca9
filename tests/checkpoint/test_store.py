"""Checkpoints on one process: what is kept, what is refused, and what a damaged one says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.checkpoint.cases import Model, data_folder
from tests.embedding.test_steps import same, snapshot
from tpuemb_torch.checkpoint import CheckpointError, load, save


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
    assert len(list(tmp_path.iterdir())) == 2


def test_a_flipped_bit_or_a_missing_file_is_named(tmp_path: Path) -> None:
    model = Model(1)
    save(tmp_path, model)
    rng = np.random.default_rng(0)
    other = Model(2)
    before = snapshot(other.embedding)
    for file in [*sorted(data_folder(tmp_path).iterdir()), tmp_path / "latest"]:
        original = file.read_bytes()
        for _ in range(5 if file.suffix == ".distcp" else 40):
            damaged = bytearray(original)
            damaged[rng.integers(len(damaged))] ^= 1 << int(rng.integers(8))
            file.write_bytes(bytes(damaged))
            with pytest.raises(CheckpointError, match=rf"damaged: (file )?{file.name} (is not as|cannot be|names)"):
                load(tmp_path, other)
        for size in (0, len(original) // 2, len(original) - 1):
            file.write_bytes(original[:size])
            with pytest.raises(CheckpointError, match=rf"damaged: (file )?{file.name} "):
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
