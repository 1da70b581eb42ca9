"""Moving rows between the ranks that store them and the ranks that load or retrieve them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm

import torch
import torch.distributed as dist
from torch import Tensor

from tpuemb_torch.kernels import StoredPart
from tpuemb_torch.sharding.progress import bytes_bar

#: Bytes that a rank sends, and that it receives, in one exchange.
BUFFER_BYTES = 16 * 2**20


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

    @property
    def elements(self) -> int:
        rows, columns = self.shape
        return rows * columns

    def cut(self, limit: int) -> Iterator[_Transfer]:
        """The transfer in parts of some rows and at most `limit` numbers each (or one row)."""
        rows, columns = self.shape
        step = max(1, limit // max(columns, 1))
        for first in range(0, rows, step):
            yield replace(
                self,
                source_at=(_part(self.source_at[0], first, step), self.source_at[1]),
                target_at=(_part(self.target_at[0], first, step), self.target_at[1]),
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

    Where several ranks offer the same rows, a target's own rank goes before the others, and those by rank.  Besides
    sources and targets, a rank holds at most `BUFFER_BYTES` to send and as many received (or one row, if larger).

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
    # What comes later overwrites: other ranks from the last to the first, then this one.
    remote = sorted((t for t in plan if t.source_rank != t.target_rank), key=lambda t: -t.source_rank)
    received = 4 * sum(t.elements for t in remote if t.target_rank == rank)
    with bytes_bar("exchanging rows", received, rank) as bar:
        for transfers in _rounds(remote, BUFFER_BYTES // 4):
            bar.update(4 * _exchange(sources, targets, transfers, group))
    for t in plan:
        if t.source_rank == t.target_rank == rank:
            _write(targets, t, _read(sources, t))


def _exchange(
    sources: Sequence[Piece], targets: Sequence[Piece], transfers: Sequence[_Transfer], group: dist.ProcessGroup
) -> int:
    """Sends and receives one round (collective); returns how many numbers this rank received."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    device = communication_device(group)
    outgoing = [[t for t in transfers if t.source_rank == rank and t.target_rank == r] for r in range(world)]
    incoming = [[t for t in transfers if t.target_rank == rank and t.source_rank == r] for r in range(world)]
    sizes = [sum(t.elements for t in from_rank) for from_rank in incoming]
    send = [_read(sources, t).to(device).reshape(-1) for to_rank in outgoing for t in to_rank]
    buffer = torch.empty(sum(sizes), dtype=torch.float32, device=device)
    dist.all_to_all_single(
        buffer,
        torch.cat(send) if send else torch.empty(0, dtype=torch.float32, device=device),
        sizes,
        [sum(t.elements for t in to_rank) for to_rank in outgoing],
        group=group,
    )
    arrived = [t for from_rank in incoming for t in from_rank]
    values = buffer.split([t.elements for t in arrived]) if arrived else ()
    for t, value in reversed(list(zip(arrived, values, strict=True))):
        _write(targets, t, value.view(t.shape))
    return buffer.numel()


def _rounds(transfers: Sequence[_Transfer], limit: int) -> list[list[_Transfer]]:
    """Transfers, cut where they are long, in rounds in which no rank sends or receives more than `limit` numbers.

    What one rank receives keeps its order.  Every rank computes the same rounds.
    """
    rounds: list[list[_Transfer]] = []
    # The last round in which a rank sends or receives, and how much it does there.
    sending: dict[int, tuple[int, int]] = {}
    receiving: dict[int, tuple[int, int]] = {}
    for transfer in (piece for long in transfers for piece in long.cut(limit)):
        sends, receives = sending.get(transfer.source_rank, (0, 0)), receiving.get(transfer.target_rank, (0, 0))
        number = max(sends[0], receives[0])
        loads = [load if last == number else 0 for last, load in (sends, receives)]
        if max(loads) and max(loads) + transfer.elements > limit:
            number, loads = number + 1, [0, 0]
        sending[transfer.source_rank] = (number, loads[0] + transfer.elements)
        receiving[transfer.target_rank] = (number, loads[1] + transfer.elements)
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(transfer)
    return rounds


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


def _part(rows: slice, first: int, count: int) -> slice:
    """Positions `first` to `first + count` of a slice."""
    part = range(rows.start, rows.stop, rows.step)[first : first + count]
    return slice(part.start, part.stop, part.step)


def communication_device(group: dist.ProcessGroup) -> torch.device:
    """Where the tensors must be that a group's collectives exchange."""
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
