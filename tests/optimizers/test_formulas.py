"""Single points of the formulas that ports get wrong, with values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.optimizers.cases import CASES, Case, array, as_float32, run, run_reference, state, tensor
from tpuemb_torch.optimizers import rule_class

INF, NAN = float("inf"), float("nan")


def step(algorithm: str, w: float, g: float, lr: float, *slots: float, **hyperparameters: float | bool) -> list[float]:
    """One step on one element, by the tensor formula, after comparing it to the reference."""
    rule = rule_class(algorithm)({name: as_float32(value) for name, value in hyperparameters.items()})
    inputs = [array([x]) for x in (w, g, *slots)]
    w32, g32, *slots32 = map(tensor, inputs)
    w64, g64, *slots64 = (x.astype(np.float64) for x in inputs)
    single = rule.update(w32, g32, tensor(lr), *slots32)
    double = rule.reference(w64, g64, float(np.float32(lr)), *slots64)
    result = [x.item() for x in single]
    np.testing.assert_allclose(result, np.concatenate(double), rtol=1e-5, atol=1e-7)
    return result


# --- Where epsilon sits: with v = 0.01 and epsilon = 0.01 the positions differ by far more than 1e-3 ---


def test_adam_epsilon_is_outside_the_root_or_squared_inside() -> None:
    options = {"beta1": 0.0, "beta2": 1.0, "epsilon": 0.01}
    outside = step("adam", 0.0, 1.0, 1.0, 0.0, 0.01, **options)[0]
    inside = step("adam", 0.0, 1.0, 1.0, 0.0, 0.01, use_sum_inside_sqrt=True, **options)[0]
    assert outside == pytest.approx(-1 / (math.sqrt(0.01) + 0.01), rel=1e-5)  # -9.09
    assert inside == pytest.approx(-1 / math.sqrt(0.01 + 0.01**2), rel=1e-5)  # -9.95; not squared: -7.07


def test_adam_has_no_bias_correction() -> None:
    w, m, v = step("adam", 0.0, 1.0, 0.1, 0.0, 0.0, beta1=0.9, beta2=0.99)
    assert (m, v) == pytest.approx((0.1, 0.01), rel=1e-5)
    assert w == pytest.approx(-0.1 * 0.1 / math.sqrt(0.01), rel=1e-5)  # with bias correction: -0.1 * 1 / 1


def test_adagrad_has_no_epsilon() -> None:
    assert step("adagrad", 0.0, 1e-4, 1.0, 0.0)[0] == pytest.approx(-1.0, rel=1e-5)  # g / (|g| + 1e-7): -0.999


def test_adagrad_momentum_epsilon_is_inside_the_power_and_not_stored() -> None:
    options = {"momentum": 0.0, "exponent": 2.0, "beta2": 1.0, "epsilon": 0.01}
    w, a, m = step("adagrad_momentum", 0.0, 0.1, 1.0, 0.0, 0.0, **options)
    assert a == pytest.approx(0.01, rel=1e-5)
    assert m == pytest.approx(0.1 / math.sqrt(0.01 + 0.01), rel=1e-5)  # outside: 0.1 / 0.11
    assert w == pytest.approx(-m, rel=1e-6)


@pytest.mark.parametrize(("algorithm", "slots"), [("rms_prop", (0.01, 0.0)), ("centered_rms_prop", (0.01, 0.0, 0.0))])
def test_rms_prop_epsilon_is_inside_the_root_not_squared(algorithm: str, slots: tuple[float, ...]) -> None:
    w = step(algorithm, 0.0, 1.0, 1.0, *slots, rho=1.0, epsilon=0.01)[0]
    assert w == pytest.approx(-1 / math.sqrt(0.01 + 0.01), rel=1e-5)  # outside: -9.09; squared: -9.95


def test_adadelta_epsilon_is_inside_both_roots() -> None:
    w = step("adadelta", 0.0, 1.0, 1.0, 0.04, 0.01, rho=1.0, epsilon=0.01)[0]
    assert w == pytest.approx(-math.sqrt(0.01 + 0.01) / math.sqrt(0.04 + 0.01), rel=1e-5)


def test_proximal_yogi_epsilon_is_outside_the_root() -> None:
    w = step("proximal_yogi", 0.0, 1.0, 1.0, 0.01, 0.0, beta1=0.0, beta2=1.0, epsilon=0.01)[0]
    assert w == pytest.approx(-1 / (math.sqrt(0.01) + 0.01), rel=1e-5)


# --- Zero denominators ---


@pytest.mark.parametrize(
    ("algorithm", "slots", "options"),
    [
        ("adagrad", (0.0,), {}),
        ("proximal_adagrad", (0.0,), {"l1": 0.1, "l2": 0.1}),
        ("bounded_adagrad", (0.0,), {}),
        ("bounded_adagrad", (0.0,), {"max_var_update": 0.1}),
        ("bounded_adagrad", (0.0,), {"update_accumulator_first": True, "max_var_update": 0.1}),
        ("adagrad_momentum", (0.0, 0.0), {"exponent": 2.0, "beta2": 1.0}),
        ("adam", (0.0, 0.0), {"beta1": 0.9, "beta2": 0.99}),
        ("adam", (0.0, 0.0), {"beta1": 0.9, "beta2": 0.99, "use_sum_inside_sqrt": True}),
        ("adam", (0.5, 0.0), {"beta1": 0.9, "beta2": 0.99}),
        ("rms_prop", (0.0, 0.0), {"rho": 0.9}),
        ("adadelta", (0.0, 0.5), {"rho": 0.9}),
        ("proximal_yogi", (0.0, 0.5), {"beta1": 0.9, "beta2": 0.99, "l1": 0.1, "l2": 0.1}),
    ],
)
def test_a_zero_denominator_leaves_the_weight(
    algorithm: str, slots: tuple[float, ...], options: dict[str, float | bool]
) -> None:
    assert step(algorithm, 0.7, 0.0, 0.1, *slots, **options)[0] == np.float32(0.7)


@pytest.mark.parametrize(("algorithm", "options"), [("ftrl", {"lr_power": -0.5}), ("online_yogi", {"beta2": 0.9})])
def test_ftrl_with_a_zero_denominator_is_zero(algorithm: str, options: dict[str, float | bool]) -> None:
    assert step(algorithm, 0.7, 0.0, 0.1, 0.0, 0.0, **options) == [0.0, 0.0, 0.0]
    assert step(algorithm, 0.7, 0.0, 0.1, 0.0, 0.3, **options)[0] == 0.0


@pytest.mark.parametrize("g", [0.3, -0.3])
@pytest.mark.parametrize("bound", [0.0, 0.25])
def test_bounded_adagrad_with_a_zero_accumulator_takes_the_bound(g: float, bound: float) -> None:
    w = step("bounded_adagrad", 1.0, g, 0.1, 0.0, max_var_update=bound)[0]
    assert w == 1.0 - math.copysign(bound, g)


def test_bounded_adagrad_bounds_the_update_and_the_accumulator() -> None:
    w, a = step("bounded_adagrad", 1.0, 3.0, 0.1, 4.0, update_accumulator_first=True, max_accumulator=9.0)
    assert (w, a) == pytest.approx((1.0 - 0.1 * 3 / 3, 9.0))
    w, a = step("bounded_adagrad", 1.0, 3.0, 0.1, 4.0, max_accumulator=9.0)
    assert (w, a) == pytest.approx((1.0 - 0.1 * 3 / 2, 9.0))
    w, a = step("bounded_adagrad", 1.0, -3.0, 0.1, 4.0, max_var_update=0.05)
    assert (w, a) == pytest.approx((1.05, 13.0))


# --- FTRL ---


@pytest.mark.parametrize("multiply", [False, True])
def test_ftrl_quadratic_term_is_power_plus_beta_over_lr_plus_twice_l2(multiply: bool) -> None:
    """(sigma + beta) / lr + 2 * l2: l2 enters twice, once."""
    options = {"lr_power": -0.5, "l2": 0.3, "beta": 0.7, "multiply_linear_by_lr": multiply}
    z = 0.1 if multiply else 1.0  # the multiplied form carries lr in z
    w, a, _ = step("ftrl", 0.0, 1.0, 0.1, 3.0, z, **options)
    assert a == 4.0
    assert w == pytest.approx(-2.0 / ((math.sqrt(4.0) + 0.7) / 0.1 + 2 * 0.3), rel=1e-5)


@pytest.mark.parametrize("lr_power", [-0.5, -0.6])
@pytest.mark.parametrize("multiply", [False, True])
def test_ftrl_with_nonzero_weight(lr_power: float, multiply: bool) -> None:
    """The linear term subtracts sigma * w."""
    w, a, z = step("ftrl", 0.4, 2.0, 0.5, 1.0, 0.3, lr_power=lr_power, l1=0.1, multiply_linear_by_lr=multiply)
    sigma = (5.0**-lr_power - 1.0) / 0.5
    linear = (0.3 / 0.5 if multiply else 0.3) + 2.0 - sigma * 0.4
    assert a == 5.0
    assert z == pytest.approx(0.5 * linear if multiply else linear, rel=1e-5)
    assert w == pytest.approx((0.1 - linear) / (5.0**-lr_power / 0.5), rel=1e-5)


def test_ftrl_beta_is_l2_over_the_rate() -> None:
    beta = step("ftrl", 0.4, 1.0, 0.1, 1.0, 0.3, lr_power=-0.5, beta=0.8)
    l2 = step("ftrl", 0.4, 1.0, 0.1, 1.0, 0.3, lr_power=-0.5, l2=0.8 / (2 * 0.1))
    assert beta == pytest.approx(l2, rel=1e-6)


def test_ftrl_with_a_zero_accumulator() -> None:
    assert step("ftrl", 1.0, 1.0, 0.1, 0.0, 0.0, lr_power=-0.5) == pytest.approx([0.9, 1.0, -9.0], rel=1e-5)
    multiplied = step("ftrl", 1.0, 1.0, 0.1, 0.0, 0.0, lr_power=-0.5, multiply_linear_by_lr=True)
    assert multiplied == pytest.approx([0.9, 1.0, -0.9], rel=1e-5)


def test_ftrl_first_touch_without_gradient_zeroes_the_weight() -> None:
    assert step("ftrl", 1.0, 0.0, 0.1, 0.1, 0.0, lr_power=-0.5) == [0.0, pytest.approx(0.1), 0.0]


def test_ftrl_with_a_zero_rate() -> None:
    """The plain form divides by it, as TensorFlow's CPU kernel does; the multiplied form stays finite."""
    plain = step("ftrl", 1.0, 1.0, 0.0, 0.1, 0.0, lr_power=-0.5)
    np.testing.assert_array_equal(plain, array([NAN, 1.1, -INF]))
    plain = step("ftrl", 1.0, 0.0, 0.0, 0.1, 0.0, lr_power=-0.5)
    np.testing.assert_array_equal(plain, array([0.0, 0.1, NAN]))
    multiplied = step("ftrl", 1.0, 1.0, 0.0, 0.1, 0.0, lr_power=-0.5, multiply_linear_by_lr=True)
    assert multiplied == pytest.approx([0.69848859, 1.1, -0.73258], rel=1e-5)


