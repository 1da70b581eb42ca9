"""The contract every rule keeps: registry, slots, purity, shapes, NaN."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch

from tests.optimizers.cases import CASES, STEP, Case, run, run_reference, state, tensor
from tpuemb_torch.config.schema import LearningRate, Optimizer
from tpuemb_torch.optimizers import StepNumbers, apply_step, create_rule, rule_class, rules
from tpuemb_torch.protos.optimization_parameters_pb2 import OptimizationParameters

# Algorithm: part of the op names, slots with initial values. The order is that of checkpoints and ops.
SLOTS = {
    "adagrad": ("Adagrad", {"accumulators": 0.1}),
    "adagrad_momentum": ("AdagradMomentum", {"accumulators": 0.1, "momenta": 0.0}),
    "bounded_adagrad": (None, {"accumulators": 0.1}),
    "frequency_aware_adagrad": (None, {"accumulators": 0.1, "counters": 0.0}),
    "stochastic_gradient_descent": ("StochasticGradientDescent", {}),
    "ftrl": ("FTRL", {"accumulators": 0.1, "linears": 0.0}),
    "adam": ("ADAM", {"momenta": 0.0, "velocities": 0.0}),
    "momentum": ("Momentum", {"momenta": 0.0}),
    "lion": (None, {"momenta": 0.0}),
    "rms_prop": ("RMSProp", {"ms": 1.0, "mom": 0.0}),
    "centered_rms_prop": ("CenteredRMSProp", {"ms": 1.0, "mom": 0.0, "mg": 0.0}),
    "adadelta": ("Adadelta", {"accumulators": 0.0, "updates": 0.0}),
    "proximal_adagrad": ("ProximalAdagrad", {"accumulators": 0.1}),
    "online_yogi": (None, {"vs": 0.1, "linears": 0.0}),
    "proximal_yogi": ("ProximalYogi", {"v": 0.1, "m": 0.0}),
    "frequency_estimator": ("FrequencyEstimator", {"last_hit_step": 0.0}),
    "assign": (None, {}),
    "mdl_adagrad_light": ("MDLAdagradLight", {"accumulators": 0.1, "weights": 0.0, "benefits": 0.0}),
    "user_defined_program": (None, {}),  # those of the program
}


def test_every_rule_has_slots_and_a_row_in_the_table() -> None:
    assert set(rules()) == set(SLOTS) == {case.algorithm for case in CASES}


@pytest.mark.parametrize("algorithm", SLOTS)
def test_slots_and_op_names(algorithm: str) -> None:
    op_name, slots = SLOTS[algorithm]
    rule = rule_class(algorithm)
    assert rule.algorithm == algorithm
    assert rule.op_name == op_name
    assert [(slot.name, slot.initial) for slot in rule.slots] == list(slots.items())


@pytest.mark.parametrize("algorithm", SLOTS)
def test_hyperparameters_are_the_scalar_fields_of_the_proto(algorithm: str) -> None:
    message = OptimizationParameters.DESCRIPTOR.fields_by_name[algorithm].message_type
    assert message is not None
    scalars = {f.name: f.default_value for f in message.fields if f.message_type is None}
    rule = rule_class(algorithm)
    assert {name: getattr(rule, name) for name in inspect.get_annotations(rule)} == scalars


@pytest.mark.parametrize("algorithm", ["sgd", "", "Adam"])
def test_an_algorithm_without_a_rule_is_refused_by_name(algorithm: str) -> None:
    with pytest.raises(NotImplementedError, match=rf"'{algorithm}'.*stochastic_gradient_descent"):
        create_rule(Optimizer(algorithm, {}, LearningRate(constant=0.1)))


def test_an_unknown_hyperparameter_is_refused() -> None:
    with pytest.raises(TypeError, match=r"adam has no hyper-parameter 'beta3'; it has: beta1, beta2"):
        rule_class("adam")({"beta3": 0.9})


@pytest.mark.parametrize("exponent", [0.0, -2.0, float("nan")])
def test_adagrad_momentum_needs_a_positive_exponent(exponent: float) -> None:
    with pytest.raises(ValueError, match=rf"exponent is {exponent}, must be > 0"):
        rule_class("adagrad_momentum")({"exponent": exponent})


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_only_the_non_lazy_variants_sweep(case: Case) -> None:
    assert case.rule.sweeps_all_rows == (case.variant == "sweep")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_update_returns_new_float32_tensors_and_leaves_its_inputs(case: Case) -> None:
    w, g, slots = state(case, np.random.default_rng(0))
    inputs = [tensor(x) for x in (w, g, *slots)]
    kept = [x.clone() for x in inputs]
    numbers = StepNumbers(lr=tensor(case.learning_rate), step=tensor(STEP))
    outputs = apply_step(case.rule, numbers, *inputs)
    assert len(outputs) == 1 + len(case.slot_names)
    assert all(x.dtype == torch.float32 and x.shape == w.shape for x in outputs)
    assert all(torch.equal(x, y) for x, y in zip(inputs, kept, strict=True))
    changed = [not torch.equal(x, y) for x, y in zip(outputs, (kept[0], *kept[2:]), strict=True)]
    assert all(changed), "a gradient moves the weight and every slot"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_the_formula_is_the_reference(case: Case) -> None:
    w, g, slots = state(case, np.random.default_rng(1), (64, 4))
    for _ in range(3):
        actual, expected = run(case, w, g, slots), run_reference(case, w, g, slots)
        for a, e in zip(actual, expected, strict=True):
            np.testing.assert_allclose(a, e, rtol=2e-5, atol=2e-6)
        w, slots = actual[0], actual[1:]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_rate_per_row_is_that_rate_on_that_row(case: Case) -> None:
    w, g, slots = state(case, np.random.default_rng(2))
    rates = case.learning_rate * (1.0 + np.arange(len(w), dtype=np.float32)[:, None] / 8)
    together = run(case, w, g, slots, lr=rates, step=STEP + rates)
    for i, rate in enumerate(rates):
        rows = slice(i, i + 1)
        alone = run(case, w[rows], g[rows], [x[rows] for x in slots], lr=rate[0], step=np.float32(STEP) + rate[0])
        for a, t in zip(alone, together, strict=True):
            np.testing.assert_allclose(a, t[rows], rtol=1e-6)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("zero_slots", [False, True])
def test_a_nan_gradient_shows_in_its_weight_and_nowhere_else(case: Case, zero_slots: bool) -> None:
    w, g, slots = state(case, np.random.default_rng(3))
    if zero_slots:  # where a denominator may be 0
        slots = [np.zeros_like(x) for x in slots]
    clean = run(case, w, g, slots)
    g = g.copy()
    g[3, 4] = np.nan
    for out, expected in zip(run(case, w, g, slots), clean, strict=True):
        others = np.ones_like(g, dtype=bool)
        others[3, 4] = False
        np.testing.assert_array_equal(out[others], expected[others])
    if case.algorithm != "frequency_estimator":  # does not look at the gradient
        assert np.isnan(run(case, w, g, slots)[0][3, 4])
        assert np.isnan(run_reference(case, w, g, slots)[0][3, 4])


@pytest.mark.parametrize("case", [c for c in CASES if c.algorithm != "assign"], ids=lambda case: case.id)
def test_a_nan_weight_stays_nan(case: Case) -> None:
    w, g, slots = state(case, np.random.default_rng(4))
    w[0, 0] = np.nan
    assert np.isnan(run(case, w, g, slots)[0][0, 0])
    assert np.isnan(run_reference(case, w, g, slots)[0][0, 0])


def test_frequency_aware_adagrad_asks_for_its_step() -> None:
    case = next(case for case in CASES if case.algorithm == "frequency_aware_adagrad")
    w, g, slots = state(case, np.random.default_rng(5))
    with pytest.raises(TypeError, match="step counter"):
        case.rule.update(tensor(w), tensor(g), tensor(0.1), *map(tensor, slots))
    with pytest.raises(TypeError, match="step counter"):
        case.rule.reference(w, g, 0.1, *slots)
