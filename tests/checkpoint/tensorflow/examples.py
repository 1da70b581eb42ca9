"""Checkpoints and configs made for the tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tests.golden import golden
from tpuemb_torch.checkpoint.tensorflow.bundle_writer import BundleWriter
from tpuemb_torch.checkpoint.tensorflow.slot_names import V1_NAMES
from tpuemb_torch.config import Config, load_config

Tables = dict[str, dict[str, Tensor]]

GOLDEN = [
    "forserving_adagrad",
    "forserving_adagrad_momentum",
    "forserving_adam",
    "tf215v1_adagrad",
    "tf215v1_adagrad_3hosts",
    "tf215v1_adagrad_momentum",
    "tf215v1_adam",
    "tf215v1_ftrl_3hosts",
    "tf215v1_proximal_yogi",
    "tf215v1_rms_prop",
    "tf215v1_sgd",
    "tpuembedding_v1_4hosts_adagrad",
    "tpuembedding_v1_4hosts_adam",
    "tpuembedding_v1_adagrad_momentum",
    "tpuembedding_v1_no_optimizer",
    "tpuembedding_v1_saved_by_manager",
    "tpuembedding_v1_sgd",
    "tpuembedding_v2_stacked_2dev_adagrad",
    "tpuembedding_v2_stacked_2dev_adam",
]


def golden_prefix(name: str) -> Path:
    (index,) = golden(f"checkpoints/{name}").glob("*.index")
    return index.with_suffix("")


def golden_values(name: str) -> Tables:
    """The tables as a user sees them; for name-based checkpoints from the variables, by the v1 layer's names."""
    tables: Tables = {}
    with np.load(golden(f"checkpoints/{name}/values.npz")) as values:
        logical = [key for key in values.files if key.startswith("logical.")]
        for key in logical:
            table, _, slot = key.removeprefix("logical.").rpartition(".")
            tables.setdefault(table, {})[slot] = torch.from_numpy(values[key])
        if not logical:
            slots = {end: slot for names in V1_NAMES.values() for slot, end in names.items()}
            for key in values.files:
                table, _, end = key.partition("/")
                if not key.startswith("part."):
                    slot = slots[end] if end else "parameters"
                    tables.setdefault(table, {})[slot] = torch.from_numpy(values[key])
    assert tables
    return tables


def assert_same(got: Mapping[str, Mapping[str, Tensor]], expected: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Bit by bit."""
    assert {table: set(slots) for table, slots in got.items()} == {t: set(slots) for t, slots in expected.items()}
    for table, slots in expected.items():
        for slot, value in slots.items():
            assert got[table][slot].dtype == value.dtype
            assert torch.equal(got[table][slot], value), f"{table}, {slot}"


def config_of(
    tables: Mapping[str, tuple[int, int]], algorithm: str = "adagrad", num_hosts: int = 1, strategy: str = "DIV_DEFAULT"
) -> Config:
    options = "exponent: 2" if algorithm == "adagrad_momentum" else ""
    text = f"mode: TRAINING num_hosts: {num_hosts} num_tensor_cores: {num_hosts} sharding_strategy: {strategy}\n"
    for number, (name, (rows, dimension)) in enumerate(tables.items()):
        text += (
            f'table_descriptor {{ name: "{name}" vocabulary_size: {rows} dimension: {dimension} '
            f"optimization_parameters {{ {algorithm} {{ {options} }} learning_rate {{ constant: 0.1 }} }} }}\n"
            f"feature_descriptor {{ table_id: {number} input_shape: 2 }}\n"
        )
    return load_config(text)


def values(rows: int, dimension: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, dimension, generator=torch.Generator().manual_seed(seed))


def write_variables(
    prefix: Path, tensors: Mapping[str, Tensor], parts: Mapping[str, Sequence[int]] | None = None
) -> Path:
    """A name-based checkpoint of these variables, some in slices of these numbers of rows."""
    with BundleWriter(prefix) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor, (parts or {}).get(name, ()))
    return prefix