def test_ftrl_ignores_allow_zero_accumulator() -> None:
    values = (1.0, 1.0, 0.1, 0.0, 0.0)
    assert step("ftrl", *values, lr_power=-0.5, allow_zero_accumulator=True) == step("ftrl", *values, lr_power=-0.5)


def test_online_yogi_is_ftrl_with_the_second_moment_of_yogi() -> None:
    w, v, z = step("online_yogi", 0.4, 2.0, 0.1, 1.0, -0.3, beta2=0.75, l1=0.01, l2=0.3)
    assert v == 2.0  # 1 + 0.25 * 4
    assert z == pytest.approx(-0.3 + 2.0 - (math.sqrt(2.0) - 1.0) / 0.1 * 0.4, rel=1e-5)
    assert w == pytest.approx((math.copysign(0.01, z) - z) / (math.sqrt(2.0) / 0.1 + 2 * 0.3), rel=1e-5)


# --- Signs, order of old and new values ---


def test_lion_uses_the_old_momentum_in_both_lines() -> None:
    w, m = step("lion", 1.0, 1.0, 0.1, -0.05, beta1=0.9, beta2=0.5)
    assert (w, m) == pytest.approx((0.9, 0.475))  # c = -0.045 + 0.1 > 0
    assert step("lion", 1.0, 0.0, 0.1, 0.0, beta1=0.9, beta2=0.5) == [1.0, 0.0]  # sign(0) = 0


