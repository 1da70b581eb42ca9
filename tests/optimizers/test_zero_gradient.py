"""What a step with a zero gradient changes on a touched row."""

from __future__ import annotations

import numpy as np
import pytest

from tests.optimizers.cases import CASES, Case, run, run_reference, state


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_zero_gradient_changes_exactly_this(case: Case) -> None:
    w, g, slots = state(case, np.random.default_rng(0))
    stepped, reference = run(case, w, 0 * g, slots), run_reference(case, w, 0 * g, slots)
    for name, before, after, exact in zip(("w", *case.slot_names), (w, *slots), stepped, reference, strict=True):
        if name in case.zero_gradient_changes:
            assert (before != after).mean() > 0.5, f"{name} should change"
            assert (before != exact).mean() > 0.5, f"{name} should change"
        else:
            np.testing.assert_array_equal(before, after, err_msg=f"{name} should stay, to the bit")
            np.testing.assert_allclose(before, exact, rtol=1e-14, err_msg=name)


def variants(algorithm: str) -> list[Case]:
    return [case for case in CASES if case.algorithm == algorithm]


@pytest.mark.parametrize("case", variants("ftrl") + variants("online_yogi"), ids=lambda case: case.id)
def test_ftrl_keeps_a_weight_that_agrees_with_its_slots(case: Case) -> None:
    w, g, slots = state(case, np.random.default_rng(1))
    w, *slots = run(case, w, g, slots)  # now w is the value of (a, z)
    again, *_ = run(case, w, 0 * g, slots)
    np.testing.assert_array_equal(again, w)


@pytest.mark.parametrize("case", variants("ftrl") + variants("online_yogi"), ids=lambda case: case.id)
def test_ftrl_sets_a_weight_to_zero_at_a_first_touch_without_gradient(case: Case) -> None:
    w, g, slots = state(case, np.random.default_rng(2))
    slots[1] = np.zeros_like(w)
    touched, a, z = run(case, w, 0 * g, slots)
    np.testing.assert_array_equal(touched, 0.0)
    np.testing.assert_array_equal(a, slots[0])
    np.testing.assert_array_equal(z, 0.0)


def test_bounded_adagrad_brings_a_large_accumulator_down() -> None:
    case = next(case for case in variants("bounded_adagrad") if case.variant == "bounds")
    w, g, (a,) = state(case, np.random.default_rng(3))
    a[0] = 9.0
    w_new, a_new = run(case, w, 0 * g, [a])
    np.testing.assert_array_equal(w_new, w)
    np.testing.assert_array_equal(a_new[0], 4.0)
    np.testing.assert_array_equal(a_new[1:], a[1:])


@pytest.mark.parametrize("algorithm", ["adam", "momentum", "lion", "rms_prop", "centered_rms_prop", "proximal_yogi"])
def test_without_momentum_a_zero_gradient_leaves_the_weight(algorithm: str) -> None:
    case = variants(algorithm)[0]
    w, g, slots = state(case, np.random.default_rng(4))
    momentum = {"rms_prop": "mom", "centered_rms_prop": "mom", "proximal_yogi": "m"}.get(algorithm, "momenta")
    slots[case.slot_names.index(momentum)] = np.zeros_like(w)
    np.testing.assert_array_equal(run(case, w, 0 * g, slots)[0], w)
