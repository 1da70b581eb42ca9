"""The tables of a model in the form in which they are stored: logical rows, in one contiguous block per rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata
from torch.distributed._shard.sharding_spec import ShardMetadata

from tpuemb_torch.collection import TPUEmbeddingBagCollection
from tpuemb_torch.config import Table
from tpuemb_torch.sharding import ShardedTPUEmbeddingBagCollection, shard_rows
from tpuemb_torch.sharding.exchange import Block, Piece, move
from tpuemb_torch.sharding.parameters import slot_names

Collection = TPUEmbeddingBagCollection | ShardedTPUEmbeddingBagCollection

_WRAPPERS = ("_dmp_wrapped_module.", "module.")


def unwrapped(name: str) -> str:
    """A module or parameter name without what data- and model-parallel wrappers put into it."""
    for wrapper in _WRAPPERS:
        name = name.removeprefix(wrapper).replace(f".{wrapper}", ".")
    return name


def collections(model: nn.Module) -> dict[str, Collection]:
    """The embedding collections in a model by (unwrapped) name."""
    return {unwrapped(f"{name}."): module for name, module in model.named_modules() if isinstance(module, Collection)}


@dataclass(frozen=True, eq=False)
class TableBlocks:
    """This rank's blocks of all tables of a collection: `tensors` is what is written to or read from disk.

    The blocks are rows in their logical order whatever the placement, so that a checkpoint saved by any number of
    ranks under any sharding loads under any other.
    """

    pieces: list[Piece]
    tensors: dict[str, Tensor | ShardedTensor]

    @staticmethod
    def allocate(prefix: str, collection: Collection) -> TableBlocks:
        group = collection.process_group
        pieces: list[Piece] = []
        tensors: dict[str, Tensor | ShardedTensor] = {}
        for table in collection.config.tables:
            rows = range(table.vocabulary_size)
            if group is not None:
                rows = shard_rows(table.vocabulary_size, dist.get_world_size(group), dist.get_rank(group), "div")
            local = {name: torch.empty(len(rows), table.dimension) for name in slot_names(table)}
            if len(rows):
                pieces.append(Piece(Block(table.name, rows, range(table.dimension), tuple(local)), local))
            for name, tensor in local.items():
                key = f"{prefix}{table.name}/{name}"
                tensors[key] = tensor if group is None else _sharded(tensor, table, group)
        return TableBlocks(pieces, tensors)

    def read_from(self, collection: Collection) -> None:
        """Copies the collection's tables into the blocks (collective)."""
        move([Piece.of(stored) for stored in collection.stored()], self.pieces, collection.process_group)

    def write_to(self, collection: Collection) -> None:
        """Copies the blocks into the collection's tables (collective)."""
        move(self.pieces, [Piece.of(stored) for stored in collection.stored()], collection.process_group)


def _sharded(local: Tensor, table: Table, group: dist.ProcessGroup) -> ShardedTensor:
    shards = list(_shard_metadata(table, group))
    metadata = ShardedTensorMetadata(shards, torch.Size([table.vocabulary_size, table.dimension]))
    rank = dist.get_rank(group)
    own = [Shard(local, shard) for shard in shards if shard.placement is not None and shard.placement.rank() == rank]
    return ShardedTensor._init_from_local_shards_and_global_metadata(own, metadata, process_group=group)


def _shard_metadata(table: Table, group: dist.ProcessGroup) -> Iterator[ShardMetadata]:
    world = dist.get_world_size(group)
    for rank in range(world):
        rows = shard_rows(table.vocabulary_size, world, rank, "div")
        if len(rows):
            yield ShardMetadata([rows.start, 0], [len(rows), table.dimension], f"rank:{rank}/cpu")
