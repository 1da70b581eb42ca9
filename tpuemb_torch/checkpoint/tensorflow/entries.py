"""What a checkpoint's index says about each tensor: its type, shape, and where its bytes are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from google.protobuf.message import DecodeError

from tpuemb_torch.checkpoint.errors import CheckpointError
from tpuemb_torch.checkpoint.tensorflow.slice_keys import slice_key
from tpuemb_torch.protos import tensorflow_checkpoint_pb2 as pb

STRING = 7
#: tensorflow/core/framework/types.proto
DTYPES = {
    1: torch.float32,
    2: torch.float64,
    3: torch.int32,
    9: torch.int64,
    14: torch.bfloat16,
    19: torch.float16,
}
_NUMBERS = {dtype: number for number, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Piece:
    """A tensor, or a slice of one, in a data file: `shape` elements from `start` on, `size` bytes at `offset`."""

    shard: int
    offset: int
    size: int
    #: Masked CRC32C of the bytes.
    crc: int
    start: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Entry:
    """A tensor of a checkpoint: one piece, or the slices of a partitioned variable in the order of their starts."""

    name: str
    #: Number in types.proto.
    type: int
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def dtype(self) -> torch.dtype | None:
        """The type as torch's, or None if it is no type of a table."""
        return DTYPES.get(self.type)

    @property
    def nbytes(self) -> int:
        """Size of all pieces in bytes."""
        return sum(piece.size for piece in self.pieces)


def dtype_number(dtype: torch.dtype) -> int:
    """The number of a type in types.proto."""
    return _NUMBERS[dtype]


def parse_entries(table: Mapping[bytes, bytes], index: str) -> tuple[int, dict[str, Entry]]:
    """The number of data files, and the tensors by name.

    Args:
        table: the index's entries.
        index: the index file, for errors.

    Raises:
        CheckpointError: if the header or an entry makes no sense, or slices do not make up their tensor.
    """
    try:
        header = pb.BundleHeaderProto.FromString(table[b""])
        if header.endianness != pb.BundleHeaderProto.LITTLE:
            raise CheckpointError(f"index {index}: the data is big-endian; save it on a little-endian machine")
        if header.version.min_consumer > 1:
            raise CheckpointError(
                f"index {index}: readers need version {header.version.min_consumer}, this is version 1"
            )
        names = [key for key in table if key and not key.startswith(b"\0")]
        return header.num_shards, {entry.name: entry for entry in _entries(table, names, header.num_shards, index)}
    except KeyError as problem:
        raise CheckpointError(f"index {index} has no header") from problem
    except (DecodeError, UnicodeDecodeError) as problem:
        raise CheckpointError(f"index {index} has an entry that cannot be parsed: {problem}") from problem


def _entries(table: Mapping[bytes, bytes], keys: list[bytes], shards: int, index: str) -> Iterator[Entry]:
    for key in keys:
        name = key.decode()
        proto = pb.BundleEntryProto.FromString(table[key])
        shape = tuple(dim.size for dim in proto.shape.dim)
        if proto.shape.unknown_rank or any(size < 0 for size in shape):
            raise CheckpointError(f"index {index}: tensor {name!r} has no definite shape")
        if proto.slices:
            pieces = tuple(sorted(_slices(table, name, shape, proto, index), key=lambda piece: piece.start))
            _check_partition(name, shape, pieces, index)
        else:
            pieces = (_piece(proto, tuple(0 for _ in shape), shape),)
        for piece in pieces:
            _check_piece(name, proto.dtype, piece, shards, index)
        yield Entry(name, proto.dtype, shape, pieces)


def _slices(
    table: Mapping[bytes, bytes], name: str, shape: tuple[int, ...], proto: pb.BundleEntryProto, index: str
) -> Iterator[Piece]:
    for part in proto.slices:
        extents = [(extent.start, extent.length if extent.WhichOneof("has_length") else -1) for extent in part.extent]
        if len(extents) != len(shape):
            raise CheckpointError(
                f"index {index}: a slice of {name!r} has {len(extents)} axes, the tensor {len(shape)}"
            )
        start = tuple(first for first, _ in extents)
        lengths = tuple(size if n < 0 else n for (_, n), size in zip(extents, shape, strict=True))
        stored = table.get(slice_key(name, extents))
        if stored is None:
            raise CheckpointError(f"index {index}: slice {extents} of tensor {name!r} has no entry")
        yield _piece(pb.BundleEntryProto.FromString(stored), start, lengths)


def _piece(proto: pb.BundleEntryProto, start: tuple[int, ...], shape: tuple[int, ...]) -> Piece:
    return Piece(proto.shard_id, proto.offset, proto.size, proto.crc32c, start, shape)


def _check_partition(name: str, shape: tuple[int, ...], pieces: tuple[Piece, ...], index: str) -> None:
    """Slices lie in the tensor, do not overlap, and leave nothing out."""
    for number, piece in enumerate(pieces):
        inside = all(
            first >= 0 and first + n <= size for first, n, size in zip(piece.start, piece.shape, shape, strict=True)
        )
        # Sorted by start, only slices that begin within this one's rows can overlap it.
        overlap = False
        for other in pieces[number + 1 :]:
            if not shape or other.start[0] >= piece.start[0] + piece.shape[0]:
                break
            overlap |= all(
                a < b + m and b < a + n
                for a, n, b, m in zip(piece.start, piece.shape, other.start, other.shape, strict=True)
            )
        if not inside or overlap:
            raise CheckpointError(
                f"index {index}: slice of {piece.shape} at {piece.start} of tensor {name!r} {shape} "
                + ("overlaps another" if inside else "lies outside")
            )
    covered = sum(math.prod(piece.shape) for piece in pieces)
    if covered != math.prod(shape):
        raise CheckpointError(
            f"index {index}: the slices of tensor {name!r} hold {covered} of its {math.prod(shape)} elements"
        )


def _check_piece(name: str, type_number: int, piece: Piece, shards: int, index: str) -> None:
    if not 0 <= piece.shard < shards:
        raise CheckpointError(f"index {index}: tensor {name!r} is in data file {piece.shard} of {shards}")
    dtype = DTYPES.get(type_number)
    if dtype is not None and piece.size != math.prod(piece.shape) * dtype.itemsize:
        raise CheckpointError(
            f"index {index}: tensor {name!r} of {piece.shape} {dtype} has {piece.size} bytes, "
            f"expected {math.prod(piece.shape) * dtype.itemsize}"
        )
    if piece.offset < 0 or piece.size < 0:
        raise CheckpointError(f"index {index}: tensor {name!r} has {piece.size} bytes at {piece.offset}")
