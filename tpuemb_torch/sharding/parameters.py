"""Load and retrieve: tables and slots as tensors, per DIV or MOD shard, whatever the sharding of the module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from tpuemb_torch.config import Config, Table
from tpuemb_torch.kernels import StoredPart
from tpuemb_torch.optimizers import slots_of
from tpuemb_torch.sharding.exchange import Block, Piece, move, raise_together
from tpuemb_torch.sharding.placement import shard_rows

Parameters = dict[str, dict[str, Tensor]]

_CHECKED_ELEMENTS = 2**20


def slot_names(table: Table) -> tuple[str, ...]:
    """Names of a table's state, "parameters" first, in the order of the Load and Retrieve ops."""
    return ("parameters", *(slot.name for slot in slots_of(table.optimizer)))


def load(
    config: Config,
    stored: Sequence[StoredPart],
    parameters: Mapping[str, Mapping[str, object]],
    num_shards: int,
    shard_id: int,
    group: dist.ProcessGroup | None,
    allow_nonfinite: bool = False,
) -> None:
    """Writes one shard of tables and slots (collective); see `TPUEmbedding.load_parameters`."""
    pieces: list[Piece] = []
    error: Exception | None = None
    try:
        if not isinstance(parameters, Mapping):
            raise TypeError(f"parameters must be a mapping by table name, got {type(parameters).__name__}")
        pieces = [_given(config, name, tensors, num_shards, shard_id) for name, tensors in parameters.items()]
        if not allow_nonfinite:
            for piece in pieces:
                _check_finite(piece)
    except (ValueError, TypeError) as problem:
        error = problem
    raise_together(error, group)
    move(pieces, [Piece.of(s) for s in stored], group)


def retrieve(
    config: Config,
    stored: Sequence[StoredPart],
    tables: Sequence[str] | None,
    num_shards: int,
    shard_id: int,
    group: dist.ProcessGroup | None,
) -> Parameters:
    """Reads one shard of tables and slots (collective); see `TPUEmbedding.retrieve_parameters`."""
    wanted: list[Piece] = []
    error: Exception | None = None
    try:
        if isinstance(tables, str):
            raise TypeError(f"tables must be a sequence of names, got the string {tables!r}")
        names = [table.name for table in config.tables] if tables is None else list(tables)
        for name in names:
            table = _table(config, name)
            rows = _shard(config, table, num_shards, shard_id)
            out = {slot: torch.empty(len(rows), table.dimension, dtype=torch.float32) for slot in slot_names(table)}
            wanted.append(Piece(Block(name, rows, range(table.dimension), tuple(out)), out))
    except (ValueError, TypeError) as problem:
        error = problem
    raise_together(error, group)
    move([Piece.of(s) for s in stored], wanted, group)
    return {piece.block.table: dict(piece.tensors) for piece in wanted}


def _table(config: Config, name: str) -> Table:
    for table in config.tables:
        if table.name == name:
            return table
    raise ValueError(f"no table {name!r}: the config has {', '.join(table.name for table in config.tables)}")


def _shard(config: Config, table: Table, num_shards: int, shard_id: int) -> range:
    rows = shard_rows(table.vocabulary_size, num_shards, shard_id, config.sharding_strategy)
    if not len(rows):
        raise ValueError(
            f"table {table.name!r}: shard {shard_id} of {num_shards} would have no rows "
            f"(vocabulary_size {table.vocabulary_size}): use at most that many shards"
        )
    return rows


def _given(config: Config, name: str, tensors: Mapping[str, object], num_shards: int, shard_id: int) -> Piece:
    table = _table(config, name)
    if not isinstance(tensors, Mapping):
        raise TypeError(f"table {name!r}: give its tensors by slot name, got {type(tensors).__name__}")
    rows = _shard(config, table, num_shards, shard_id)
    names = slot_names(table)
    known = ", ".join(names)
    values: dict[str, Tensor] = {}
    for slot, value in tensors.items():
        if slot not in names:
            raise ValueError(f"table {name!r} ({table.optimizer.algorithm}): no slot {slot!r}; it has {known}")
        tensor = value if isinstance(value, Tensor) else torch.as_tensor(value)
        if not tensor.dtype.is_floating_point:
            raise TypeError(f"table {name!r}, {slot}: must be float32, got {tensor.dtype}")
        if tuple(tensor.shape) != (len(rows), table.dimension):
            raise ValueError(
                f"table {name!r}, {slot}: shape {list(tensor.shape)}, but shard {shard_id} of {num_shards} "
                f"({config.sharding_strategy}) is [{len(rows)}, {table.dimension}]"
            )
        values[slot] = tensor.detach().float()
    return Piece(Block(name, rows, range(table.dimension), tuple(values)), values)


def _check_finite(piece: Piece) -> None:
    """Raises for a NaN or infinity, also one that a float64 became; looks at some rows at a time."""
    block = piece.block
    step = max(1, _CHECKED_ELEMENTS // max(len(block.columns), 1))
    for slot, values in piece.tensors.items():
        for first in range(0, len(block.rows), step):
            bad = ~torch.isfinite(values[first : first + step])
            if bool(bad.any()):
                row, column = (int(i) for i in bad.nonzero()[0])
                raise ValueError(
                    f"table {block.table!r}, {slot}: row {block.rows[first + row]}, column {column} is "
                    f"{float(values[first + row, column])} as float32: values must be finite "
                    "(allow_nonfinite=True loads them all the same)"
                )
