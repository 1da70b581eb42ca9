"""The float32 formulas against the float64 references, over random hyper-parameters.

The bound on a new weight is in units in the last place (ulps) of the update, where the update is what its terms
would add up to without cancellation: rounding is relative to terms, not to their difference.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.optimizers.cases import Array, Case, run, run_reference

UNIT = float(np.finfo(np.float32).eps) / 2  # half an ulp of 1: the error of one rounding

Values = dict[str, st.SearchStrategy]


def real(low: float, high: float) -> st.SearchStrategy[float]:
    """Float32 values; with low = 0, zero or at least 1e-6, since subnormal products have few bits."""
    low, high = float(np.float32(low)), float(np.float32(high))
    return st.floats(low, high, width=32) if low else st.just(0.0) | st.floats(float(np.float32(1e-6)), high, width=32)


BETA = real(0.0, 0.9999)
LATE = real(0.5, 0.9999)  # with beta2 = 0 nothing is left of v - (1 - beta2) * g^2 for g^2 = v
EPSILON = st.sampled_from([0.0]) | real(1e-8, 0.1)
WEIGHT = st.sampled_from([0.0]) | real(1e-3, 1.0)
BOOL = st.booleans()
BOUND = st.sampled_from([0.0]) | real(0.01, 10.0)

HYPERPARAMETERS: dict[str, Values] = {
    "stochastic_gradient_descent": {},
    "adagrad": {},
    "adagrad_momentum": {
        "momentum": BETA,
        "use_nesterov": BOOL,
        "exponent": st.sampled_from([2.0]) | real(0.5, 8.0),
        "beta2": st.sampled_from([1.0]) | BETA,
        "epsilon": EPSILON,
    },
    "bounded_adagrad": {"update_accumulator_first": BOOL, "max_var_update": BOUND, "max_accumulator": BOUND},
    "frequency_aware_adagrad": {
        "l1_regularization_strength": WEIGHT,
        "l2_regularization_strength": WEIGHT,
        "max_lr_multiplier": real(0.0, 100.0),
        "probability_exponent": real(0.0, 2.0),
        "accumulator_decay": real(0.0, 1.0),
        "initial_accumulator_value": WEIGHT,
    },
    "ftrl": {
        "l1": WEIGHT,
        "l2": WEIGHT,
        "lr_power": st.sampled_from([-0.5, 0.0, -1.0]) | real(-1.0, -0.1),
        "beta": WEIGHT,
        "multiply_linear_by_lr": BOOL,
    },
    "adam": {"beta1": BETA, "beta2": BETA, "epsilon": EPSILON, "use_sum_inside_sqrt": BOOL},
    "momentum": {"momentum": BETA, "use_nesterov": BOOL},
    "lion": {"beta1": BETA, "beta2": BETA},
    "rms_prop": {"rho": BETA, "momentum": BETA, "epsilon": EPSILON},
    "centered_rms_prop": {"rho": real(0.1, 0.9999), "momentum": BETA, "epsilon": EPSILON},
    "adadelta": {"rho": BETA, "epsilon": EPSILON},
    "proximal_adagrad": {"l1": WEIGHT, "l2": WEIGHT},
    "online_yogi": {"l1": WEIGHT, "l2": WEIGHT, "beta2": LATE},
    "proximal_yogi": {"l1": WEIGHT, "l2": WEIGHT, "beta1": BETA, "beta2": LATE, "epsilon": EPSILON},
    "frequency_estimator": {"tau": real(0.0, 1.0), "max_delta": real(1.0, 1e4), "outlier_threshold": real(0.1, 10.0)},
    "assign": {},
}

#: Roundings of the update, in units of half an ulp.  A power adds |log(base)| * exponent of them.
ROUNDINGS = {"adagrad_momentum": 50.0, "frequency_aware_adagrad": 12.0, "ftrl": 12.0}
#: The weight is rounded once where it is only added to, and more often where it is scaled.
WEIGHT_ROUNDINGS = {"proximal_adagrad": 4.0, "proximal_yogi": 4.0, "frequency_estimator": 4.0}


def make(case: Case, seed: int) -> tuple[Array, Array, list[Array]]:
    """Weights, gradients and slots over several orders of magnitude, some of them 0."""
    rng = np.random.default_rng(seed)

    def values(low: float, high: float) -> Array:
        x = 10 ** rng.uniform(low, high, 128) * rng.choice([-1.0, 1.0], 128)
        return np.where(rng.random(128) < 0.1, 0.0, x).astype(np.float32)

    w, g, slots = values(-3, 1), values(-3, 1), []
    for name in case.slot_names:
        if name == "counters":
            slots.append(rng.integers(0, 100, 128).astype(np.float32))
        elif name == "last_hit_step":
            slots.append(rng.integers(0, 1000, 128).astype(np.float32))
        elif name in ("momenta", "linears", "mom", "mg", "m"):
            slots.append(values(-3, 1))
        else:
            slots.append(np.abs(values(-4, 2)))
    if case.algorithm == "centered_rms_prop":  # a mean square is at least the square of the mean
        slots[0] = (slots[0] + 0.01 + 2 * slots[2] ** 2).astype(np.float32)
    return w, g, slots


def yogi(v: Array, g: Array, beta2: float) -> tuple[Array, Array]:
    """Returns Yogi's new second moment, and how much cancellation multiplies its rounding error."""
    square = g * g
    total = v + (1 - beta2) * np.where(square >= v, square, -square)
    return total, np.where(total == 0, 1.0, (v + square) / total)


