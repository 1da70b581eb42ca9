"""Rule files: how a table that changed its number of rows takes those of a checkpoint.

    tables:
      user: {rule: grow, from: 1000, to: 1500}                     # rows 1000 ... 1499 are new
      item: {rule: shrink, from: 500, to: 400}                     # rows 400 ... 499 are left out
      word: {rule: map, from: 70, to: 80, file: word_rows.txt}     # the saved row of each row, or -1 for a new one

A map is a text file with one integer per line, or a NumPy file (`.npy`) of int64.  Both sizes are written down so that
no rule is applied to tables it was not made for.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

from tpuemb_torch.checkpoint.errors import CheckpointError

_KEYS = {"grow": {"rule", "from", "to"}, "shrink": {"rule", "from", "to"}, "map": {"rule", "from", "to", "file"}}


@dataclass(frozen=True, eq=False)
class Rule:
    """The rows of one table.

    Attributes:
        kind: "grow" | "shrink" | "map".
        saved: rows of the table in the checkpoint.
        rows: rows of the table in the model.
        source: the saved row of each row, int64 `[rows]`, -1 for a new one; None keeps the numbers.
    """

    kind: str
    saved: int
    rows: int
    source: np.ndarray[Any, Any] | None = None

    def saved_rows(self, rows: range) -> range | Tensor:
        """The saved rows of some rows of the table; for "grow" and "shrink", of the first of them that have one."""
        if self.source is not None:
            return torch.from_numpy(self.source[rows.start : rows.stop : rows.step].astype(np.int64))
        return range(rows.start, max(rows.start, min(rows.stop, self.saved)), rows.step)


def read_rules(path: str | os.PathLike[str]) -> dict[str, Rule]:
    """Reads a rule file, by table.

    Raises:
        CheckpointError: naming the file, the table and what is wrong.
    """
    file = Path(path)
    try:
        content = yaml.safe_load(file.read_text())
    except OSError as problem:
        raise CheckpointError(f"rule file {file} cannot be read: {problem}") from problem
    except (yaml.YAMLError, ValueError) as problem:
        raise CheckpointError(f"rule file {file} is not YAML: {problem}") from problem
    tables = content.get("tables") if isinstance(content, Mapping) and set(content) == {"tables"} else None
    if not isinstance(tables, Mapping):
        raise CheckpointError(f"rule file {file}: write rules by table under the one key 'tables'")
    return {str(table): _rule(file, str(table), value) for table, value in tables.items()}


def _rule(file: Path, table: str, value: object) -> Rule:
    where = f"rule file {file}, table {table!r}"
    kind = value.get("rule") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or not isinstance(kind, str) or kind not in _KEYS:
        raise CheckpointError(f"{where}: rule {kind!r} is not one of {', '.join(_KEYS)}")
    if set(value) != _KEYS[kind]:
        raise CheckpointError(
            f"{where}: {kind} takes {', '.join(sorted(_KEYS[kind]))}; got {', '.join(map(str, value))}"
        )
    saved, rows = value["from"], value["to"]
    for name, size in (("from", saved), ("to", rows)):
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise CheckpointError(f"{where}: {name!r} is {size!r}, it must be a number of rows")
    if (kind == "grow" and rows <= saved) or (kind == "shrink" and rows >= saved):
        raise CheckpointError(f"{where}: {kind} from {saved} to {rows} rows is none")
    return Rule(
        kind, saved, rows, _map(where, file.parent / str(value["file"]), saved, rows) if kind == "map" else None
    )


def _map(where: str, file: Path, saved: int, rows: int) -> np.ndarray[Any, Any]:
    try:
        if file.suffix == ".npy":
            source = np.load(file, mmap_mode="r", allow_pickle=False)
        else:
            source = np.loadtxt(file, dtype=np.int64, ndmin=1)
    except (OSError, ValueError) as problem:
        raise CheckpointError(f"{where}: map {file} cannot be read: {problem}") from problem
    if source.dtype.kind not in "iu" or source.shape != (rows,):
        raise CheckpointError(
            f"{where}: map {file} has {source.dtype} of shape {list(source.shape)}, it must have {rows} integers, "
            "one for each row of the table"
        )
    low, high = int(source.min()), int(source.max())
    if low < -1 or high >= saved:
        raise CheckpointError(
            f"{where}: map {file} has rows from {low} to {high}; saved rows are 0 to {saved - 1}, -1 is a new row"
        )
    return source
