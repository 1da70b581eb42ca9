"""Every recorded trajectory of another implementation, step for step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.golden import GOLDEN, golden
from tests.optimizers.cases import numbers
from tpuemb_torch.config import load_config
from tpuemb_torch.config.schema import Optimizer
from tpuemb_torch.optimizers import apply_step, create_rule, reference_step, rules

pytestmark = pytest.mark.filterwarnings("ignore::tpuemb_torch.config.ConfigWarning")

FOLDER = "optimizers"
NAMES = (
    sorted(str(file.relative_to(GOLDEN / FOLDER).with_suffix("")) for file in (GOLDEN / FOLDER).glob("*/*.npz"))
    if GOLDEN
    else ["missing"]
)
Arrays = dict[str, np.ndarray]


def load(name: str) -> tuple[Optimizer, dict[str, Any], Arrays]:
    """Returns the table's optimizer, the description, and the arrays of a trajectory."""
    path = golden(Path(FOLDER) / f"{name}.npz")
    optimizer = load_config(path.with_suffix(".pb")).tables[0].optimizer
    if optimizer.algorithm not in rules():
        pytest.skip(f"{optimizer.algorithm} has no update rule")
    with np.load(path) as file:
        return optimizer, json.loads(path.with_suffix(".json").read_text()), dict(file)


def steps(arrays: Arrays) -> Iterator[tuple[int, np.ndarray, np.ndarray, np.ndarray]]:
    t = 1
    while f"ids.{t}" in arrays:
        yield t, arrays[f"ids.{t}"], arrays[f"grads.{t}"], arrays[f"lr.{t}"]
        t += 1


def slot_names(optimizer: Optimizer) -> list[str]:
    return ["parameters", *(slot.name for slot in create_rule(optimizer).slots)]


def touched(optimizer: Optimizer, arrays: Arrays, ids: np.ndarray, g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows of the step and their gradients: all rows, with 0 elsewhere, for an optimizer that sweeps."""
    if not create_rule(optimizer).sweeps_all_rows:
        return ids, g
    dense = np.zeros_like(arrays["parameters.0"])
    dense[ids] = g
    return np.arange(len(dense)), dense


@pytest.mark.parametrize("name", NAMES)
def test_float32(name: str) -> None:
    optimizer, description, arrays = load(name)
    names = slot_names(optimizer)
    assert names[1:] == description["slots"]
    rule = create_rule(optimizer)
    state = [torch.from_numpy(arrays[f"{slot}.0"].copy()) for slot in names]
    for t, ids, g, lr in steps(arrays):
        rows, gradients = touched(optimizer, arrays, ids, g)
        stepped = apply_step(
            rule, numbers(optimizer, lr), state[0][rows], torch.from_numpy(gradients), *(s[rows] for s in state[1:])
        )
        for values, new in zip(state, stepped, strict=True):
            values[rows] = new
        for slot, values in zip(names, state, strict=True):
            compare(values.numpy(), arrays, slot, t, "", rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_float64(name: str) -> None:
    optimizer, _, arrays = load(name)
    names = slot_names(optimizer)
    prefix = "f64." if "f64.parameters.1" in arrays else ""
    # A cube root holds float32(1/3) there; single precision where no float64 run was recorded.
    single = prefix == "" or optimizer.hyperparameters.get("exponent") == 3.0
    rtol, atol = (1e-5, 1e-7) if single else (1e-9, 1e-12)
    state = [arrays[f"{slot}.0"].astype(np.float64) for slot in names]
    for t, ids, g, lr in steps(arrays):
        rows, gradients = touched(optimizer, arrays, ids, g)
        stepped = reference_step(optimizer, state[0][rows], gradients, lr, *(s[rows] for s in state[1:]))
        for values, new in zip(state, stepped, strict=True):
            values[rows] = new
        for slot, values in zip(names, state, strict=True):
            compare(values, arrays, slot, t, prefix, rtol=rtol, atol=atol)


def compare(actual: np.ndarray, arrays: Arrays, slot: str, t: int, prefix: str, rtol: float, atol: float) -> None:
    """Compares one array; where the record is NaN on purpose (0 / 0), ours has to be finite."""
    expected = arrays[f"{prefix}{slot}.{t}"]
    recorded = ~np.isnan(expected)
    np.testing.assert_allclose(
        actual[recorded], expected[recorded], rtol=rtol, atol=atol, err_msg=f"{slot} after step {t}"
    )
    assert np.isfinite(actual[~recorded]).all(), f"{slot} after step {t}"


@pytest.mark.parametrize("name", [name for name in NAMES if "zero_accum" in name] or ["missing"])
def test_where_the_record_is_nan_on_purpose(name: str) -> None:
    """A zero accumulator with a zero gradient: NaN there; here Adagrad leaves the weight and FTRL gives 0."""
    optimizer, _, arrays = load(name)
    names = slot_names(optimizer)
    _, ids, g, lr = next(steps(arrays))
    before = [arrays[f"{slot}.0"][ids] for slot in names]
    nan = np.isnan(arrays["parameters.1"][ids])
    assert nan.any() and (g[nan] == 0).all() and (before[1][nan] == 0).all()
    w, *slots = apply_step(
        create_rule(optimizer), numbers(optimizer, lr), *map(torch.from_numpy, [before[0], g, *before[1:]])
    )
    np.testing.assert_array_equal(w.numpy()[nan], 0.0 if optimizer.algorithm == "ftrl" else before[0][nan])
    for new, old in zip(slots, before[1:], strict=True):
        np.testing.assert_array_equal(new.numpy()[nan], old[nan])
