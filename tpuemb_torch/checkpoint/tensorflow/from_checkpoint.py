"""The tables of this package's own checkpoints, read one at a time, without a model."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from tpuemb_torch.checkpoint.errors import CheckpointError
from tpuemb_torch.checkpoint.files import check_files
from tpuemb_torch.checkpoint.folder import FORMATS, CheckpointFolder, read_description
from tpuemb_torch.checkpoint.matching import saved_configs
from tpuemb_torch.checkpoint.planners import RowLoadPlanner, WantedRows
from tpuemb_torch.checkpoint.tables import key
from tpuemb_torch.config import Config, Table
from tpuemb_torch.sharding.progress import bytes_bar


class SavedTables:
    """The tables of one embedding in a checkpoint, after a check of every file."""

    def __init__(self, path: str | os.PathLike[str], step: int | None = None, embedding: str | None = None) -> None:
        """Opens a checkpoint.

        Args:
            path: the folder given to `save`.
            step: which checkpoint in it; the last by default.
            embedding: which embedding, by what its tables' names start with, where the model had several.

        Raises:
            CheckpointError: if there is no checkpoint, it is damaged, or it has several embeddings or no such one.
        """
        self._data = CheckpointFolder(path).find(step)
        description = read_description(self._data)
        files = description["files"]
        check_files(self._data, files, FORMATS[description["format"]], sorted(files), rank=0)
        configs = saved_configs(description)
        if embedding is None and len(configs) == 1:
            embedding = next(iter(configs))
        if embedding not in configs:
            raise CheckpointError(
                f"checkpoint {self._data} has embeddings {sorted(configs)}; say which "
                f"({'none was given' if embedding is None else f'there is no {embedding!r}'})"
            )
        self._prefix: str = embedding
        self.config: Config = configs[embedding]
        self._reader: Any = dcp.FileSystemReader(self._data)
        self._metadata: Metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=False)

    def read(self, table: Table, slot: str, rows: int | None = None) -> Tensor:
        """A table's "parameters" or slot: float32 `[rows, dimension]` on the CPU; all rows by default.

        Raises:
            CheckpointError: if the checkpoint does not have it.
        """
        name = key(self._prefix, table.name, slot)
        if not isinstance(self._metadata.state_dict_metadata.get(name), TensorStorageMetadata):
            raise CheckpointError(f"checkpoint {self._data} has no {name}")
        wanted = range(table.vocabulary_size if rows is None else rows)
        out = torch.empty(len(wanted), table.dimension)
        planner = RowLoadPlanner([WantedRows(name, range(table.dimension), wanted, out)], self._metadata)
        with bytes_bar(f"reading {table.name}/{slot}", planner.bytes_to_read) as planner.bar:
            self._reader.read_data(planner.plan, planner).wait()
        return out