@pytest.mark.parametrize("algorithm", ["proximal_yogi", "online_yogi"])
@pytest.mark.parametrize(("v", "expected"), [(0.25, 0.375), (0.5, 0.375), (0.125, 0.25)])
def test_yogi_adds_where_the_square_is_not_below_v(algorithm: str, v: float, expected: float) -> None:
    slot = 1  # v is the first slot of both
    assert step(algorithm, 0.1, 0.5, 0.1, v, 0.0, beta2=0.5)[slot] == expected  # g^2 = 0.25, s(0) = +1


def test_adadelta_uses_the_old_updates() -> None:
    w, a, d = step("adadelta", 0.0, 2.0, 1.0, 0.0, 1.0, rho=0.5)
    assert a == 2.0
    assert w == pytest.approx(-math.sqrt(1.0 / 2.0) * 2.0, rel=1e-5)
    assert d == pytest.approx(0.5 + 0.5 * 2.0, rel=1e-5)


def test_momentum_nesterov_uses_the_new_momentum() -> None:
    assert step("momentum", 0.0, 1.0, 0.1, 2.0, momentum=0.5) == pytest.approx([-0.2, 2.0])
    assert step("momentum", 0.0, 1.0, 0.1, 2.0, momentum=0.5, use_nesterov=True) == pytest.approx([-0.2, 2.0])
    assert step("momentum", 0.0, 1.0, 0.1, 4.0, momentum=0.5, use_nesterov=True) == pytest.approx([-0.25, 3.0])


