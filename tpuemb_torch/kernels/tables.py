"""What a kernel stores: the part of a table that lives in this process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tpuemb_torch.config import Table
from tpuemb_torch.kernels.initial import initial_weights


@dataclass(frozen=True)
class TablePart:
    """A block of one table: some of its rows (in storage order) and a run of its columns.

    The unsharded table is the part with all rows and columns.  Row ranges are Python ranges, so that both
    contiguous (DIV) and strided (MOD) shards are one object.
    """

    table: Table
    rows: range
    columns: range

    @staticmethod
    def whole(table: Table) -> TablePart:
        return TablePart(table, range(table.vocabulary_size), range(table.dimension))


@dataclass(frozen=True, eq=False)
class StoredPart:
    """A part and its storage: live `[len(rows), len(columns)]` views, by slot name ("parameters" first)."""

    part: TablePart
    tensors: Mapping[str, Tensor]


def fill_initial(stored: StoredPart, slot_values: Mapping[str, float], seed: int) -> None:
    """Writes the initial weights and slots of a part."""
    with torch.no_grad():
        initial_weights(stored.tensors["parameters"], stored.part, seed)
        for name, value in slot_values.items():
            stored.tensors[name].fill_(value)
