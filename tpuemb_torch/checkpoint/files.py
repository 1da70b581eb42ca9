"""Files of a checkpoint and their digests, which are taken while the files are written."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem

from tpuemb_torch.checkpoint.errors import CheckpointError
from tpuemb_torch.sharding.progress import bytes_bar

#: SHA-256 is what processors have instructions for.
ALGORITHM = "sha256"

_READ_BYTES = 2**20


class _DigestedFile(io.BufferedWriter):
    """A file to write that keeps the digest of what went into it."""

    def __init__(self, path: Path, bar: Any) -> None:
        super().__init__(io.FileIO(path, "w"))
        self.digest = hashlib.new(ALGORITHM)
        self._bar = bar

    def write(self, data: Any) -> int:
        written = super().write(data)
        self.digest.update(data)
        self._bar.update(written)
        return written


class _DigestedFiles(FileSystem):
    """torch.distributed.checkpoint's file system, which remembers the digests of the files that it wrote."""

    def __init__(self, bar: Any) -> None:
        self.digests: dict[str, str] = {}
        self._bar = bar

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with _DigestedFile(Path(path), self._bar) as file:
            yield file
        self.digests[Path(path).name] = file.digest.hexdigest()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.digests[Path(new_path).name] = self.digests.pop(Path(path).name)


class DigestingWriter(dcp.FileSystemWriter):
    """torch.distributed.checkpoint's writer, with digests of the files of this rank and a progress bar.

    Args:
        folder: where to write.
        bar: is told of every byte.
    """

    def __init__(self, folder: Path, bar: Any) -> None:
        super().__init__(folder)
        self._files = self.fs = _DigestedFiles(bar)

    @property
    def digests(self) -> dict[str, str]:
        """By file name."""
        return self._files.digests


def write_file(path: Path, data: bytes) -> None:
    """Writes a file through to the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Brings the names in a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest_of(data: bytes, algorithm: str = ALGORITHM) -> str:
    return hashlib.new(algorithm, data).hexdigest()


def check_files(data: Path, digests: Mapping[str, str], algorithm: str, names: Iterable[str], rank: int) -> None:
    """Reads files of a checkpoint once and compares their digests.

    Args:
        data: folder of the checkpoint.
        digests: by file name.
        algorithm: of the digests.
        names: the files to read.
        rank: rank 0 shows a progress bar.

    Raises:
        CheckpointError: naming one that is missing or not as it was written.
    """
    paths = {name: data / name for name in names}
    missing = [name for name, path in paths.items() if not path.is_file()]
    if missing:
        raise CheckpointError(f"checkpoint {data} is damaged: file {missing[0]} is missing")
    with bytes_bar("verifying checkpoint", sum(path.stat().st_size for path in paths.values()), rank) as bar:
        for name, path in paths.items():
            digest = hashlib.new(algorithm)
            with path.open("rb") as file:
                while block := file.read(_READ_BYTES):
                    digest.update(block)
                    bar.update(len(block))
            if digest.hexdigest() != digests[name]:
                raise CheckpointError(f"checkpoint {data} is damaged: file {name} is not as it was written")
