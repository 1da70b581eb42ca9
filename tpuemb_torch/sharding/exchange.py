"""Moving rows between the ranks that store them and the ranks that load or retrieve them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import lcm

import torch
import torch.distributed as dist
from torch import Tensor

from tpuemb_torch.kernels import StoredPart


@dataclass(frozen=True)
class Block:
    """Some rows and columns of a table, as stored, given or wanted by one rank, and which of its tensors."""

    table: str
    rows: range
    columns: range
    names: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Piece:
    """A block and its tensors, `[len(rows), len(columns)]` float32 each."""

    block: Block
    tensors: Mapping[str, Tensor]

    @staticmethod
    def of(stored: StoredPart) -> Piece:
        part = stored.part
        return Piece(Block(part.table.name, part.rows, part.columns, tuple(stored.tensors)), stored.tensors)


@dataclass(frozen=True)
class _Transfer:
    """One overlap: tensor `name` of a source piece, at `source_at`, goes to a target piece, at `target_at`."""

    source_rank: int
    source: int
    target_rank: int
    target: int
    name: str
    source_at: tuple[slice, slice]
    target_at: tuple[slice, slice]

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.target_at
        return (
            len(range(rows.start, rows.stop, rows.step)),
            len(range(columns.start, columns.stop, columns.step)),
        )


def overlap(a: range, b: range) -> tuple[slice, slice] | None:
    """Where two ascending ranges meet: positions in each of their common numbers, or None."""
    low, stop = max(a.start, b.start), min(a.stop, b.stop)
    # Elements of a from `low` on; after b.step of them their remainders repeat.
    skip = max(0, -((a.start - low) // a.step))
    first = next((row for row in a[skip : skip + b.step] if row in b), None)
    if first is None:
        return None
    last = range(first, stop, lcm(a.step, b.step))[-1]
    step = lcm(a.step, b.step)

    def positions(within: range) -> slice:
        return slice(within.index(first), within.index(last) + 1, step // within.step)

    return positions(a), positions(b)


def move(sources: Sequence[Piece], targets: Sequence[Piece], group: dist.ProcessGroup | None) -> None:
    """Copies every number that both a source and a target have, whatever rank they are on (collective).

    Where several ranks offer the same rows, a target's own rank goes before the others, and those by rank.

    Args:
        sources: what this rank offers.
        targets: what this rank receives; written in place.
        group: the process group, or None for one process.
    """
    if group is None:
        for transfer in _transfers([[s.block for s in sources]], [[t.block for t in targets]]):
            _write(targets, transfer, _read(sources, transfer))
        return
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    blocks: list[tuple[list[Block], list[Block]] | None] = [None] * world
    dist.all_gather_object(blocks, ([s.block for s in sources], [t.block for t in targets]), group=group)
    plan = _transfers([b[0] for b in blocks if b], [b[1] for b in blocks if b])
    device = _communication_device(group)
    by_tensor: dict[tuple[str, str], list[_Transfer]] = {}
    for transfer in plan:
        table = (blocks[transfer.target_rank] or ([], []))[1][transfer.target].table
        by_tensor.setdefault((table, transfer.name), []).append(transfer)
    # One tensor at a time bounds the memory of the buffers; all ranks go through them in the same order.
    for key in sorted(by_tensor):
        remote = [t for t in by_tensor[key] if t.source_rank != t.target_rank]
        outgoing = [[t for t in remote if t.source_rank == rank and t.target_rank == r] for r in range(world)]
        incoming = [[t for t in remote if t.target_rank == rank and t.source_rank == r] for r in range(world)]
        received: list[Tensor] = []
        if remote:
            send = [_read(sources, t).to(device).reshape(-1) for to_rank in outgoing for t in to_rank]
            sizes = [sum(_elements(t) for t in from_rank) for from_rank in incoming]
            buffer = torch.empty(sum(sizes), device=device)
            dist.all_to_all_single(
                buffer,
                torch.cat(send) if send else torch.empty(0, device=device),
                sizes,
                [sum(_elements(t) for t in to_rank) for to_rank in outgoing],
                group=group,
            )
            received = list(buffer.split([_elements(t) for from_rank in incoming for t in from_rank]))
        arrivals = list(zip([t for from_rank in incoming for t in from_rank], received, strict=bool(remote)))
        # What comes later overwrites: other ranks from the last to the first, then this one.
        for t, values in reversed(arrivals):
            _write(targets, t, values.view(t.shape))
        for t in by_tensor[key]:
            if t.source_rank == t.target_rank == rank:
                _write(targets, t, _read(sources, t))


def _transfers(sources: Sequence[Sequence[Block]], targets: Sequence[Sequence[Block]]) -> list[_Transfer]:
    """All overlaps, in an order that is the same on every rank."""
    offered: dict[str, list[tuple[int, int, Block]]] = {}
    for rank, blocks in enumerate(sources):
        for index, block in enumerate(blocks):
            offered.setdefault(block.table, []).append((rank, index, block))
    return [
        transfer
        for target_rank, blocks in enumerate(targets)
        for target, block in enumerate(blocks)
        for transfer in _into(block, target_rank, target, offered.get(block.table, []))
    ]


def _into(
    block: Block, target_rank: int, target: int, offered: Sequence[tuple[int, int, Block]]
) -> Iterator[_Transfer]:
    used: set[Block] = set()
    # Its own rank first: ranks that offer the very same rows again are not asked.
    for rank, index, source in sorted(offered, key=lambda o: (o[0] != target_rank, o[0])):
        rows, columns = overlap(source.rows, block.rows), overlap(source.columns, block.columns)
        if rows is None or columns is None or source in used:
            continue
        used.add(source)
        for name in source.names:
            if name in block.names:
                yield _Transfer(rank, index, target_rank, target, name, (rows[0], columns[0]), (rows[1], columns[1]))


def _read(pieces: Sequence[Piece], transfer: _Transfer) -> Tensor:
    return pieces[transfer.source].tensors[transfer.name].detach()[transfer.source_at]


def _write(pieces: Sequence[Piece], transfer: _Transfer, values: Tensor) -> None:
    with torch.no_grad():
        pieces[transfer.target].tensors[transfer.name][transfer.target_at] = values.to(
            pieces[transfer.target].tensors[transfer.name].device
        )


def _elements(transfer: _Transfer) -> int:
    rows, columns = transfer.shape
    return rows * columns


def _communication_device(group: dist.ProcessGroup) -> torch.device:
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def raise_together(
    error: Exception | None, group: dist.ProcessGroup | None, kind: type[Exception] = ValueError
) -> None:
    """Raises on every rank if any has an error (collective), so that none waits for one that stopped.

    The rank with the error raises it, the others `kind` with its message.
    """
    if group is None:
        if error is not None:
            raise error
        return
    messages: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(messages, None if error is None else str(error), group=group)
    if error is not None:
        raise error
    failed = [(rank, message) for rank, message in enumerate(messages) if message is not None]
    if failed:
        raise kind(f"rank {failed[0][0]}: {failed[0][1]}")
