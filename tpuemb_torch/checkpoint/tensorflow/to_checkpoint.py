"""Tables from elsewhere as this package's own checkpoint, a block of rows at a time, without a model in memory."""

from __future__ import annotations

import base64
import io
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from tpuemb_torch.checkpoint.errors import CheckpointError
from tpuemb_torch.checkpoint.files import DigestingWriter, digest_of, sync_folder, write_file
from tpuemb_torch.checkpoint.folder import CheckpointFolder, write_description
from tpuemb_torch.checkpoint.tables import CHUNK_BYTES, key
from tpuemb_torch.checkpoint.tensorflow.matching import Contents
from tpuemb_torch.checkpoint.tensorflow.sources import Source
from tpuemb_torch.checkpoint.writing import begin
from tpuemb_torch.config import Config, Table
from tpuemb_torch.optimizers import slots_of
from tpuemb_torch.sharding import shard_rows
from tpuemb_torch.sharding.parameters import slot_names
from tpuemb_torch.sharding.progress import bytes_bar

#: What the names of a `TPUEmbedding`'s tables start with in a checkpoint.
PREFIX = "collection."


def write_checkpoint(
    path: str | os.PathLike[str],
    config: Config,
    tables: Mapping[str, Mapping[str, Source | float]],
    world_size: int = 1,
    step: int = 0,
) -> None:
    """Writes a checkpoint that `load` reads into a `TPUEmbedding`.

    Args:
        path: the folder for `load`.  Other checkpoints in it stay, but for one of the same step.
        config: the config of that `TPUEmbedding`.
        tables: for each table of the config, "parameters" and all slots: where the rows are, or one value for all of
            them.
        world_size: number of ranks that will load it: each rank's rows are written to a file of their own.  Any other
            number loads it as well.
        step: number of training steps so far.

    Raises:
        CheckpointError: if the rows cannot be read, or the folder cannot be written.  What was there stays as it was.
    """
    folder = CheckpointFolder(path)
    name = begin(folder, step, 1, None)
    data = folder.partial(name)
    planner = _BlockPlanner(tables)
    plans = [SavePlan([*_blocks(config, rank, world_size)]) for rank in range(world_size)]
    total = sum(4 * t.vocabulary_size * t.dimension * len(slot_names(t)) for t in config.tables)
    try:
        with bytes_bar(f"writing checkpoint {folder.path}", total) as bar:
            writer = DigestingWriter(data, bar)
            plans, metadata = create_default_global_save_plan(plans)
            plans = writer.prepare_global_plan(plans)
            results = [writer.write_data(plan, planner).wait() for plan in plans if plan.items]
            writer.finish(metadata, results)
        buffer = io.BytesIO()
        torch.save(None, buffer)
        extra = buffer.getvalue()
        write_file(data / "extra.pt", extra)
        description = {
            "step": step,
            "configs": {PREFIX: base64.b64encode(config.serialize()).decode()},
            "learning_rates": {PREFIX: None},
            "world_size": world_size,
            "plan": {PREFIX: {t.name: _plan(t, world_size) for t in config.tables}},
            "files": {**writer.digests, "extra.pt": digest_of(extra)},
        }
        write_description(data, description)
        sync_folder(data)
        folder.publish(name, sys.maxsize)
    except (Exception, CheckpointException) as problem:
        shutil.rmtree(data, ignore_errors=True)
        if isinstance(problem, CheckpointError):
            raise
        raise CheckpointError(f"cannot write checkpoint {folder.path}: {problem}") from problem


def complete(contents: Contents, config: Config) -> dict[str, dict[str, Source | float]]:
    """A checkpoint's tables with all slots of the config's optimizers: those that it lacks at their initial values.

    Raises:
        CheckpointError: if a tensor is not float32.
    """
    tables: dict[str, dict[str, Source | float]] = {}
    for table in config.tables:
        found = contents.tables[table.name]
        for slot, source in found.items():
            if source.dtype != torch.float32:
                raise CheckpointError(
                    f"checkpoint {contents.bundle.prefix}: table {table.name!r}, {slot} ({', '.join(source.tensors)}) "
                    f"is {source.dtype}; tables are float32"
                )
        initial = {slot.name: float(slot.initial) for slot in slots_of(table.optimizer)}
        tables[table.name] = {**initial, **found}
    return tables


def _plan(table: Table, world_size: int) -> dict[str, Any]:
    ranks = [r for r in range(world_size) if len(shard_rows(table.vocabulary_size, world_size, r, "div"))]
    return {"ranks": ranks, "sharding": "row_wise" if len(ranks) > 1 else "table_wise"}


def _blocks(config: Config, rank: int, world_size: int) -> Iterator[WriteItem]:
    """A rank's rows of each table, in blocks, as shards of one tensor."""
    for table in config.tables:
        rows = shard_rows(table.vocabulary_size, world_size, rank, "div")
        step = max(1, CHUNK_BYTES // (4 * table.dimension))
        for slot in slot_names(table):
            for first in range(rows.start, rows.stop, step):
                offsets = torch.Size([first, 0])
                sizes = torch.Size([min(step, rows.stop - first), table.dimension])
                yield WriteItem(
                    index=MetadataIndex(key(PREFIX, table.name, slot), offsets),
                    type=WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        chunk=ChunkStorageMetadata(offsets, sizes),
                        properties=TensorProperties(dtype=torch.float32),
                        size=torch.Size([table.vocabulary_size, table.dimension]),
                    ),
                )


class _BlockPlanner(dcp.DefaultSavePlanner):
    """Reads a block when it is its turn to be written."""

    def __init__(self, tables: Mapping[str, Mapping[str, Source | float]]) -> None:
        super().__init__()
        self._sources = {key(PREFIX, name, slot): s for name, slots in tables.items() for slot, s in slots.items()}

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        assert write_item.tensor_data is not None
        chunk = write_item.tensor_data.chunk
        rows = range(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0])
        source = self._sources[write_item.index.fqn]
        if isinstance(source, float):
            return torch.full(tuple(chunk.sizes), source)
        # Rows that only TensorFlow's shards need: it loads zeros into them.
        there = range(min(rows.start, source.shape[0]), min(rows.stop, source.shape[0]))
        values = source.read(there)
        padding = len(rows) - len(there)
        return torch.cat([values, values.new_zeros(padding, chunk.sizes[1])]) if padding else values
