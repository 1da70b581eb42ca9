"""The stages around the rule: gradient clipping, weight decay, rule, weight clipping."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.optimizers.cases import ADAM, CASES, F2A, Array, Case, array, numbers, state, tensor
from tpuemb_torch.config.schema import LearningRate, Limits, Optimizer
from tpuemb_torch.optimizers import StepNumbers, apply_step, create_rule, reference_step

NAN = float("nan")


def optimizer(
    algorithm: str = "stochastic_gradient_descent",
    hyperparameters: dict[str, float | bool] | None = None,
    **options: Any,
) -> Optimizer:
    return Optimizer(algorithm, hyperparameters or {}, LearningRate(constant=0.1), **options)


def both(options: Optimizer, w: list[float], g: list[float], lr: float = 0.5, *slots: list[float]) -> Array:
    """The new weights by the tensors, after comparing them to the reference."""
    inputs = [array([x]) for x in (w, g, *slots)]
    single = apply_step(create_rule(options), numbers(options, lr), *map(tensor, inputs))
    double = reference_step(options, inputs[0], inputs[1], lr, *inputs[2:])
    for x, y in zip(single, double, strict=True):
        assert y.dtype == np.float64
        np.testing.assert_allclose(x.numpy(), y, rtol=1e-6)
    result: Array = single[0].numpy()[0]
    return result


def test_gradient_clipping_comes_first() -> None:
    options = optimizer("adagrad", gradient_clipping_limits=Limits(-0.5, 1.0))
    w = both(options, [0.0, 0.0, 0.0], [3.0, -3.0, 0.25], 0.5, [0.0, 0.0, 0.0])
    np.testing.assert_allclose(w, [-0.5, 0.5, -0.5], rtol=1e-6)  # slots see the clipped gradient, too
    clipped = optimizer(gradient_clipping_limits=Limits(-0.5, 1.0))
    np.testing.assert_allclose(both(clipped, [0.0, 0.0, 0.0], [3.0, -3.0, 0.25]), [-0.5, 0.25, -0.125])


@pytest.mark.parametrize("limits", [Limits(upper=0.0), Limits(lower=0.0), Limits(0.0, 0.0), Limits()])
def test_an_absent_bound_is_infinite_and_zero_is_a_bound(limits: Limits) -> None:
    g = np.array([-2.0, -1.0, 1.0, 2.0])
    expected = np.minimum(np.maximum(g, limits.lower), limits.upper)
    np.testing.assert_array_equal(both(optimizer(gradient_clipping_limits=limits), [0.0] * 4, list(g), 1.0), -expected)
    np.testing.assert_array_equal(both(optimizer(clipping_limits=limits), list(g), [0.0] * 4), expected)


def test_weight_clipping_comes_last_and_also_without_gradient() -> None:
    options = optimizer(clipping_limits=Limits(-1.0, 1.0))
    np.testing.assert_array_equal(both(options, [0.9, -0.9, 5.0, 0.5], [-1.0, 1.0, 0.0, 0.0]), [1.0, -1.0, 1.0, 0.5])


def test_weight_decay_comes_before_the_rule() -> None:
    np.testing.assert_allclose(both(optimizer(weight_decay_factor=0.1), [2.0], [1.0]), [2.0 * 0.9 - 0.5])
    times_lr = optimizer(weight_decay_factor=0.1, multiply_weight_decay_factor_by_learning_rate=True)
    np.testing.assert_allclose(both(times_lr, [2.0], [1.0]), [2.0 * 0.95 - 0.5])
    # A proximal rule sees the decayed weight; decay after it would give (2 - 0.1) / 2 - 0.2.
    proximal = optimizer("proximal_adagrad", {"l1": 0.0, "l2": 2.0}, weight_decay_factor=0.1)
    np.testing.assert_allclose(both(proximal, [2.0], [0.0], 0.5, [1.0]), [2.0 * 0.9 / 2.0])


def test_weight_decay_is_outside_the_gradient() -> None:
    options = optimizer("adagrad", weight_decay_factor=0.1)
    w, a = apply_step(create_rule(options), numbers(options, 0.5), tensor([[2.0]]), tensor([[0.0]]), tensor([[0.25]]))
    assert [w.item(), a.item()] == pytest.approx([1.8, 0.25])


def test_decay_of_zero_keeps_every_bit() -> None:
    w = torch.tensor([[-0.0, 0.0, 1e-45, float("inf"), NAN, 0.1]])
    rule = create_rule(optimizer())
    result = apply_step(rule, StepNumbers(torch.tensor(0.1), decay=torch.tensor([[0.0]])), w, torch.zeros_like(w))[0]
    assert torch.equal(result.view(torch.int32), w.view(torch.int32))


def test_numbers_per_row_serve_tables_that_differ() -> None:
    """Rows of three tables in one call: limits, no limits, decay."""
    options = [
        optimizer("adagrad", gradient_clipping_limits=Limits(-0.1, 0.2), clipping_limits=Limits(-0.5, 0.5)),
        optimizer("adagrad"),
        optimizer("adagrad", weight_decay_factor=0.3, clipping_limits=Limits(upper=0.0)),
    ]

    def column(*values: float) -> torch.Tensor:
        return torch.tensor(values)[:, None]

    inf = float("inf")
    together = StepNumbers(
        lr=column(0.1, 0.2, 0.3),
        decay=column(0.0, 0.0, 0.3),
        gradient_lower=column(-0.1, -inf, -inf),
        gradient_upper=column(0.2, inf, inf),
        weight_lower=column(-0.5, -inf, -inf),
        weight_upper=column(0.5, inf, 0.0),
    )
    w, g, slots = state(next(c for c in CASES if c.algorithm == "adagrad"), np.random.default_rng(0), (3, 64))
    result = apply_step(create_rule(options[0]), together, *map(tensor, (w, g, *slots)))
    for i, (option, lr) in enumerate(zip(options, (0.1, 0.2, 0.3), strict=True)):
        row = slice(i, i + 1)
        alone = apply_step(create_rule(option), numbers(option, lr), *(tensor(x[row]) for x in (w, g, *slots)))
        for x, y in zip(result, alone, strict=True):
            assert torch.equal(x[row], y)


def test_nan_passes_through_both_clippings() -> None:
    options = optimizer(gradient_clipping_limits=Limits(-1.0, 1.0), clipping_limits=Limits(-1.0, 1.0))
    np.testing.assert_array_equal(np.isnan(both(options, [0.0, NAN, 0.0], [NAN, 0.0, 0.0])), [True, True, False])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_all_stages_with_every_rule(case: Case) -> None:
    options = replace(
        case.optimizer,
        clipping_limits=Limits(-0.75, 0.8125),
        gradient_clipping_limits=Limits(-0.5, 1.5),
        weight_decay_factor=0.125,
        multiply_weight_decay_factor_by_learning_rate=case.algorithm != "frequency_estimator",
    )
    w, g, slots = state(case, np.random.default_rng(0))
    lr = case.learning_rate
    single = apply_step(create_rule(options), numbers(options, lr, 30.0), *map(tensor, (w, g, *slots)))
    double = reference_step(options, w, g, lr, *slots, step=30.0)
    for x, y in zip(single, double, strict=True):
        np.testing.assert_allclose(x.numpy(), y, rtol=2e-5, atol=2e-6)
    assert single[0].min() >= -0.75 and single[0].max() <= 0.8125


def test_the_step_counter_reaches_its_rule() -> None:
    options = optimizer("frequency_aware_adagrad", F2A)
    w, g, *slots = (array([[x]]) for x in (0.0, 1.0, 0.1, 0.0))
    low, high = (reference_step(options, w, g, 0.1, *slots, step=step)[0].item() for step in (1.0, 4.0))
    assert high == pytest.approx(2 * low)
    moved = apply_step(create_rule(options), numbers(options, 0.1, 4.0), *map(tensor, (w, g, *slots)))[0].item()
    assert moved == pytest.approx(high, rel=1e-6)


def test_a_sweep_with_zero_gradient_decays_momenta() -> None:
    """Non-lazy Adam: an untouched row is stepped with g = 0 by the same rule."""
    options = optimizer("adam", {**ADAM, "use_non_lazy_adam": True})
    w, m, v = apply_step(
        create_rule(options), numbers(options, 0.1), *map(tensor, [[[1.0]], [[0.0]], [[0.5]], [[0.04]]])
    )
    assert [m.item(), v.item()] == pytest.approx([0.45, 0.0396])
    assert w.item() == pytest.approx(1.0 - 0.1 * 0.45 / (0.0396**0.5 + 1e-3))
