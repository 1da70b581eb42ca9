"""Checkpoints that TensorFlow wrote: what is read is what a user of TensorFlow sees, and survives the way back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.checkpoint.tensorflow.examples import GOLDEN, assert_same, config_of, golden_prefix, golden_values
from tpuemb_torch.checkpoint import read_tensorflow, write_tensorflow
from tpuemb_torch.optimizers import rules

#: Algorithm by its slots; tables without have SGD.
ALGORITHMS = {
    frozenset({"accumulators"}): "adagrad",
    frozenset({"accumulators", "momenta"}): "adagrad_momentum",
    frozenset({"momenta", "velocities"}): "adam",
    frozenset({"accumulators", "linears"}): "ftrl",
    frozenset({"v", "m"}): "proximal_yogi",
    frozenset({"ms", "mom"}): "rms_prop",
    frozenset(): "stochastic_gradient_descent",
}


@pytest.mark.parametrize("name", GOLDEN)
def test_read_without_a_config(name: str) -> None:
    assert_same(read_tensorflow(golden_prefix(name)), golden_values(name))


@pytest.mark.parametrize("name", GOLDEN)
def test_read_with_a_config(name: str) -> None:
    expected = golden_values(name)
    slots = frozenset(next(iter(expected.values()))) - {"parameters"}
    shapes = {table: tuple(found["parameters"].shape) for table, found in expected.items()}
    config = config_of(dict(reversed(shapes.items())), ALGORITHMS[slots])  # type: ignore[arg-type]
    got = read_tensorflow(golden_prefix(name), config)
    assert list(got) == [table.name for table in config.tables]
    assert_same(got, expected)
    assert all(
        list(found) == ["parameters", *(s.name for s in rules()[ALGORITHMS[slots]].slots)] for found in got.values()
    )


@pytest.mark.parametrize("form", ["object", "name"])
@pytest.mark.parametrize("name", GOLDEN)
def test_there_and_back(tmp_path: Path, name: str, form: str) -> None:
    tables = read_tensorflow(golden_prefix(name))
    write_tensorflow(tmp_path / "ckpt", tables, form)  # type: ignore[arg-type]
    assert_same(read_tensorflow(tmp_path / "ckpt"), tables)


def test_progress_counts_every_byte() -> None:
    name = "tpuembedding_v1_4hosts_adagrad"
    counted: list[int] = []
    tables = read_tensorflow(golden_prefix(name), progress=counted.append)
    total = sum(value.nbytes for slots in tables.values() for value in slots.values())
    assert sum(counted) == total
    assert all(value.dtype == torch.float32 for slots in tables.values() for value in slots.values())
