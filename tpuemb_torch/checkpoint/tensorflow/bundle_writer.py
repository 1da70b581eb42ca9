"""Writes tensor bundles that TensorFlow reads (tensorflow/core/util/tensor_bundle/tensor_bundle.cc)."""

from __future__ import annotations

import os
import struct
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from tpuemb_torch.checkpoint.errors import CheckpointError
from tpuemb_torch.checkpoint.tensorflow import varint
from tpuemb_torch.checkpoint.tensorflow.checksum import extend, mask
from tpuemb_torch.checkpoint.tensorflow.entries import STRING, dtype_number
from tpuemb_torch.checkpoint.tensorflow.slice_keys import slice_key
from tpuemb_torch.checkpoint.tensorflow.sstable import write_table
from tpuemb_torch.protos import tensorflow_checkpoint_pb2 as pb

_CHUNK = 1 << 20


class BundleWriter:
    """A checkpoint of one data file, written beside an older one of that prefix and swapped in at the end.

    A context manager: the checkpoint appears when the block ends, and does not when it ends with an exception.
    """

    def __init__(self, prefix: str | os.PathLike[str], progress: Callable[[int], object] | None = None) -> None:
        """Opens the data file.

        Args:
            prefix: path without `.index`; its folder is made if missing.
            progress: called with numbers of bytes as they are written.

        Raises:
            CheckpointError: if the folder cannot be written.
        """
        self.prefix = os.fspath(prefix)
        self._progress = progress or (lambda _: None)
        self._table: dict[bytes, bytes] = {}
        self._offset = 0
        self._data = Path(f"{self.prefix}.data-00000-of-00001")
        self._index = self._data.with_name(f"{Path(self.prefix).name}.index")
        self._temporary = self._data.with_name(f"{self._data.name}.{uuid.uuid4().hex[:8]}.tmp")
        try:
            self._data.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._temporary.open("wb")
        except OSError as problem:
            raise CheckpointError(f"cannot write checkpoint {self.prefix}: {problem}") from problem

    @property
    def files(self) -> list[Path]:
        """The checkpoint's files."""
        return [self._index, self._data]

    def __enter__(self) -> BundleWriter:
        return self

    def add(self, name: str, tensor: Tensor, parts: Sequence[int] = ()) -> None:
        """Writes a tensor.

        Args:
            name: its name.
            tensor: its value.
            parts: for a partitioned variable, the number of rows of each slice.
        """
        number = dtype_number(tensor.dtype)
        entry = pb.BundleEntryProto(dtype=number)
        entry.shape.dim.extend(pb.TensorShapeProto.Dim(size=size) for size in tensor.shape)
        value = tensor.detach().cpu().contiguous()
        if not parts:
            self._write(entry, _chunks(value))
        start = 0
        for rows in parts:
            extents = [(start, rows), *((0, size) for size in tensor.shape[1:])]
            piece = pb.BundleEntryProto(dtype=number)
            piece.shape.dim.extend(pb.TensorShapeProto.Dim(size=length) for _, length in extents)
            self._write(piece, _chunks(value[start : start + rows]))
            self._table[slice_key(name, extents)] = piece.SerializeToString()
            entry.slices.add().extent.extend(pb.TensorSliceProto.Extent(start=a, length=n) for a, n in extents)
            start += rows
        self._table[name.encode()] = entry.SerializeToString()

    def add_string(self, name: str, value: bytes) -> None:
        """Writes a string scalar."""
        # The length is stored as a varint, and enters the CRC as a number of four bytes.
        crc = extend(0, struct.pack("<I", len(value)))
        entry = pb.BundleEntryProto(dtype=STRING, shape=pb.TensorShapeProto())
        self._write(entry, [struct.pack("<I", mask(crc)), value], varint.encode(len(value)), crc)
        self._table[name.encode()] = entry.SerializeToString()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()
        temporary_index = self._index.with_name(f"{self._index.name}.{uuid.uuid4().hex[:8]}.tmp")
        try:
            if error is None:
                header = pb.BundleHeaderProto(num_shards=1, version=pb.VersionDef(producer=1))
                temporary_index.write_bytes(write_table({b"": header.SerializeToString(), **self._table}))
                os.replace(self._temporary, self._data)
                os.replace(temporary_index, self._index)
        except OSError as problem:
            raise CheckpointError(f"cannot write checkpoint {self.prefix}: {problem}") from problem
        finally:
            self._temporary.unlink(missing_ok=True)
            temporary_index.unlink(missing_ok=True)

    def _write(self, entry: pb.BundleEntryProto, chunks: Iterable[bytes], head: bytes = b"", crc: int = 0) -> None:
        """Writes `head` and the chunks; the entry's CRC is that of the chunks after what `crc` is of."""
        entry.offset, size = self._offset, len(head)
        try:
            self._file.write(head)
            for chunk in chunks:
                self._file.write(chunk)
                crc = extend(crc, chunk)
                size += len(chunk)
                self._progress(len(chunk))
        except OSError as problem:
            raise CheckpointError(f"cannot write checkpoint {self.prefix}: {problem}") from problem
        entry.size, entry.crc32c = size, mask(crc)
        self._offset += size


def _chunks(tensor: Tensor) -> Iterable[bytes]:
    """A contiguous tensor's bytes."""
    if tensor.numel() == 0:
        return
    flat = tensor.reshape(-1).view(torch.uint8).numpy()
    for start in range(0, len(flat), _CHUNK):
        yield flat[start : start + _CHUNK].tobytes()
