"""Tables that SparseCore stacks into one variable: un-stacked, un-rotated, un-padded.

With n SparseCores, row r of a table lies on core `(r mod n + rotation) mod n`, at position `row_offset + r div n` of
that core's rows; the stack's rows are those of core 0, then core 1, and so on.
Source: tensorflow/python/tpu/tpu_embedding_v3_utils.py, `map_indices_in_shard` and `unshuffle_from_sc_to_cpu`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from google.protobuf.message import DecodeError
from torch import Tensor

from tpuemb_torch.checkpoint.errors import CheckpointError
from tpuemb_torch.checkpoint.tensorflow.bundle import TensorBundle
from tpuemb_torch.checkpoint.tensorflow.sources import Stored, residues
from tpuemb_torch.protos import tensorflow_checkpoint_pb2 as pb


@dataclass(frozen=True)
class Stacked:
    """One table of a stack."""

    of: Stored
    member: pb.SparseCoreTableLayout

    @property
    def shape(self) -> tuple[int, int]:
        rows, dimension = self.member.unsharded_shape
        return rows, dimension

    @property
    def dtype(self) -> torch.dtype:
        return self.of.dtype

    @property
    def tensors(self) -> tuple[str, ...]:
        return self.of.tensors

    @property
    def layout(self) -> str:
        return f"stack {self.member.stacked_table_name}, {self.member.num_sparse_cores} SparseCores"

    def read(self, rows: range) -> Tensor:
        cores, dimension = self.member.num_sparse_cores, self.shape[1]
        out = torch.empty(len(rows), dimension, dtype=self.dtype)
        for k, (where, positions) in enumerate(residues(rows, cores)):
            core = (k + self.member.sparse_core_shard_rotation) % cores
            start = core * self.member.total_rows_per_sparse_core_shard + self.member.sparse_core_shard_row_offset
            if positions:
                out[where] = self.of.read(range(start + positions.start, start + positions.stop))[:, :dimension]
        return out


def stack_members(bundle: TensorBundle, key: str) -> dict[str, list[pb.SparseCoreTableLayout]]:
    """The tables of each stack, by the stack's name, from the layouts that the checkpoint holds under `key`.

    Raises:
        CheckpointError: if they cannot be understood.
    """
    found: dict[str, list[pb.SparseCoreTableLayout]] = {}
    try:
        layouts = pb.SparseCoreTableLayouts.FromString(b"".join(bundle.strings(key)))
    except DecodeError as problem:
        raise CheckpointError(f"checkpoint {bundle.prefix}: {key!r} holds no table layouts: {problem}") from problem
    for layout in layouts.tables:
        found.setdefault(layout.stacked_table_name, []).append(layout)
    return found


def unstack(stored: Stored, member: pb.SparseCoreTableLayout) -> Stacked:
    """A table of a stack.

    Raises:
        CheckpointError: if the layout does not fit the stack.
    """
    where = f"checkpoint {stored.bundle.prefix}: table {member.table_name!r} of stack {member.stacked_table_name!r}"
    cores, per_core = member.num_sparse_cores, member.total_rows_per_sparse_core_shard
    if cores < 1 or len(member.unsharded_shape) != 2 or len(member.unsharded_padded_shape) != 2:
        raise CheckpointError(f"{where}: its layout has no SparseCores or no shape")
    if stored.shape[0] != cores * per_core or stored.shape[1] < member.unsharded_shape[1]:
        raise CheckpointError(
            f"{where}: tensor {stored.name!r} has shape {list(stored.shape)}; the layout says {cores} SparseCores of "
            f"{per_core} rows and dimension {member.unsharded_shape[1]}"
        )
    rows_on_core = -(-member.unsharded_shape[0] // cores)
    last = member.sparse_core_shard_row_offset + rows_on_core
    if member.sparse_core_shard_row_offset < 0 or last > per_core or not 0 <= member.sparse_core_shard_rotation < cores:
        raise CheckpointError(
            f"{where}: rows {member.sparse_core_shard_row_offset} to {last} with rotation "
            f"{member.sparse_core_shard_rotation} do not lie within {cores} SparseCores of {per_core} rows"
        )
    return Stacked(stored, member)
