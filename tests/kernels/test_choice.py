"""Which implementation a kernel runs, when it compiles, and what happens without a compiler."""

from __future__ import annotations

import copy
import logging
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.hlo_text import parse
from tests.kernels.test_kernel import table
from tpuemb_torch.config import Table
from tpuemb_torch.config.schema import LearningRate, Optimizer
from tpuemb_torch.kernels import StepSource, TableBatchedEmbedding, TablePart, group_step, lookup, native
from tpuemb_torch.kernels.native_step import NativeStep
from tpuemb_torch.kernels.update import ChunkedStep

needs_compiler = pytest.mark.skipif(native.compiler() is None, reason="there is no C++ compiler")
pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of libraries for this test alone, and nothing loaded yet."""
    monkeypatch.setenv("TPUEMB_TORCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(native, "_loaded", {})
    lookup._library.cache_clear()
    monkeypatch.setattr(group_step, "_warned", set())
    return tmp_path / "cache"


def kernel_of(tables: Sequence[Table], kernel: str, steps: StepSource | None = None) -> TableBatchedEmbedding:
    parts = [TablePart.whole(t) for t in tables]
    return TableBatchedEmbedding(parts, list(range(len(parts))), torch.device("cpu"), 0, steps or StepSource(0), kernel)


def step(module: TableBatchedEmbedding, batch: int = 4) -> Tensor:
    torch.manual_seed(batch)
    ids = torch.randint(0, 5, (batch * len(module.parts),))
    out = module(ids, torch.arange(ids.numel() + 1))
    out.backward(torch.randn_like(out))
    return module.split_embedding_weights()[0]


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What a user sees: warnings."""
    ours = [record for record in caplog.records if record.name == "tpuemb_torch.kernels"]
    return [record.message for record in ours if record.levelno == logging.WARNING]


def chosen(module: TableBatchedEmbedding) -> object:
    return module.table_groups()[0].step._chosen.get("cpu")


@needs_compiler
def test_one_compilation_serves_every_number_and_size(empty_cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = native.compilations
    steps = StepSource(1)
    dynamic = table("a", 9, 3, "adam { beta1: 0.9 beta2: 0.99 epsilon: 0.001 }")
    dynamic = replace(dynamic, optimizer=replace(dynamic.optimizer, learning_rate=LearningRate(tag=0)))
    module = kernel_of([dynamic], "compiled", steps)
    steps.set_rates([0.1])
    step(module)
    assert native.compilations == before + 2  # the rule, and the lookup that all rules share
    for rate, batch in ((0.2, 4), (0.2, 1), (0.3, 0), (0.1, 300)):
        steps.set_rates([rate])
        step(module, batch)
    for dim in (1, 8, 65):  # other numbers, hyper-parameters, dimensions, numbers of tables
        other = "adam { beta1: 0.8 beta2: 0.9 epsilon: 0.1 }"
        step(kernel_of([table("a", 7, dim, other, 0.5), table("b", 8, dim, other)], "compiled"))
    assert native.compilations == before + 2
    messages = warnings_of(caplog)
    assert len(messages) == 2
    assert "compiled the adam step in" in messages[0] and str(empty_cache) in messages[0]


@needs_compiler
def test_later_processes_find_the_libraries(empty_cache: Path) -> None:
    before = native.compilations
    weights = step(kernel_of([table("a", 9, 3, "adagrad {}")], "compiled")).clone()
    assert native.compilations == before + 2
    program = (
        "from tests.kernels.test_choice import *\n"
        "weights = step(kernel_of([table('a', 9, 3, 'adagrad {}')], 'compiled'))\n"
        "print(native.compilations, weights.flatten().tolist())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"0 {weights.flatten().tolist()}"
    # A library that was cut short is built again.
    for library in empty_cache.glob("*.so"):
        library.unlink()
        library.write_bytes(b"\x7fELF")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"2 {weights.flatten().tolist()}"


@needs_compiler
def test_auto_compiles_when_there_is_work(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = native.compilations
    module, eager = (kernel_of([table("a", 9, 3, "adagrad {}")], kernel) for kernel in ("auto", "eager"))
    for _ in range(3):
        assert torch.equal(step(module), step(eager))
    assert native.compilations == before and chosen(module) is None
    monkeypatch.setattr(group_step, "ELEMENTS_BEFORE_COMPILING", 1)
    for _ in range(3):
        assert torch.equal(step(module), step(eager))
    assert isinstance(chosen(module), NativeStep) and isinstance(chosen(eager), ChunkedStep)
    assert native.compilations == before + 2
    # A copy finds what was compiled.
    twin = copy.deepcopy(module)
    assert torch.equal(step(twin), step(module))
    assert native.compilations == before + 2


@pytest.mark.parametrize("problem", ["no compiler", "broken compiler"])
def test_without_a_compiler(
    problem: str, empty_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = empty_cache.parent / "c++"
    broken.write_text("#!/bin/sh\necho 'error: out of order' >&2\nexit 1\n")
    broken.chmod(0o755)
    if problem == "no compiler":
        monkeypatch.setenv("PATH", "")
        monkeypatch.delenv("CXX", raising=False)
    else:
        monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setattr(group_step, "ELEMENTS_BEFORE_COMPILING", 0)
    tables = [table("a", 9, 3, "adagrad {}"), table("b", 9, 4, "adagrad {}")]
    module, eager = kernel_of(tables, "auto"), kernel_of(tables, "eager")
    for _ in range(2):
        assert torch.equal(step(module), step(eager))
    (message,) = warnings_of(caplog)  # one, though there are two groups and two steps
    assert ("install g++" if problem == "no compiler" else "out of order") in message
    with pytest.raises(ValueError if problem == "no compiler" else native.BuildError, match=r"C\+\+|out of order"):
        step(tpuemb_module(tables))


def tpuemb_module(tables: Sequence[Table]) -> TableBatchedEmbedding:
    from tpuemb_torch.kernels import check_kernel

    check_kernel("compiled")
    return kernel_of(tables, "compiled")


@needs_compiler
def test_a_folder_that_cannot_be_written(empty_cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    empty_cache.write_text("a file where the folder should be")
    expected = step(kernel_of([table("a", 9, 3, "adagrad {}")], "eager"))
    assert torch.equal(step(kernel_of([table("a", 9, 3, "adagrad {}")], "compiled")), expected)
    assert "not kept" in warnings_of(caplog)[0]


PROGRAM = parse(
    """
    HloModule with_integers
    ENTRY main {
      gradient = f32[1,1] parameter(0)
      weights = f32[1,1] parameter(1)
      whole = s32[1,1] convert(gradient)
      back = f32[1,1] convert(whole)
      moved = f32[1,1] subtract(weights, back)
      ROOT result = (f32[1,1]) tuple(moved)
    }
    """
).SerializeToString()


@needs_compiler
@pytest.mark.parametrize("kernel", ["auto", pytest.param("compiled", marks=pytest.mark.slow)])
def test_a_formula_without_a_translation(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """ "auto" runs it op by op, "compiled" by torch.compile."""
    monkeypatch.setattr(group_step, "ELEMENTS_BEFORE_COMPILING", 0)
    optimizer = Optimizer("user_defined_program", {}, LearningRate(constant=0.1), program=PROGRAM)
    tables = [replace(table("a", 9, 3, "adagrad {}"), optimizer=optimizer)]
    module, eager = kernel_of(tables, kernel), kernel_of(tables, "eager")
    for _ in range(2):
        assert torch.equal(step(module), step(eager))
    assert isinstance(chosen(module), ChunkedStep)