def test_adagrad_momentum_applies_momentum_to_the_scaled_gradient() -> None:
    """And not to the preconditioner alone: with g = 0 the momentum goes on."""
    options = {"momentum": 0.5, "exponent": 2.0, "beta2": 1.0}
    assert step("adagrad_momentum", 0.0, 0.0, 0.1, 4.0, 1.0, **options) == pytest.approx([-0.05, 4.0, 0.5])
    w, a, m = step("adagrad_momentum", 0.0, 2.0, 0.1, 12.0, 1.0, use_nesterov=True, **options)
    assert (a, m) == (16.0, 1.0)  # s = 2 / 4
    assert w == pytest.approx(-0.1 * (0.5 * 1.0 + 0.5))


def test_rms_prop_keeps_the_rate_in_its_momentum() -> None:
    w, _, mom = step("rms_prop", 0.0, 1.0, 0.1, 1.0, 0.5, rho=1.0, momentum=0.5)
    assert (w, mom) == pytest.approx((-0.35, 0.35))


def test_proximal_adagrad_shrinks_then_divides() -> None:
    w, a = step("proximal_adagrad", 1.0, 0.0, 0.5, 4.0, l1=0.4, l2=2.0)
    assert (w, a) == pytest.approx(((1.0 - 0.25 * 0.4) / (1.0 + 0.25 * 2.0), 4.0))
    assert step("proximal_adagrad", 0.05, 0.0, 0.5, 4.0, l1=0.4, l2=2.0)[0] == 0.0


