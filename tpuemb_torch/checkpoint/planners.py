"""Planners of torch.distributed.checkpoint: which chunks are written, and which rows of saved chunks go where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from tpuemb_torch.checkpoint.tables import Chunk
from tpuemb_torch.sharding.exchange import overlap

#: Positions of rows in a tensor.
_Rows = slice | Tensor


class ChunkSavePlanner(dcp.DefaultSavePlanner):
    """Writes chunks of tables besides the tensors of the state dict.

    Args:
        chunks: this rank's; together, those of all ranks must cover each table once.
    """

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        super().__init__()
        self._chunks = {(chunk.key, torch.Size(chunk.offsets)): chunk for chunk in chunks}

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self.plan = replace(plan, items=[*plan.items, *map(_write_item, self._chunks.values())])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        chunk = None if index.offset is None else self._chunks.get((index.fqn, index.offset))
        return super().lookup_object(index) if chunk is None else chunk.values


def _write_item(chunk: Chunk) -> WriteItem:
    offsets = torch.Size(chunk.offsets)
    return WriteItem(
        index=MetadataIndex(chunk.key, offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offsets, sizes=chunk.values.shape),
            properties=TensorProperties.create_from_tensor(chunk.values),
            size=torch.Size(chunk.size),
        ),
    )


@dataclass(frozen=True, eq=False)
class WantedRows:
    """A part of a table on this rank that takes rows of a checkpoint.

    Attributes:
        key: name in the checkpoint.
        columns: columns of the part.
        saved: for each row of the part, the saved one: a range (perhaps shorter: further rows keep their values), or
            an int64 tensor, in which -1 keeps a row.
        target: live float32 `[rows, len(columns)]`, on any device.
    """

    key: str
    columns: range
    saved: range | Tensor
    target: Tensor


@dataclass(frozen=True, eq=False)
class _Copy:
    """Rows of what was read, and where they go: the same number of each."""

    source: _Rows
    target: Tensor
    target_rows: _Rows


class RowLoadPlanner(dcp.DefaultLoadPlanner):
    """Reads saved chunks one at a time and copies the wanted rows of each into the tables.

    Args:
        wanted: what this rank takes.
        metadata: that of the checkpoint.

    Attributes:
        plan: what to read.
        bar: is told of every byte.
    """

    def __init__(self, wanted: Sequence[WantedRows], metadata: Metadata) -> None:
        super().__init__()
        self.plan = LoadPlan([])
        self.bar: Any = None
        self._copies: list[_Copy] = []
        for part in wanted:
            saved = metadata.state_dict_metadata[part.key]
            assert isinstance(saved, TensorStorageMetadata)
            rows = _SavedRows(part.saved)
            for chunk in saved.chunks:
                self._add(part, rows, chunk)

    @property
    def bytes_to_read(self) -> int:
        return sum(4 * item.lengths.numel() for item in self.plan.items)

    def _add(self, part: WantedRows, rows: _SavedRows, chunk: ChunkStorageMetadata) -> None:
        first_row, first_column = chunk.offsets
        row_match = rows.within(range(first_row, first_row + chunk.sizes[0]))
        column_match = overlap(part.columns, range(first_column, first_column + chunk.sizes[1]))
        if row_match is None or column_match is None:
            return
        target_rows, source_rows = row_match
        target_columns, source_columns = column_match
        if isinstance(source_rows, slice):
            first, count = source_rows.start, source_rows.stop - source_rows.start
            source: _Rows = slice(0, count, source_rows.step)
        else:
            first, count = int(source_rows[0]), int(source_rows[-1] - source_rows[0]) + 1
            source = source_rows - first
        self.plan.items.append(
            ReadItem(
                type=LoadItemType.TENSOR,
                # The hint says which copy follows the reading.
                dest_index=MetadataIndex(part.key, index=len(self._copies)),
                dest_offsets=torch.Size([0, 0]),
                storage_index=MetadataIndex(part.key, chunk.offsets),
                storage_offsets=torch.Size([first, source_columns.start]),
                lengths=torch.Size([count, source_columns.stop - source_columns.start]),
            )
        )
        self._copies.append(_Copy(source, part.target[:, target_columns], target_rows))

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        return torch.empty(read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        assert read_item.dest_index.index is not None
        copy = self._copies[read_item.dest_index.index]
        rows = copy.target_rows
        with torch.no_grad():
            values = tensor[copy.source].to(copy.target.device)
            copy.target[rows.to(copy.target.device) if isinstance(rows, Tensor) else rows] = values
        self.bar.update(tensor.nbytes)


class _SavedRows:
    """The saved rows of a part, to be found in chunks."""

    def __init__(self, saved: range | Tensor) -> None:
        self._saved = saved
        if isinstance(saved, Tensor):
            self._sorted, self._order = saved.sort(stable=True)

    def within(self, chunk: range) -> tuple[_Rows, _Rows] | None:
        """Positions of rows in the part and, ascending, in a chunk of consecutive saved rows; None if it has none."""
        if isinstance(self._saved, range):
            return overlap(self._saved, chunk) if len(self._saved) else None
        low, high = torch.searchsorted(self._sorted, torch.tensor([chunk.start, chunk.stop])).tolist()
        return None if low == high else (self._order[low:high], self._sorted[low:high] - chunk.start)
