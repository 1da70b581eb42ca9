"""The formulas under `torch.compile`: one graph, any number of rows, no recompilation for a new rate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter

from tests.optimizers.cases import CASES, STEP, Case, state, tensor
from tpuemb_torch.optimizers import StepNumbers, apply_step

ONE_OF_EACH = list({case.algorithm: case for case in CASES}.values())


def arguments(case: Case, rows: int, lr: float) -> tuple[Any, ...]:
    w, g, slots = state(case, np.random.default_rng(rows), (rows, 8))
    per_row = torch.linspace(0.5, 1.0, rows)[:, None]
    numbers = StepNumbers(tensor(lr), 0.1 * per_row, -per_row, per_row, -per_row, per_row, tensor(STEP))
    return numbers, *map(tensor, (w, g, *slots))


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("case", ONE_OF_EACH, ids=lambda case: case.algorithm)
def test_one_graph_serves_all_sizes_and_rates(case: Case) -> None:
    rule, counter = case.rule, CompileCounter()
    compiled = torch.compile(lambda *x: apply_step(rule, *x), fullgraph=True, dynamic=True, backend=counter)
    for rows, factor in ((5, 1.0), (9, 0.5), (32, 2.0)):
        inputs = arguments(case, rows, case.learning_rate * factor)
        for x, y in zip(compiled(*inputs), apply_step(rule, *inputs), strict=True):
            assert torch.equal(x, y)
    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in CASES if c.id == "ftrl-all"], ids=lambda case: case.id)
def test_generated_code_agrees(case: Case) -> None:
    """Through the real code generator; it may contract multiply-add, hence the tolerance."""
    rule = case.rule
    compiled = torch.compile(lambda *x: apply_step(rule, *x), fullgraph=True, dynamic=True)
    for rows in (5, 64):
        inputs = arguments(case, rows, case.learning_rate)
        for x, y in zip(compiled(*inputs), apply_step(rule, *inputs), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