def test_proximal_yogi_shrinks_then_divides() -> None:
    options = {"beta1": 0.5, "beta2": 1.0, "l1": 0.4, "l2": 2.0}
    w, v, m = step("proximal_yogi", 1.0, 0.0, 0.5, 4.0, 0.8, **options)
    assert (v, m) == pytest.approx((4.0, 0.4))
    assert w == pytest.approx((1.0 - 0.25 * 0.4 - 0.25 * 0.4) / (1.0 + 0.25 * 2.0))


@pytest.mark.parametrize(
    ("w", "h", "now", "expected"),
    [(10.0, 0.0, 4.0, 0.9 * 10 + 0.1 * 4), (10.0, 0.0, 20.0, 15.0), (10.0, 0.0, 19.0, 0.9 * 10 + 0.1 * 15)],
)
def test_frequency_estimator(w: float, h: float, now: float, expected: float) -> None:
    options = {"tau": 0.1, "max_delta": 15.0, "outlier_threshold": 2.0, "weight_exponent": 3.0}
    assert step("frequency_estimator", w, 123.0, now, h, **options) == pytest.approx([expected, now])


def frequency_aware(step: float, counter: float, variant: str = "") -> list[float]:
    case = next(c for c in CASES if c.algorithm == "frequency_aware_adagrad" and c.variant == variant)
    w, g, *slots = (array([[x]]) for x in (-2.0, 0.2, 0.4, counter))
    return [x.item() for x in run(case, w, g, slots, step=step)]


def test_frequency_aware_adagrad_raises_the_rate_of_rare_rows() -> None:
    a = 0.9 * 0.4 + 0.2**2
    unit = 0.1 * 0.2 / math.sqrt(a)
    assert frequency_aware(36.0, 3.0) == pytest.approx([-2.0 - 3.0 * unit, a, 4.0], rel=1e-6)  # (36 / 4)^0.5
    assert frequency_aware(0.0, 0.0)[0] == pytest.approx(-2.0 - unit, rel=1e-6)  # the step is at least 1
    assert frequency_aware(36.0, 3.0, "cap")[0] == pytest.approx(-2.0 - 1.5 * unit, rel=1e-6)
    assert frequency_aware(36.0, 3.0, "l1")[0] == pytest.approx(-2.0 - 3.0 * unit + 0.1 * 0.1, rel=1e-6)
    assert frequency_aware(36.0, 3.0, "l2")[0] == pytest.approx(-2.0 - 3.0 * unit + 0.1 * 0.1 * 2.0, rel=1e-6)


def test_frequency_aware_adagrad_takes_unset_fields_as_zeros() -> None:
    case = Case("", "frequency_aware_adagrad", frozenset())
    w, g, slots = state(case, np.random.default_rng(0))
    for outputs in (run(case, w, g, slots), run_reference(case, w, g, slots)):
        np.testing.assert_array_equal(outputs[0], w)  # max_lr_multiplier = 0
        np.testing.assert_allclose(outputs[1], g * g, rtol=1e-6)  # accumulator_decay = 0
        np.testing.assert_array_equal(outputs[2], slots[1] + 1)
    outputs = run(case, w, 0 * g, slots)
    np.testing.assert_array_equal(outputs[0], w)
    np.testing.assert_array_equal(outputs[1], 0.0)


# --- Learning rate 0: slots still move (no short cut) ---

IN_WEIGHT_ONLY = (
    "adagrad",
    "adagrad_momentum",
    "adam",
    "momentum",
    "lion",
    "adadelta",
    "proximal_adagrad",
    "proximal_yogi",
)


@pytest.mark.parametrize("case", [c for c in CASES if c.algorithm in IN_WEIGHT_ONLY], ids=lambda case: case.id)
def test_a_zero_rate_moves_the_slots_only(case: Case) -> None:
    w, g, slots = state(case, np.random.default_rng(0))
    still, *slots_still = run(case, w, g, slots, lr=0.0)
    _, *slots_moved = run(case, w, g, slots)
    np.testing.assert_array_equal(still, w)
    for a, b, before in zip(slots_still, slots_moved, slots, strict=True):
        np.testing.assert_array_equal(a, b)
        assert (a != before).all()
