"""The tables of a model in the form in which they are stored: logical rows, whatever the sharding."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpuemb_torch.checkpoint.errors import CheckpointError
from tpuemb_torch.collection import TPUEmbeddingBagCollection
from tpuemb_torch.config import Table
from tpuemb_torch.sharding import ShardedTPUEmbeddingBagCollection, shard_rows
from tpuemb_torch.sharding.exchange import Block, Piece, move, raise_together
from tpuemb_torch.sharding.parameters import slot_names

Collection = TPUEmbeddingBagCollection | ShardedTPUEmbeddingBagCollection

#: Tables are written in chunks of some rows and this many bytes, which bounds the memory of writing and reading.
CHUNK_BYTES = 16 * 2**20

_WRAPPERS = ("_dmp_wrapped_module.", "_orig_mod.", "module.")


def unwrapped(name: str) -> str:
    """A module or parameter name without what data- and model-parallel wrappers and torch.compile put into it."""
    for wrapper in _WRAPPERS:
        name = name.removeprefix(wrapper).replace(f".{wrapper}", ".")
    return name


def collections(model: nn.Module) -> dict[str, Collection]:
    """The embedding collections in a model, by what (unwrapped) names of their parameters start with."""
    return {
        unwrapped(f"{name}." if name else ""): module
        for name, module in model.named_modules()
        if isinstance(module, Collection)
    }


def key(prefix: str, table: str, slot: str) -> str:
    """Name of a table's weights ("parameters") or slot in a checkpoint."""
    return f"{prefix}{table}/{slot}"


@dataclass(frozen=True, eq=False)
class Chunk:
    """Some rows and columns of a table's weights or slot, to be written.

    Attributes:
        key: name in the checkpoint.
        size: rows and columns of the whole table.
        offsets: first row and column.
        values: float32 `[rows, columns]`, on any device.
    """

    key: str
    size: tuple[int, int]
    offsets: tuple[int, int]
    values: Tensor


def gathered_blocks(collection: Collection) -> list[list[Block]]:
    """What every rank stores (collective)."""
    own = [Piece.of(stored).block for stored in collection.stored()]
    group = collection.process_group
    if group is None:
        return [own]
    blocks: list[list[Block]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(blocks, own, group=group)
    return blocks


def plan_of(blocks: Sequence[Sequence[Block]]) -> dict[str, dict[str, Any]]:
    """How each table is sharded, and on which ranks its columns or rows are."""
    plan: dict[str, dict[str, Any]] = {}
    for rank, own in enumerate(blocks):
        for block in own:
            found = plan.setdefault(block.table, {"ranks": [], "blocks": set()})
            found["ranks"] += [rank] if rank not in found["ranks"] else []
            found["blocks"].add((block.rows, block.columns))
    for found in plan.values():
        parts = found.pop("blocks")
        kind = "row_wise" if len({columns for _, columns in parts}) == 1 else "column_wise"
        found["sharding"] = kind if len(parts) > 1 else "table_wise"
    return plan


def chunks_to_write(
    prefix: str,
    collection: Collection,
    blocks: Sequence[Sequence[Block]],
    *,
    copy: bool,
    writes_copies: bool,
    scratch: Path | None,
) -> list[Chunk]:
    """This rank's share of the tables (collective).

    Rows that a rank stores one after the other are written from where they are.  Those of MOD shards are first
    brought into blocks of consecutive rows, which no rank stores.

    Args:
        prefix: that of the collection's tables.
        collection: the collection.
        blocks: from `gathered_blocks`.
        copy: whether the chunks must not change when the tables do.
        writes_copies: whether this rank is the one that writes collections of which each rank has a copy.
        scratch: a folder for a file to hold blocks that no rank stores, instead of memory; the file has no name when
            this returns.
    """
    group = collection.process_group
    strided = {block.table for own in blocks for block in own if block.rows.step != 1}
    pieces = [Piece.of(stored) for stored in collection.stored()]
    if group is None and not writes_copies:
        pieces = []
    direct = [piece for piece in pieces if piece.block.table not in strided]
    if copy:
        direct = [
            Piece(p.block, {name: t.detach().to("cpu", copy=True) for name, t in p.tensors.items()}) for p in direct
        ]
    if strided:
        assert group is not None
        tables = [table for table in collection.config.tables if table.name in strided]
        targets: list[Piece] = []
        error: Exception | None = None
        try:
            targets = _consecutive_blocks(tables, dist.get_world_size(group), dist.get_rank(group), scratch)
        except (OSError, RuntimeError) as problem:
            error = CheckpointError(f"no room to bring MOD shards into consecutive rows: {problem}")
        raise_together(error, group, CheckpointError)
        move([piece for piece in pieces if piece.block.table in strided], targets, group)
        direct += targets
    size = {table.name: (table.vocabulary_size, table.dimension) for table in collection.config.tables}
    return [chunk for piece in direct for chunk in _chunks(prefix, piece, size[piece.block.table])]


def _consecutive_blocks(tables: Sequence[Table], world: int, rank: int, scratch: Path | None) -> list[Piece]:
    blocks = [
        Block(t.name, shard_rows(t.vocabulary_size, world, rank, "div"), range(t.dimension), slot_names(t))
        for t in tables
    ]
    sizes = [len(block.rows) * len(block.columns) for block in blocks for _ in block.names]
    total = sum(sizes)
    if scratch is None or total == 0:
        flat = torch.empty(total)
    else:
        file = scratch / f"scratch-{rank}"
        with file.open("wb") as opened:
            # A full disk is an error here; later, on writing to the mapping, it would be a signal.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(opened.fileno(), 0, 4 * total)
        flat = torch.from_file(str(file), shared=True, size=total)
        os.unlink(file)  # the disk space goes with the mapping
    parts = iter(flat.split(sizes))
    return [
        Piece(block, {name: next(parts).view(len(block.rows), len(block.columns)) for name in block.names})
        for block in blocks
    ]


def _chunks(prefix: str, piece: Piece, size: tuple[int, int]) -> Iterator[Chunk]:
    rows, columns = piece.block.rows, piece.block.columns
    if not len(columns):
        return
    step = max(1, CHUNK_BYTES // (4 * len(columns)))
    for name, values in piece.tensors.items():
        for first in range(0, len(rows), step):
            offsets = (rows[first], columns.start)
            yield Chunk(key(prefix, piece.block.table, name), size, offsets, values[first : first + step])
