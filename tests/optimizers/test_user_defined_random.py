"""Random user-defined optimizers: the translation gives what the NumPy interpreter gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.optimizers.cases import array, tensor
from tests.optimizers.random_programs import programs
from tpuemb_torch.config import hlo
from tpuemb_torch.optimizers import UserDefinedProgram, hlo_reference, hlo_translation
from tpuemb_torch.protos import hlo_pb2
from tpuemb_torch.report import program_formula

SPECIAL = [0.0, -0.0, 1.0, -1.0, 2.5, -0.5, 1e-3, 1e30, float("inf"), -float("inf"), float("nan")]
TINY = np.finfo(np.float32).tiny  # smaller results may be 0
PROPERTY = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


def inputs(module: hlo_pb2.HloModuleProto, seed: int, rows: int = 8, dim: int = 4) -> list[np.ndarray]:
    """Gradient, weights, slots and the scalar, with some special values."""
    rng = np.random.default_rng(seed)

    def values() -> np.ndarray:
        x = rng.normal(size=(rows, dim)) * 10.0 ** rng.integers(-3, 4, (rows, dim))
        return array(np.where(rng.random((rows, dim)) < 0.3, rng.choice(SPECIAL, (rows, dim)), x))

    scalar = [array(rng.uniform(0.01, 1.0))] if hlo.takes_dynamic_input(module) else []
    return [*(values() for _ in range(2 + hlo.count_slots(module))), *scalar]


def translated(module: hlo_pb2.HloModuleProto, given_inputs: list[np.ndarray]) -> list[np.ndarray]:
    gradient, weights, *rest = given_inputs
    slots = rest[: hlo.count_slots(module)]
    rate = rest[len(slots)] if len(rest) > len(slots) else array(0.1)
    rule = UserDefinedProgram(module.SerializeToString())
    kept = [x.copy() for x in given_inputs]
    outputs = rule.update(tensor(weights), tensor(gradient), tensor(rate), *map(tensor, slots))
    assert all(x.dtype == torch.float32 and x.shape == weights.shape for x in outputs)
    for x, y in zip(given_inputs, kept, strict=True):
        np.testing.assert_array_equal(x, y)
    return [x.numpy() for x in outputs]


@PROPERTY
@given(module=programs(), seed=st.integers(0, 2**32 - 1))
def test_exact_operations_agree_to_the_bit(module: hlo_pb2.HloModuleProto, seed: int) -> None:
    given_inputs = inputs(module, seed)
    actual = translated(module, given_inputs)
    expected = hlo_reference.interpret(module, given_inputs, precision=np.float32)
    assert len(actual) == len(expected) == 1 + hlo.count_slots(module)
    for a, e in zip(actual, expected, strict=True):
        e = np.broadcast_to(e, a.shape).astype(np.float32)
        np.testing.assert_array_equal(a, e)  # NaN where NaN
        np.testing.assert_array_equal(np.signbit(a)[a == 0], np.signbit(e)[e == 0])


@PROPERTY
@given(module=programs(approximate=True), seed=st.integers(0, 2**32 - 1))
def test_approximate_operations_agree_to_four_ulps(module: hlo_pb2.HloModuleProto, seed: int) -> None:
    given_inputs = inputs(module, seed)
    expected = hlo_reference.interpret(module, given_inputs, precision=np.float32)
    for a, e in zip(translated(module, given_inputs), expected, strict=True):
        e = np.broadcast_to(e, a.shape).astype(np.float32)
        same = (a == e) | (np.isnan(a) & np.isnan(e))
        with np.errstate(over="ignore", invalid="ignore"):
            ulps = np.spacing(np.maximum(np.abs(e), TINY)).astype(np.float64)
            close = np.abs(a.astype(np.float64) - e) <= np.where(np.abs(e) < TINY, TINY, 4.0 * ulps)
        assert (same | close).all(), (a[~same & ~close], e[~same & ~close])


@PROPERTY
@given(module=programs(), seed=st.integers(0, 2**32 - 1))
def test_a_row_does_not_depend_on_the_others(module: hlo_pb2.HloModuleProto, seed: int) -> None:
    given_inputs = inputs(module, seed)
    together = translated(module, given_inputs)
    rows = slice(2, 5)
    alone = translated(module, [x if x.ndim == 0 else x[rows] for x in given_inputs])
    for a, t in zip(alone, together, strict=True):
        np.testing.assert_array_equal(a, t[rows])


@PROPERTY
@given(module=programs(approximate=True))
def test_every_program_has_a_formula(module: hlo_pb2.HloModuleProto) -> None:
    lines = program_formula(module.SerializeToString())
    names = ["w", *(f"Slot_{i}" for i in range(hlo.count_slots(module)))]
    assigned = [line.split(" = ")[0] for line in lines]
    assert len(assigned) == len(set(assigned))
    assert {f"{name}'" for name in names} <= set(assigned)


@pytest.mark.slow
@settings(max_examples=5, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(module=programs(), seed=st.integers(0, 2**32 - 1))
def test_compiled_programs_agree(module: hlo_pb2.HloModuleProto, seed: int) -> None:
    """Through the real code generator."""
    rule = UserDefinedProgram(module.SerializeToString())
    gradient, weights, *rest = map(tensor, inputs(module, seed))
    slots = rest[: hlo.count_slots(module)]
    rate = rest[-1] if len(rest) > len(slots) else tensor(0.1)
    torch._dynamo.reset()
    compiled = torch.compile(rule.update, fullgraph=True, dynamic=True)(weights, gradient, rate, *slots)
    for a, e in zip(compiled, rule.update(weights, gradient, rate, *slots), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_remainders_of_numbers_far_apart() -> None:
    """Enough elements for vectorized code, with quotients beyond float32."""
    rng = np.random.default_rng(0)
    a, b = (array(rng.normal(size=4096) * 10.0 ** rng.integers(-30, 31, 4096)) for _ in range(2))
    actual = hlo_translation._remainder(tensor(a), tensor(b)).numpy()
    np.testing.assert_array_equal(actual, np.fmod(a, b))
