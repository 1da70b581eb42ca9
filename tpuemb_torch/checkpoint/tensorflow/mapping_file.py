"""Mapping files: tables that have another name in a checkpoint.

tables:
  user: user_embedding/embedding_weights     # the table's name there; its slots go with it
  item:                                      # or tensor by tensor
    parameters: item_weights
    accumulators: item_weights/Adagrad
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tpuemb_torch.checkpoint.errors import CheckpointError


def read_mapping(path: str | os.PathLike[str]) -> dict[str, str | dict[str, str]]:
    """Reads a mapping file (YAML or JSON), by table.

    Raises:
        CheckpointError: naming the file, the table and what is wrong.
    """
    file = Path(path)
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as problem:
        raise CheckpointError(f"mapping file {file} cannot be read: {problem.strerror}") from problem
    except (yaml.YAMLError, ValueError) as problem:
        raise CheckpointError(f"mapping file {file} is not YAML: {problem}") from problem
    tables = content.get("tables") if isinstance(content, Mapping) and set(content) == {"tables"} else None
    if not isinstance(tables, Mapping) or not tables:
        raise CheckpointError(f"mapping file {file}: write names by table under the one key 'tables'")
    return {str(table): _names(file, str(table), value) for table, value in tables.items()}


def _names(file: Path, table: str, value: Any) -> str | dict[str, str]:
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping) and value and all(isinstance(v, str) for pair in value.items() for v in pair):
        return dict(value)
    raise CheckpointError(
        f"mapping file {file}, table {table!r}: give its name in the checkpoint, or a tensor for 'parameters' and "
        f"each slot; got {value!r}"
    )