def update_size(case: Case, w: Array, g: Array, lr: float, slots: list[Array]) -> Array:
    """Size of the update's terms: all of one sign, in float64."""
    w, g, *slots = (np.abs(x.astype(np.float64)) for x in (w, g, *slots))
    loss: Array | float = 1.0
    h: dict[str, Any] = {"l1": 0.0, "l2": 0.0, "beta": 0.0, **case.hyperparameters}
    with np.errstate(divide="ignore", invalid="ignore"):
        if case.algorithm in ("ftrl", "online_yogi"):
            if case.algorithm == "ftrl":
                power, total = -float(h["lr_power"]), slots[0] + g * g
            else:
                power, (total, loss) = 0.5, yogi(slots[0], g, h["beta2"])
            rate, unit = (1.0, lr) if h.get("multiply_linear_by_lr") else (lr, 1.0)
            grown = total**power + slots[0] ** power
            z = slots[1] + unit * g + grown * w / rate + unit * h["l1"]
            quadratic = (total**power + h["beta"]) / rate + 2 * h["l2"] * unit
            return np.where(quadratic == 0, 0.0, loss * z / quadratic)
        if case.algorithm == "centered_rms_prop":
            square = h["rho"] * slots[0] + (1 - h["rho"]) * g * g
            mean = h["rho"] * slots[2] + (1 - h["rho"]) * g  # of one sign: the largest it can be
            variance = h["rho"] * (slots[0] - slots[2] ** 2) + h["epsilon"]  # and the smallest this can be
            return np.asarray(
                h["momentum"] * slots[1] + lr * g / np.sqrt(variance) * (1 + (square + mean**2) / variance)
            )
        if case.algorithm == "lion":
            return np.full_like(w, lr)
        if case.algorithm == "assign":
            return np.zeros_like(w)
        if case.algorithm == "frequency_estimator":
            return np.asarray(np.minimum(np.abs(lr - slots[0]), h["max_delta"]))
        if case.algorithm in ("proximal_adagrad", "proximal_yogi"):
            if case.algorithm == "proximal_adagrad":
                step, denominator = g, np.sqrt(slots[0] + g * g)
            else:
                step = h["beta1"] * slots[1] + (1 - h["beta1"]) * g
                total, loss = yogi(slots[0], g, h["beta2"])
                denominator = np.sqrt(total) + h["epsilon"]
            return np.where(denominator == 0, 0.0, loss * lr * (step + h["l1"]) / denominator)
        regular = lr * (h.get("l1_regularization_strength", 0.0) + h.get("l2_regularization_strength", 0.0) * w)
        return np.asarray(np.abs(run_reference(case, 0 * w, g, slots, lr=lr)[0]) + regular)


def unstable(case: Case, w: Array, g: Array, lr: float, slots: list[Array]) -> Array:
    """Elements within rounding of a jump of the formula, where one bit decides."""
    w, g, *slots = (x.astype(np.float64) for x in (w, g, *slots))
    if case.algorithm == "lion":
        old, new = case.hyperparameters["beta1"] * slots[0], (1 - case.hyperparameters["beta1"]) * g
        return np.asarray((np.abs(old + new) <= 4 * UNIT * (np.abs(old) + np.abs(new))) & (old != 0))
    if case.algorithm in ("online_yogi", "proximal_yogi"):
        return np.asarray((np.abs(g * g - slots[0]) <= 4 * UNIT * slots[0]) & (slots[0] != 0))
    if case.algorithm == "frequency_estimator":
        limit = case.hyperparameters["outlier_threshold"] * w
        return np.asarray(np.abs(lr - slots[0] - limit) <= 4 * UNIT * np.abs(limit))
    return np.zeros(w.shape, dtype=bool)


@pytest.mark.parametrize("algorithm", HYPERPARAMETERS)
@settings(max_examples=60, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_float32_formula(algorithm: str, data: st.DataObject, seed: int) -> None:
    hyperparameters = {k: data.draw(v, label=k) for k, v in HYPERPARAMETERS[algorithm].items()}
    rate = st.integers(0, 2000).map(float) if algorithm == "frequency_estimator" else real(1e-4, 1.0)
    lr = data.draw(rate, label="lr")
    case = Case("", algorithm, frozenset(), hyperparameters)
    w, g, slots = make(case, seed)

    actual, expected = run(case, w, g, slots, lr=lr)[0], run_reference(case, w, g, slots, lr=lr)[0]
    size = update_size(case, w, g, lr, slots)
    weight = np.maximum(np.abs(w), np.abs(expected)) if algorithm not in ("ftrl", "online_yogi") else np.abs(expected)
    bound = UNIT * (WEIGHT_ROUNDINGS.get(algorithm, 1.0) * weight + ROUNDINGS.get(algorithm, 6.0) * size)
    stable = ~unstable(case, w, g, lr, slots)
    assert np.isfinite(expected).all()
    error = np.abs(actual - expected)
    assert (error <= bound)[stable].all(), f"error is {np.max(error / np.maximum(bound, 1e-45))} of the bound"
