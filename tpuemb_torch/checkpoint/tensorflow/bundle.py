"""Reads tensor bundles: `PREFIX.index` and `PREFIX.data-0000i-of-0000n`, without TensorFlow.

Source: tensorflow/core/util/tensor_bundle/tensor_bundle.cc.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from tpuemb_torch.checkpoint.errors import CheckpointError
from tpuemb_torch.checkpoint.tensorflow import varint
from tpuemb_torch.checkpoint.tensorflow.checksum import extend, mask
from tpuemb_torch.checkpoint.tensorflow.entries import STRING, Entry, Piece, parse_entries
from tpuemb_torch.checkpoint.tensorflow.sstable import read_table

_CHUNK = 1 << 20
#: Tensors of this many bytes are checked whether they are read or not.
_SMALL = 1 << 24


class TensorBundle:
    """The tensors of a checkpoint, read when asked for, a block of rows at a time.

    Nothing is returned from bytes whose CRC32C was not checked.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        """Reads the index.

        Args:
            prefix: path without `.index`; the index itself or a folder with a `checkpoint` file will do.

        Raises:
            CheckpointError: if there is no checkpoint, or its index is damaged.
        """
        self.prefix = checkpoint_prefix(prefix)
        #: Called with numbers of bytes of tables as they are read.
        self.progress: Callable[[int], object] = lambda _: None
        index = f"{self.prefix}.index"
        try:
            data = Path(index).read_bytes()
        except OSError as problem:
            raise CheckpointError(f"no TensorFlow checkpoint {self.prefix}: {index}: {problem.strerror}") from problem
        self._shards, self.entries = parse_entries(read_table(data, index), index)
        self._checked: set[Piece] = set()

    def file(self, shard: int) -> Path:
        """The path of a data file."""
        return Path(f"{self.prefix}.data-{shard:05d}-of-{self._shards:05d}")

    def entry(self, name: str) -> Entry:
        """The tensor of that name.

        Raises:
            CheckpointError: if there is none.
        """
        if name not in self.entries:
            raise CheckpointError(f"checkpoint {self.prefix} has no tensor {name!r}")
        return self.entries[name]

    def read(self, name: str, rows: range | None = None) -> Tensor:
        """Rows of a rank-2 tensor.

        Args:
            name: the tensor.
            rows: which, in steps of one; all by default.

        Returns:
            `[len(rows), dimension]` on the CPU, of the stored type.

        Raises:
            CheckpointError: if a data file is missing, cut off or damaged; names the file and the tensor.
        """
        entry = self.entry(name)
        dtype = entry.dtype
        if len(entry.shape) != 2 or dtype is None:
            raise CheckpointError(
                f"checkpoint {self.prefix}: tensor {name!r} of shape {list(entry.shape)} and type {entry.type} "
                "(types.proto) is no table"
            )
        rows = range(entry.shape[0]) if rows is None else rows
        pieces = [p for p in entry.pieces if p.start[0] < rows.stop and rows.start < p.start[0] + p.shape[0]]
        for piece in pieces:  # before memory is taken for them
            self._open(name, piece).close()
        out = torch.empty(len(rows), entry.shape[1], dtype=dtype)
        for piece in pieces:
            top, left = piece.start
            first, last = max(rows.start, top), min(rows.stop, top + piece.shape[0])
            part = out[first - rows.start : last - rows.start, left : left + piece.shape[1]]
            whole = part if part.is_contiguous() else torch.empty_like(part, memory_format=torch.contiguous_format)
            self._read_piece(name, piece, (first - top) * piece.shape[1] * dtype.itemsize, whole)
            if whole is not part:
                part.copy_(whole)
        return out

    def check_files(self) -> None:
        """Checks that every data file is there to its end, and the CRCs of all tensors that are small.

        Raises:
            CheckpointError: naming the file and a tensor.
        """
        ends: dict[int, tuple[int, str, Piece]] = {}
        for name, entry in self.entries.items():
            for piece in entry.pieces:
                end = piece.offset + piece.size
                if piece.shard not in ends or end > ends[piece.shard][0]:
                    ends[piece.shard] = end, name, piece
        for _, name, piece in ends.values():
            self._open(name, piece).close()
        for name, entry in self.entries.items():
            if entry.nbytes <= _SMALL:
                if entry.type == STRING and len(entry.pieces) == 1:
                    self.strings(name)
                elif entry.dtype is not None:
                    for piece in entry.pieces:
                        if piece not in self._checked:
                            self._stream(name, piece, None)

    def strings(self, name: str) -> list[bytes]:
        """The elements of a string tensor."""
        entry = self.entry(name)
        if entry.type != STRING or len(entry.pieces) != 1:
            raise CheckpointError(f"checkpoint {self.prefix}: tensor {name!r} holds no strings")
        (piece,) = entry.pieces
        with self._open(name, piece) as file:
            data = file.read(piece.size)
        try:
            return _strings(data, piece)
        except ValueError as problem:
            raise self._damaged(name, piece) from problem

    def _read_piece(self, name: str, piece: Piece, offset: int, out: Tensor) -> None:
        """Fills `out`, contiguous, with a piece's bytes from `offset` on."""
        view = out.view(-1).view(torch.uint8).numpy().data if out.numel() else memoryview(b"")
        if len(view) == piece.size:
            self._stream(name, piece, view)
            return
        if piece not in self._checked:
            self._stream(name, piece, None)
        with self._open(name, piece) as file:
            file.seek(offset, os.SEEK_CUR)
            if file.readinto(view) != len(view):  # type: ignore[attr-defined]
                raise self._cut_off(name, piece)
        self.progress(len(view))

    def _stream(self, name: str, piece: Piece, out: memoryview | None) -> None:
        """Reads a whole piece in chunks, into `out` if given, and checks its CRC."""
        crc, position = 0, 0
        with self._open(name, piece) as file:
            while position < piece.size:
                chunk = file.read(min(_CHUNK, piece.size - position))
                if not chunk:
                    raise self._cut_off(name, piece)
                crc = extend(crc, chunk)
                if out is not None:
                    out[position : position + len(chunk)] = chunk
                    self.progress(len(chunk))
                position += len(chunk)
        if mask(crc) != piece.crc:
            raise self._damaged(name, piece)
        self._checked.add(piece)

    def _open(self, name: str, piece: Piece) -> BinaryIO:
        path = self.file(piece.shard)
        try:
            file = path.open("rb")
        except OSError as problem:
            raise CheckpointError(f"tensor {name!r}: data file {path}: {problem.strerror}") from problem
        if os.fstat(file.fileno()).st_size < piece.offset + piece.size:
            file.close()
            raise self._cut_off(name, piece)
        file.seek(piece.offset)
        return file

    def _cut_off(self, name: str, piece: Piece) -> CheckpointError:
        path = self.file(piece.shard)
        return CheckpointError(
            f"data file {path} is cut off: it has {path.stat().st_size} bytes, tensor {name!r} ends at "
            f"{piece.offset + piece.size}"
        )

    def _damaged(self, name: str, piece: Piece) -> CheckpointError:
        return CheckpointError(
            f"data file {self.file(piece.shard)} is damaged: CRC32C of tensor {name!r} "
            f"({piece.size} bytes at {piece.offset}) does not match"
        )


