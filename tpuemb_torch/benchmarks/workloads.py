"""What is measured: tables, batches and how ids are drawn, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tpuemb_torch.config import Config, load_config


@dataclass(frozen=True)
class Workload:
    """Tables with one feature each.

    Attributes:
        name: its name.
        rows: rows of each table.
        dim: dimension of all tables.
        batch: number of samples.
        hots: ids of each sample of each feature.
        exponent: of the Zipf distribution of ids; None: uniform.
        steps: length of sequences: each of a feature's `batch * steps` positions is looked up by itself; 1: bags.
    """

    name: str
    rows: tuple[int, ...]
    dim: int
    batch: int
    hots: tuple[int, ...]
    exponent: float | None
    steps: int = 1

    @property
    def bags(self) -> int:
        """Number of bags of each feature."""
        return self.batch * self.steps

    @property
    def ids(self) -> int:
        """Number of ids of a batch."""
        return self.bags * sum(self.hots)

    def scaled(self, factor: float) -> Workload:
        """The same with fewer rows and samples, for a try."""
        rows = tuple(max(4, int(count * factor)) for count in self.rows)
        return replace(self, rows=rows, batch=max(2, int(self.batch * factor)))

    def config(self, optimizer: str) -> Config:
        """Its configuration; `optimizer` is the text of the optimizer's field, `adagrad {}`."""
        tables = "".join(
            f'table_descriptor {{ name: "t{i}" vocabulary_size: {count} dimension: {self.dim} '
            f"optimization_parameters {{ learning_rate {{ constant: 0.01 }} {optimizer} }} }}\n"
            for i, count in enumerate(self.rows)
        )
        shape = f"{self.bags}"
        features = "".join(
            f'feature_descriptor {{ name: "f{i}" table_id: {i} input_shape: [{shape}] }}\n'
            for i in range(len(self.rows))
        )
        return load_config(f"mode: TRAINING num_hosts: 1 num_tensor_cores: 1\n{tables}{features}")

    def draw(self, seed: int) -> tuple[Tensor, Tensor]:
        """One batch: int64 ids `[n]`, feature after feature, and offsets `[features * bags + 1]`."""
        rng = np.random.default_rng(seed)
        ids = [
            torch.from_numpy(draw_ids(rng, self.bags * hot, count, self.exponent))
            for count, hot in zip(self.rows, self.hots, strict=True)
        ]
        lengths = torch.tensor(self.hots).repeat_interleave(self.bags)
        return torch.cat(ids), torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])


def draw_ids(rng: np.random.Generator, count: int, rows: int, exponent: float | None) -> np.ndarray:
    """int64 `[count]` in `[0, rows)`; frequent ids lie anywhere in the table, as hashed ids do."""
    if exponent is None:
        return rng.integers(0, rows, count)
    found = np.empty(0, np.int64)
    while len(found) < count:
        drawn = rng.zipf(exponent, 2 * count)
        found = np.concatenate([found, drawn[drawn <= rows]])
    # A product with a number that has no factor in common with `rows` permutes the rows.
    factor = next(p for p in (2654435761, 1000003, 7919, 1) if np.gcd(p, rows) == 1)
    return (found[:count] - 1) * factor % rows


#: Rows and ids per sample of MLPerf's DLRM-DCNv2 (Criteo 1TB multi-hot); rows capped at a million.
_DLRM_ROWS: Sequence[int] = (
    40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10,
    2209, 11938, 155, 4, 976, 14, 40000000, 40000000, 40000000, 590152, 12973, 108, 36,
)  # fmt: skip
_DLRM_HOTS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)

WORKLOADS: Mapping[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("zipf", (500_000,) * 8, 64, 4096, (10,) * 8, 1.2),
        Workload("dlrm", tuple(min(rows, 1_000_000) for rows in _DLRM_ROWS), 128, 2048, _DLRM_HOTS, 1.2),
        Workload("tiny", (1_000,) * 1_000, 16, 512, (1,) * 1_000, 1.2),
        Workload("large", (20_000_000,), 32, 16_384, (10,), None),
        Workload("sequence", (500_000,), 64, 512, (1,), 1.2, steps=200),
    )
}
