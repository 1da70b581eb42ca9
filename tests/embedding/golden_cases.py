"""Reads golden gradients and trajectories into inputs of the public API."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tpuemb_torch as tpuemb
from tests.golden import GOLDEN


def names(folder: str, pattern: str = "*.pb") -> list[str]:
    """Names of golden cases (without ending) for parametrize; one placeholder where the data is absent."""
    if GOLDEN is None:
        return ["absent"]
    root = GOLDEN / folder
    return sorted(str(path.relative_to(root).with_suffix("")) for path in root.glob(pattern))


def read(path: Path) -> tuple[tpuemb.Config, dict[str, Any], dict[str, np.ndarray]]:
    """Config, description and arrays of a case."""
    config = tpuemb.load_config(path.with_suffix(".pb"))
    description = json.loads(path.with_suffix(".json").read_text())
    with np.load(path.with_suffix(".npz")) as arrays:
        return config, description, dict(arrays)


def feature_input(arrays: dict[str, np.ndarray], feature: str, step: int) -> Any:
    """One feature's input of one step."""

    def array(kind: str) -> torch.Tensor | None:
        key = f"{kind}.{feature}.{step}"
        return torch.from_numpy(arrays[key]) if key in arrays else None

    ids, weights = array("ids"), array("weights")
    assert ids is not None
    if (splits := array("row_splits")) is not None:
        return tpuemb.Ragged(splits, ids, weights)
    if (indices := array("indices")) is not None:
        return tpuemb.Sparse(indices, ids, weights)
    return ids