def _strings(data: bytes, piece: Piece) -> list[bytes]:
    """[varint lengths][masked CRC of the lengths][bytes]; the lengths enter the CRC as fixed-size numbers."""
    count = 1
    for size in piece.shape:
        count *= size
    sizes, position, crc = [], 0, 0
    for _ in range(count):
        size, position = varint.decode(data, position)
        sizes.append(size)
        crc = extend(crc, struct.pack("<I" if size < 1 << 32 else "<Q", size))
    if data[position : position + 4] != struct.pack("<I", mask(crc)):
        raise ValueError("CRC of the lengths does not match")
    if mask(extend(crc, data[position:])) != piece.crc or position + 4 + sum(sizes) != len(data):
        raise ValueError("CRC does not match")
    position += 4
    values = []
    for size in sizes:
        values.append(data[position : position + size])
        position += size
    return values


def checkpoint_prefix(path: str | os.PathLike[str]) -> str:
    """The prefix of a checkpoint: of its index file, or of the latest one of a folder by its `checkpoint` file.

    Raises:
        CheckpointError: if the path is a folder without that file.
    """
    text = os.fspath(path)
    if os.path.isdir(text) and not os.path.exists(f"{text}.index"):
        try:
            state = Path(text, "checkpoint").read_text(encoding="utf-8")
        except OSError as problem:
            found = sorted(file.name.removesuffix(".index") for file in Path(text).glob("*.index"))
            raise CheckpointError(
                f"folder {text} has no file named checkpoint that says which one to read; "
                f"give the prefix itself (found: {', '.join(found) or 'none'})"
            ) from problem
        latest = re.search(r'^model_checkpoint_path:\s*"([^"\\]*)"', state, re.MULTILINE)
        if latest is None:
            raise CheckpointError(f"file {text}/checkpoint names no model_checkpoint_path")
        return os.path.join(text, latest.group(1))
    return text.removesuffix(".index")
