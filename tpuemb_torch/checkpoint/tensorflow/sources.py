"""Where the rows of a logical table lie in a checkpoint, each way of laying them out as one class."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from tpuemb_torch.checkpoint.tensorflow.bundle import TensorBundle

_BLOCK_BYTES = 1 << 26


class Source(Protocol):
    """A table's parameters or one of its slots: `shape` (rows, dimension), read a block of rows at a time."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors in the checkpoint."""

    @property
    def layout(self) -> str:
        """How the rows lie there, for people."""

    def read(self, rows: range) -> Tensor:
        """`[len(rows), dimension]`; `rows` in steps of one."""


@dataclass(frozen=True)
class Stored:
    """A tensor whose rows are those of the table."""

    bundle: TensorBundle
    name: str

    @property
    def shape(self) -> tuple[int, int]:
        rows, dimension = self.bundle.entry(self.name).shape
        return rows, dimension

    @property
    def dtype(self) -> torch.dtype:
        dtype = self.bundle.entry(self.name).dtype
        assert dtype is not None
        return dtype

    @property
    def tensors(self) -> tuple[str, ...]:
        return (self.name,)

    @property
    def layout(self) -> str:
        slices = len(self.bundle.entry(self.name).pieces)
        return "one tensor" if slices == 1 else f"one tensor in {slices} slices"

    def read(self, rows: range) -> Tensor:
        return self.bundle.read(self.name, rows)

    def parts(self) -> list[int]:
        """Rows of each slice; one number where the tensor is not cut along its rows alone."""
        pieces = self.bundle.entry(self.name).pieces
        width = self.shape[1]
        return [p.shape[0] for p in pieces] if all(p.shape[1] == width for p in pieces) else [self.shape[0]]


@dataclass(frozen=True)
class Concatenated:
    """Tensors of one host each: their rows, one after the other."""

    of: Sequence[Stored]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.of), self.of[0].shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.of[0].dtype

    @property
    def tensors(self) -> tuple[str, ...]:
        return tuple(part.name for part in self.of)

    @property
    def layout(self) -> str:
        return f"{len(self.of)} tensors, one a host"

    def read(self, rows: range) -> Tensor:
        starts = accumulate(self.parts(), initial=0)
        found = []
        for part, start in zip(self.of, starts, strict=False):
            first, last = max(rows.start, start), min(rows.stop, start + part.shape[0])
            if first < last:
                found.append(part.read(range(first - start, last - start)))
        if len(found) == 1:
            return found[0]
        return torch.cat(found) if found else torch.empty(0, self.shape[1], dtype=self.dtype)

    def parts(self) -> list[int]:
        """Rows of each tensor."""
        return [part.shape[0] for part in self.of]


@dataclass(frozen=True)
class Interleaved:
    """Rows in the order of MOD sharding: of n parts, part i has the rows i, i + n, i + 2n, ..."""

    of: Stored | Concatenated
    sizes: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return self.of.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.of.dtype

    @property
    def tensors(self) -> tuple[str, ...]:
        return self.of.tensors

    @property
    def layout(self) -> str:
        return f"{self.of.layout}, MOD over {len(self.sizes)} hosts"

    def read(self, rows: range) -> Tensor:
        out = torch.empty(len(rows), self.shape[1], dtype=self.dtype)
        starts = accumulate(self.sizes, initial=0)
        for (where, positions), start in zip(residues(rows, len(self.sizes)), starts, strict=False):
            out[where] = self.of.read(range(start + positions.start, start + positions.stop))
        return out


def read_all(source: Source) -> Tensor:
    """All rows, in little more memory than they take.

    Rows that are put together from several places come block by block, which reads their tensors twice: once for the
    CRCs.
    """
    rows, dimension = source.shape
    if isinstance(source, Stored):
        return source.read(range(rows))
    out = torch.empty(rows, dimension, dtype=source.dtype)
    step = max(1, _BLOCK_BYTES // max(1, dimension * source.dtype.itemsize))
    for first in range(0, rows, step):
        block = range(first, min(first + step, rows))
        out[block.start : block.stop] = source.read(block)
    return out


def residues(rows: range, n: int) -> Iterator[tuple[slice, range]]:
    """For each k < n: where the ids k, k + n, ... are among `rows`, and their positions in that sequence."""
    for k in range(n):
        first = rows.start + (k - rows.start) % n
        count = len(range(first, rows.stop, n))
        position = first // n
        yield slice(first - rows.start, None, n), range(position, position + count)
