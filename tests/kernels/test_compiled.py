"""The compiled step: what the eager one gives to the last bit, what float64 gives within rounding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.kernels.test_kernel import table
from tests.optimizers.cases import CASES, STEP, Case, state
from tpuemb_torch.config.schema import LearningRate, Limits, Optimizer
from tpuemb_torch.kernels import StepSource, TableBatchedEmbedding, TablePart
from tpuemb_torch.kernels.native import compiler
from tpuemb_torch.optimizers import reference_step

pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler"),
    pytest.mark.timeout(300),
]

ROWS, BATCH, BAG = 40, 24, 3
#: A power is not the same function everywhere in torch: its vectorized and its plain loops differ in the last bit.
POWERS = {"ftrl-power", "adagrad_momentum-exponent_3", "mdl_adagrad_light", "mdl_adagrad_light-l2"}
POWERS |= {"mdl_adagrad_light-no_power", *(case.id for case in CASES if case.algorithm == "frequency_aware_adagrad")}
QUICK = {"stochastic_gradient_descent", "adagrad", "adam-sweep", "ftrl-all"}


def cases() -> list[Any]:
    return [
        pytest.param(case, id=case.id, marks=[] if case.id in QUICK else pytest.mark.slow)
        for case in CASES
        if case.id != "assign"
    ] + [pytest.param(next(c for c in CASES if c.id == "assign"), id="assign", marks=pytest.mark.slow)]


def optimizers(case: Case) -> list[Optimizer]:
    """One rule with three sets of numbers."""
    base = case.optimizer
    counter = 1 if case.algorithm == "frequency_aware_adagrad" else None
    base = replace(base, step_counter_tag=counter, learning_rate=LearningRate(constant=case.learning_rate))
    return [
        base,
        replace(
            base,
            learning_rate=LearningRate(tag=0),
            clipping_limits=Limits(-1.0, 0.9),
            gradient_clipping_limits=Limits(-0.5, float("inf")),
        ),
        replace(base, weight_decay_factor=0.1, multiply_weight_decay_factor_by_learning_rate=True),
    ]


def rates(case: Case) -> Tensor:
    return torch.tensor([case.learning_rate * 1.5, STEP])


def build(case: Case, dim: int, kernel: str, start: list[list[np.ndarray]]) -> TableBatchedEmbedding:
    steps = StepSource(2)
    steps.set_rates(rates(case).tolist())
    tables = [
        replace(table(f"t{i}", ROWS, dim, "adagrad {}"), optimizer=optimizer)
        for i, optimizer in enumerate(optimizers(case))
    ]
    parts = [TablePart.whole(t) for t in tables]
    module = TableBatchedEmbedding(parts, [0, 1, 2], torch.device("cpu"), 0, steps, kernel)
    for stored, values in zip(module.stored(), start, strict=True):
        for tensor, value in zip(stored.tensors.values(), values, strict=True):
            tensor.copy_(torch.from_numpy(np.broadcast_to(value, tensor.shape).copy()))
    return module


@pytest.mark.parametrize("case", cases())
@pytest.mark.parametrize("dim", [1, 3, 65])
@pytest.mark.parametrize("weighted", [False, True])
def test_every_rule(case: Case, dim: int, weighted: bool) -> None:
    """Three tables with other numbers in one call; odd dimensions; rows that are hit never, once, and often."""
    rng = np.random.default_rng(dim)
    start = []
    for _ in range(3):
        w, _, slots = state(case, rng, (ROWS, dim))
        start.append([np.asarray(value, np.float32) for value in (w, *slots)])
    ids = rng.integers(0, ROWS - 8, (3, BATCH * BAG))
    gains = rng.uniform(0.5, 1.5, (3, BATCH * BAG)).astype(np.float32)
    gradient = rng.normal(size=(BATCH, 3, dim)).astype(np.float32)
    results = []
    for kernel in ("eager", "compiled"):
        module = build(case, dim, kernel, start)
        outputs = []
        for _ in range(2):  # the second step of a compiled group looks up natively, too
            out = module(
                torch.from_numpy(ids).flatten(),
                torch.arange(0, 3 * BATCH * BAG + 1, BAG),
                torch.from_numpy(gains).flatten() if weighted else None,
            )
            out.backward(torch.from_numpy(gradient.reshape(BATCH, 3 * dim)))
            outputs.append(out.detach())
            if len(outputs) == 1:
                first = [[tensor.clone() for tensor in stored.tensors.values()] for stored in module.stored()]
        results.append((outputs, first, [list(stored.tensors.values()) for stored in module.stored()]))
    eager, compiled = results
    for ours, theirs in zip(flat(compiled), flat(eager), strict=True):
        if case.id in POWERS:
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))
    for index, optimizer in enumerate(optimizers(case)):
        expected = reference(
            case, optimizer, start[index], ids[index], gains[index] if weighted else None, gradient[:, index]
        )
        for ours, exact in zip(compiled[1][index], expected, strict=True):
            np.testing.assert_allclose(ours.numpy(), exact, rtol=2e-5, atol=2e-5)


def flat(result: tuple[list[Tensor], list[list[Tensor]], list[list[Tensor]]]) -> list[Tensor]:
    return [*result[0], *(t for group in (*result[1], *result[2]) for t in group)]


def reference(
    case: Case,
    optimizer: Optimizer,
    start: list[np.ndarray],
    ids: np.ndarray,
    gains: np.ndarray | None,
    gradient: np.ndarray,
) -> list[np.ndarray]:
    """Weights and slots after one step, in float64."""
    contributions = np.repeat(gradient.astype(np.float64), BAG, axis=0)
    if gains is not None:
        contributions *= gains[:, None]
    folded = np.zeros((ROWS, gradient.shape[1]))
    np.add.at(folded, ids, contributions)
    touched = np.arange(ROWS) if case.rule.sweeps_all_rows else np.unique(ids)
    old = [np.broadcast_to(value, folded.shape).astype(np.float64) for value in start]
    lr = np.float64(np.float32(case.learning_rate))
    if optimizer.learning_rate.tag is not None:
        lr = np.float64(rates(case)[0])
    step = None if optimizer.step_counter_tag is None else STEP
    with np.errstate(all="ignore"):
        new = reference_step(
            optimizer, *(x[touched] for x in (old[0], folded)), lr, *(s[touched] for s in old[1:]), step=step
        )
    for values, value in zip(old, new, strict=True):
        values[touched] = value
    return old


@pytest.mark.parametrize("extra", ["simulated_quantization", "disabled"])
def test_options_around_the_step(extra: str) -> None:
    text = {
        "simulated_quantization": "simulated_quantization { enabled: true num_buckets: 16 "
        "clipping_limits { lower { value: -0.3 } upper { value: 0.3 } } }",
        "disabled": "gradient_accumulation_status: DISABLED",
    }[extra]
    results = []
    for kernel in ("eager", "compiled"):
        steps = StepSource(0, cores=2)
        parts = [TablePart.whole(table(name, 50, 5, "adagrad {}", 0.1, text)) for name in "ab"]
        module = TableBatchedEmbedding(parts, [0, 0, 1], torch.device("cpu"), 0, steps, kernel)
        torch.manual_seed(0)
        for _ in range(3):
            ids = torch.randint(0, 50, (3 * 8 * 2,))
            out = module(ids, torch.arange(0, 49, 2), torch.rand(48))
            out.backward(torch.randn(8, 15))
        results.append([out.detach(), *(tensor for stored in module.stored() for tensor in stored.tensors.values())])
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_do_not_change_a_bit(threads: int) -> None:
    """Many rows, one of them hot; the reference is one thread."""
    before = torch.get_num_threads()
    results = []
    try:
        for count in (1, threads):
            torch.set_num_threads(count)
            parts = [TablePart.whole(table("a", 30_000, 8, "adagrad {}"))]
            module = TableBatchedEmbedding(parts, [0], torch.device("cpu"), 0, StepSource(0), "compiled")
            torch.manual_seed(0)
            for _ in range(2):
                ids = torch.cat([torch.randint(0, 30_000, (40_000,)), torch.zeros(20_000, dtype=torch.int64)])
                out = module(ids, torch.arange(0, 60_001, 4))
                out.backward(torch.randn(15_000, 8))
            results.append([out.detach(), *module.stored()[0].tensors.values()])
    finally:
        torch.set_num_threads(before)
    for one, many in zip(*results, strict=True):
        assert torch.equal(one, many)
