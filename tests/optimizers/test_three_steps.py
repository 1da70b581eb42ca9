"""Three steps on four elements: float32 results of TensorFlow's CPU kernels, and formula values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.optimizers.cases import as_float32, tensor
from tpuemb_torch.optimizers import rule_class

TABLE = json.loads((Path(__file__).parents[1] / "data/optimizers/three_steps.json").read_text())


@pytest.mark.parametrize("row", TABLE["cases"], ids=lambda row: row["algorithm"])
def test_three_steps(row: dict[str, Any]) -> None:
    rule = rule_class(row["algorithm"])({k: as_float32(v) for k, v in row["hyperparameters"].items()})
    assert [slot.name for slot in rule.slots] == list(row["initial"])
    names = ["w", *row["initial"]]
    lr = np.float32(row["learning_rate"])
    single = [tensor(TABLE["w0"])] + [torch.full((4,), value) for value in row["initial"].values()]
    double = [x.double().numpy() for x in single]
    for g in TABLE["gradients"]:
        single = list(rule.update(single[0], tensor(g), tensor(lr), *single[1:]))
        double = list(rule.reference(double[0], np.asarray(g), float(lr), *double[1:]))
    for name, expected, x, y in zip(names, [row["w"], *row["slots"].values()], single, double, strict=True):
        np.testing.assert_allclose(x.numpy(), expected, rtol=1e-5, atol=1e-7, err_msg=name)
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-7, err_msg=name)
