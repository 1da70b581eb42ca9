"""Plain files of tables, for everything else: NumPy's npz and safetensors, one tensor in memory at a time."""

from __future__ import annotations

import json
import os
import struct
import uuid
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
from torch import Tensor

from tpuemb_torch.checkpoint.errors import CheckpointError
from tpuemb_torch.sharding import shard_rows

Progress = Callable[[int], object]


@dataclass(frozen=True)
class Item:
    """A float32 tensor to write: its table and slot, its shape, and a function that reads it when its turn comes."""

    table: str
    slot: str
    shape: tuple[int, int]
    read: Callable[[], Tensor]

    @property
    def name(self) -> str:
        """`TABLE/SLOT`; slots have no slash in their names."""
        return f"{self.table}/{self.slot}"


def write_npz(path: str | os.PathLike[str], items: Sequence[Item], progress: Progress) -> list[Path]:
    """Writes `path`, with an array a tensor; `numpy.load` reads it.

    Args:
        path: where.
        items: what to write.
        progress: called with numbers of bytes as they are written.

    Raises:
        CheckpointError: if it cannot be written; an older file stays then.
    """
    with _replacing([Path(path)]) as (file,), zipfile.ZipFile(file, "w") as archive:
        for item in items:
            _add_array(archive, item.name, item.read(), progress)
    return [Path(path)]


def write_npz_shards(
    path: str | os.PathLike[str],
    items: Sequence[Item],
    num_shards: int,
    strategy: Literal["div", "mod"],
    progress: Progress,
) -> list[Path]:
    """Writes `STEM-0000i-of-0000n.npz`, each with the rows of one host, in the order in which Load takes them.

    Args:
        path: `STEM.npz`.
        items: what to write.
        num_shards: number of hosts.
        strategy: of the shards.
        progress: called with numbers of bytes as they are written.

    Raises:
        CheckpointError: if they cannot be written; older files stay then.
    """
    base = Path(path)
    paths = [
        base.with_name(f"{base.name.removesuffix('.npz')}-{i:05d}-of-{num_shards:05d}.npz") for i in range(num_shards)
    ]
    with _replacing(paths) as files:
        archives = [zipfile.ZipFile(file, "w") for file in files]
        for item in items:
            value = item.read()
            for shard, archive in enumerate(archives):
                rows = shard_rows(item.shape[0], num_shards, shard, strategy)
                _add_array(archive, item.name, value[rows.start : rows.stop : rows.step], progress)
        for archive in archives:
            archive.close()
    return paths


def write_safetensors(path: str | os.PathLike[str], items: Sequence[Item], progress: Progress) -> list[Path]:
    """Writes a safetensors file (https://github.com/huggingface/safetensors#format).

    The package's own writer wants all tensors in memory; the format is a length, a JSON header and the bytes.

    Args:
        path: where.
        items: what to write.
        progress: called with numbers of bytes as they are written.

    Raises:
        CheckpointError: if it cannot be written; an older file stays then.
    """
    header, end = {}, 0
    for item in items:
        start, end = end, end + 4 * item.shape[0] * item.shape[1]
        header[item.name] = {"dtype": "F32", "shape": list(item.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with _replacing([Path(path)]) as (file,):
        file.write(struct.pack("<Q", len(text)) + text)
        for item in items:
            value = np.ascontiguousarray(item.read().numpy(), dtype="<f4")
            file.write(value.data.cast("B"))
            progress(value.nbytes)
    return [Path(path)]


def _add_array(archive: zipfile.ZipFile, name: str, value: Tensor, progress: Progress) -> None:
    # As numpy.savez writes it, but one array at a time.
    with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
        np.lib.format.write_array(file, np.ascontiguousarray(value.numpy()), allow_pickle=False)
    progress(value.nbytes)


@contextmanager
def _replacing(paths: Sequence[Path]) -> Iterator[list[BinaryIO]]:
    """Files under temporary names, which take the given ones when the block ends without an exception."""
    suffix = f".{uuid.uuid4().hex[:8]}.tmp"
    temporary = [path.with_name(path.name + suffix) for path in paths]
    files: list[BinaryIO] = []
    try:
        paths[0].parent.mkdir(parents=True, exist_ok=True)
        files.extend(path.open("wb") for path in temporary)
        yield files
        for file in files:
            file.close()
        for source, path in zip(temporary, paths, strict=True):
            os.replace(source, path)
    except OSError as problem:
        raise CheckpointError(f"cannot write {paths[0]}: {problem}") from problem
    finally:
        for file in files:
            file.close()
        for path in temporary:
            path.unlink(missing_ok=True)
