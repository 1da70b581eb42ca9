"""Simulated quantization of looked-up rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.golden import golden
from tpuemb_torch.optimizers import quantize, quantize_reference


def test_recorded_values() -> None:
    with np.load(golden("lookups/quantization.npz")) as file:
        arrays = dict(file)
    cases = sorted({name.split(".")[0] for name in arrays})
    assert cases
    for case in cases:
        lower, upper, buckets = arrays[f"{case}.lower_upper_buckets"].tolist()
        x = arrays[f"{case}.input"]
        single = quantize(torch.from_numpy(x), lower, upper, buckets).numpy()
        # On a boundary between two buckets float32 and float64 may differ by a bucket; not so in the same precision.
        np.testing.assert_allclose(single, arrays[f"{case}.f4"], rtol=1e-5, atol=1e-6, err_msg=case)
        double = quantize_reference(x.astype(np.float64), lower, upper, int(buckets))
        np.testing.assert_allclose(double, arrays[f"{case}.f8"], rtol=1e-9, atol=1e-12, err_msg=case)


def test_half_way_goes_up_not_to_even() -> None:
    x = torch.tensor([-5.0, 0.49, 0.5, 1.5, 2.5, 2.49, 9.0])
    expected = [0.0, 0.0, 1.0, 2.0, 3.0, 2.0, 3.0]
    assert quantize(x, 0.0, 3.0, 4).tolist() == expected
    assert quantize_reference(x.double().numpy(), 0.0, 3.0, 4).tolist() == expected


def test_nan_and_infinity() -> None:
    x = [float("nan"), float("inf"), -float("inf")]
    expected = [float("nan"), 1.0, -1.0]
    np.testing.assert_array_equal(quantize(torch.tensor(x), -1.0, 1.0, 3), expected)
    np.testing.assert_array_equal(quantize_reference(np.array(x), -1.0, 1.0, 3), expected)


def test_numbers_per_row_and_zero_buckets_leave_a_row() -> None:
    x = torch.tensor([[0.3, 7.0], [0.3, 7.0], [0.3, 7.0]])
    inf = float("inf")
    result = quantize(
        x, torch.tensor([[0.0], [-inf], [0.0]]), torch.tensor([[1.0], [inf], [8.0]]), torch.tensor([[2], [0], [3]])
    )
    assert torch.equal(result, torch.tensor([[0.0, 1.0], [0.3, 7.0], [0.0, 8.0]]))


@given(
    lower=st.floats(-10, 9, width=32),
    width=st.floats(0.125, 10, width=32),
    buckets=st.integers(2, 300),
    seed=st.integers(0, 99),
)
def test_float32_is_float64_up_to_a_boundary(lower: float, width: float, buckets: int, seed: int) -> None:
    upper = float(np.float32(lower + width))
    x = np.random.default_rng(seed).uniform(lower - 1, upper + 1, 200).astype(np.float32)
    single = quantize(torch.from_numpy(x), lower, upper, buckets).numpy()
    double = quantize_reference(x.astype(np.float64), lower, upper, buckets)
    q = (upper - lower) / (buckets - 1)
    position = (np.clip(x.astype(np.float64), lower, upper) - lower) / q + 0.5
    tolerance = 8 * float(np.finfo(np.float32).eps) * (abs(lower) + abs(upper))
    far = np.abs(position - np.round(position)) * q > tolerance
    np.testing.assert_allclose(single[far], double[far], rtol=0, atol=tolerance)
    np.testing.assert_allclose(single, double, rtol=0, atol=q + tolerance)


@pytest.mark.parametrize("buckets", [2, 3, 16, 255])
def test_quantized_values_are_fixed_points(buckets: int) -> None:
    once = quantize(torch.linspace(-2, 2, 1001), -1.0, 1.0, buckets)
    torch.testing.assert_close(quantize(once, -1.0, 1.0, buckets), once, rtol=0, atol=1e-6)
    assert len(set(once.tolist())) <= 2 * buckets  # a level may come out as two neighbouring floats
    assert [once.min().item(), once.max().item()] == [-1.0, 1.0]
