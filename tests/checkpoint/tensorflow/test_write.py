"""Writing: whole or not at all, one tensor at a time, and only what TensorFlow could hold."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.checkpoint.tensorflow.examples import assert_same, values
from tpuemb_torch.checkpoint import CheckpointError, read_tensorflow, write_tensorflow

_NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=8)


@settings(deadline=None, max_examples=60)
@given(
    st.dictionaries(_NAMES, st.tuples(st.integers(1, 9), st.integers(1, 5)), min_size=1, max_size=5),
    st.sampled_from([(), ("accumulators",), ("momenta", "velocities"), ("last_hit_step",)]),
)
def test_any_name_comes_back(
    tmp_path_factory: pytest.TempPathFactory, shapes: dict[str, tuple[int, int]], slots: tuple[str, ...]
) -> None:
    prefix = tmp_path_factory.mktemp("names") / "ckpt"
    tables = {
        name: {slot: values(*shape, seed=i) for slot in ("parameters", *slots)}
        for i, (name, shape) in enumerate(shapes.items())
    }
    write_tensorflow(prefix, tables)
    assert_same(read_tensorflow(prefix), tables)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32])
def test_types_come_back(tmp_path: Path, dtype: torch.dtype) -> None:
    tables = {"t": {"parameters": (100 * values(6, 3)).to(dtype)}}
    write_tensorflow(tmp_path / "ckpt", tables)
    assert_same(read_tensorflow(tmp_path / "ckpt"), tables)


def test_special_values_and_strides_come_back(tmp_path: Path) -> None:
    special = torch.tensor([[float("inf"), -0.0, 1e-45], [float("-inf"), 3.4028234663852886e38, 0.1]])
    write_tensorflow(tmp_path / "a", {"t": {"parameters": special.t(), "accumulators": special.t()}})
    got = read_tensorflow(tmp_path / "a")["t"]
    assert got["parameters"].numpy().tobytes() == np.ascontiguousarray(special.t().numpy()).tobytes()
    nan = torch.tensor([[0x7FC12345, -0x3EDCBB]], dtype=torch.int32).view(torch.float32)
    write_tensorflow(tmp_path / "a", {"t": {"parameters": nan}})
    assert torch.equal(read_tensorflow(tmp_path / "a")["t"]["parameters"].view(torch.int32), nan.view(torch.int32))


def test_tensors_are_made_when_their_turn_comes(tmp_path: Path) -> None:
    alive: list[int] = []

    class Tracked:
        def __init__(self, seed: int) -> None:
            self.seed = seed

        def __call__(self) -> Tensor:
            alive.append(self.seed)
            return values(4, 2, self.seed)

    order: list[int] = []
    tables = {"t": {"parameters": Tracked(1), "accumulators": Tracked(2)}, "u": {"parameters": values(3, 2)}}
    write_tensorflow(tmp_path / "ckpt", tables, progress=lambda n: order.append(len(alive)))
    assert order[-3:] == [1, 2, 2]
    assert torch.equal(read_tensorflow(tmp_path / "ckpt")["t"]["accumulators"], values(4, 2, 2))


def test_a_failed_write_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    old = {"t": {"parameters": values(4, 2)}}
    write_tensorflow(tmp_path / "ckpt", old)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def broken() -> Tensor:
        raise KeyboardInterrupt

    for tables, problem in (
        ({"t": {"parameters": values(4, 2), "accumulators": broken}}, KeyboardInterrupt),
        ({"t": {"parameters": values(4, 2), "accumulators": values(4, 3)}}, CheckpointError),
        ({"t": {"parameters": torch.ones(4)}}, CheckpointError),
        ({"t": {"parameters": torch.ones(4, 2, dtype=torch.complex64)}}, CheckpointError),
    ):
        with pytest.raises(problem):
            write_tensorflow(tmp_path / "ckpt", tables)
        assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("tables", "form", "problem"),
    [
        ({}, "object", "no tables to write"),
        ({"t": {}}, "object", "table 't' has no parameters, only nothing"),
        ({"t": {"accumulators": torch.ones(1, 1)}}, "name", "table 't' has no parameters, only accumulators"),
        ({"t": {"parameters": torch.ones(1, 1)}}, "other", "form must be 'object' or 'name', got 'other'"),
        ({"_variables": {"parameters": torch.ones(1, 1)}}, "object", "as that of the dict of all tables is"),
        (
            {
                "t": {"parameters": torch.ones(1, 1), "accumulators": torch.ones(1, 1)},
                "t/accumulators": {"parameters": torch.ones(1, 1)},
            },
            "object",
            r"table 't/accumulators', parameters: .*'t/accumulators', as that of table 't' \(accumulators\) is",
        ),
        (
            {
                "t": {"parameters": torch.ones(1, 1), "accumulators": torch.ones(1, 1)},
                "t/Adagrad": {"parameters": torch.ones(1, 1)},
            },
            "name",
            "as that of table 't' .accumulators. is",
        ),
    ],
)
def test_what_tensorflow_could_not_hold(tmp_path: Path, tables: dict, form: str, problem: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(CheckpointError, match=problem):
        write_tensorflow(tmp_path / "ckpt", tables, form)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_mod_needs_hosts(tmp_path: Path) -> None:
    table = {"t": {"parameters": torch.ones(2, 1)}}
    for arguments in ({"num_hosts": 0}, {"sharding_strategy": "rows"}):
        with pytest.raises(CheckpointError, match="is neither DIV nor MOD"):
            write_tensorflow(tmp_path / "ckpt", table, "name", **arguments)  # type: ignore[arg-type]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write checkpoint"):
        write_tensorflow(tmp_path / "file" / "ckpt", {"t": {"parameters": torch.ones(2, 1)}})
