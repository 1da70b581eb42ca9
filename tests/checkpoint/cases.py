"""Models and small helpers of the checkpoint tests."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import tpuemb_torch as tpuemb
from tests.distributed.cases import COMBINERS, config_text

Tables = dict[str, dict[str, torch.Tensor]]


class Model(nn.Module):
    """An embedding and a dense part with a buffer."""

    def __init__(self, seed: int, optimizer: str = "ftrl") -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = tpuemb.TPUEmbedding(tpuemb.load_config(config_text(optimizer)), COMBINERS, seed=seed)
        self.over = nn.Linear(8, 1)
        self.norm = nn.BatchNorm1d(8)


def data_folder(path: Path) -> Path:
    """The last checkpoint of a folder."""
    return path / (path / "latest").read_text().split("\n")[0]


def layer(
    rows: int = 9, dimension: int = 4, optimizer: str = "adagrad {}", mode: str = "TRAINING"
) -> tpuemb.TPUEmbedding:
    """A layer with the tables "t" of `rows` rows and "other" of 3."""
    tables = "".join(
        f'table_descriptor {{ name: "{name}" vocabulary_size: {count} dimension: {dimension} optimization_parameters {{'
        f" learning_rate {{ constant: 0.5 }} {optimizer} }} }}"
        f'feature_descriptor {{ name: "f_{name}" table_id: {index} input_shape: 2 }}'
        for index, (name, count) in enumerate((("t", rows), ("other", 3)))
    )
    return tpuemb.TPUEmbedding(tpuemb.load_config(f"mode: {mode} num_hosts: 1 num_tensor_cores: 1 {tables}"))


def numbered(embedding: tpuemb.TPUEmbedding, offset: float) -> Tables:
    """Loads tables and slots in which every number is another one, and returns them."""
    tables = embedding.retrieve_parameters()
    for values in (value for slots in tables.values() for value in slots.values()):
        values.copy_(torch.arange(float(values.numel())).view(values.shape) + offset)
        offset += values.numel()
    embedding.load_parameters(tables)
    return tables


def same_tables(first: Tables, second: Tables) -> bool:
    return first.keys() == second.keys() and all(
        first[name].keys() == second[name].keys()
        and all(torch.equal(first[name][slot], second[name][slot]) for slot in first[name])
        for name in first
    )
