"""The distinct exchange: a rank asks for each row of its batch once, and sends one gradient for it back.

    requester: ids -> distinct rows -> ask              pool <- rows         fold gradients -> send
                                        \\              /                                       \\
    owner:                                look rows up                                           sum, step

Rows travel as they are: gains and combiners are the requester's affair.  It is what TPUs do with deduplication data,
and less traffic than sums of bags wherever a rank's batch has fewer distinct rows than the sums would be.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from tpuemb_torch.kernels.constants import Constant
from tpuemb_torch.kernels.lookup import NativeLookup, TorchLookup
from tpuemb_torch.kernels.update import GradientRows
from tpuemb_torch.preprocessing import SortedIds
from tpuemb_torch.sharding.addresses import RowAddresses

LookupFunctions = type[NativeLookup] | type[TorchLookup]


class ExchangeLayout:
    """Who sends what to whom, as far as it is the same in every batch.

    Args:
        addresses: of all rows.
        rank: this rank.
        ranks: how many there are.
    """

    def __init__(self, addresses: RowAddresses, rank: int, ranks: int) -> None:
        self.addresses = addresses
        self.rank = rank
        blocks = addresses.blocks
        #: Blocks rank by rank, and how many each rank has.
        self.by_rank = sorted(range(len(blocks)), key=lambda number: blocks[number].rank)
        self.order = Constant(self.by_rank, torch.int64)
        self.blocks_of = [0] * ranks
        for block in blocks:
            self.blocks_of[block.rank] += 1
        self.in_order = self.by_rank == list(range(len(blocks)))
        self.own = [block for block in blocks if block.rank == rank]
        largest = max((block.rows for block in blocks), default=0)
        self.id_dtype = torch.int32 if largest <= torch.iinfo(torch.int32).max else torch.int64


class RowExchange:
    """What travels in one batch.

    Args:
        layout: what is the same in every batch.
        wanted: number of rows that this rank asks for, by block.
        asked: number of rows that each rank asks of each own block, `[ranks][own blocks]`.
        group: the ranks.
        device: where the rows are.
    """

    def __init__(
        self,
        layout: ExchangeLayout,
        wanted: Sequence[int],
        asked: Sequence[Sequence[int]],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self.layout = layout
        self.wanted = list(wanted)
        self.asked = [list(counts) for counts in asked]
        self._group = group
        self._device = device

    def send_ids(self, rows: Tensor) -> tuple[Tensor, dist.Work]:
        """Starts to send rows to their owners.

        Args:
            rows: `[distinct]`, rows of the blocks' buffers, block after block.

        Returns:
            What arrives, and what to wait for; see `received_ids`.
        """
        return self._send(self._to_ranks(rows, [1] * len(self.wanted)), [1] * len(self.wanted), back=False)

    def received_ids(self, arrived: Tensor) -> list[Tensor]:
        """int64 `[n]` for each own block: the rows that are asked of it, rank after rank."""
        return [rows.long() for rows in self._by_own_block(arrived, [1] * len(self.layout.own))]

    def to_requesters(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Sends rows to those who asked for them.

        Args:
            rows: float32 `[n, dimension]` per own block, in the order of `received_ids`.

        Returns:
            float32 `[distinct, dimension]` per dimension, in the order of the addresses.
        """
        layout = self.layout
        widths = [block.dimension for block in layout.own]
        sizes = [counts[own] * width for own, width in enumerate(widths) for counts in self.asked]
        ranks = len(self.asked)
        order = [own * ranks + rank for rank in range(ranks) for own in range(len(widths))]
        flat = _flat(rows, self._device)
        if len(widths) > 1:
            flat = _reordered(flat, sizes, order)
        arrived, work = self._send(flat, [block.dimension for block in layout.addresses.blocks], back=True)
        work.wait()
        return self._by_dimension(arrived)

    def to_owners(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The way back of `to_requesters`: gradients of the requested rows to the owners."""
        widths = [block.dimension for block in self.layout.addresses.blocks]
        arrived, work = self._send(self._to_ranks(_flat(gradients, self._device), widths), widths, back=False)
        work.wait()
        own_widths = [block.dimension for block in self.layout.own]
        parts = self._by_own_block(arrived, own_widths)
        return [part.view(-1, width) for part, width in zip(parts, own_widths, strict=True)]

    def _send(self, flat: Tensor, widths: Sequence[int], back: bool) -> tuple[Tensor, dist.Work]:
        """One all-to-all of what is ordered by ranks, to the owners or back; `widths` are those of the blocks."""
        layout = self.layout
        to_owners = [0] * len(self.asked)
        for number in layout.by_rank:
            to_owners[layout.addresses.blocks[number].rank] += self.wanted[number] * widths[number]
        own_widths = [
            widths[number] for number in layout.by_rank if layout.addresses.blocks[number].rank == layout.rank
        ]
        from_requesters = [sum(n * width for n, width in zip(c, own_widths, strict=True)) for c in self.asked]
        sent, received = (from_requesters, to_owners) if back else (to_owners, from_requesters)
        arriving = flat.new_empty(sum(received))
        work = dist.all_to_all_single(arriving, flat, received, sent, group=self._group, async_op=True)
        assert work is not None
        return arriving, work

    def _to_ranks(self, values: Tensor, widths: Sequence[int]) -> Tensor:
        """From the order of the addresses to that of the ranks."""
        if self.layout.in_order:
            return values
        sizes = [count * width for count, width in zip(self.wanted, widths, strict=True)]
        return _reordered(values, sizes, self.layout.by_rank)

    def _by_dimension(self, arrived: Tensor) -> list[Tensor]:
        """From the order of the ranks to that of the addresses."""
        layout = self.layout
        blocks = layout.addresses.blocks
        if not layout.in_order:
            place = [0] * len(blocks)
            for position, number in enumerate(layout.by_rank):
                place[number] = position
            sizes = [self.wanted[number] * blocks[number].dimension for number in layout.by_rank]
            arrived = _reordered(arrived, sizes, place)
        rows = dict.fromkeys(layout.addresses.dimensions, 0)
        for count, block in zip(self.wanted, blocks, strict=True):
            rows[block.dimension] += count
        parts = arrived.split([count * dimension for dimension, count in rows.items()])
        return [part.view(-1, dimension) for part, dimension in zip(parts, rows, strict=True)]

    def _by_own_block(self, arrived: Tensor, widths: Sequence[int]) -> list[Tensor]:
        """From the order of the ranks to that of the own blocks."""
        own, ranks = len(widths), len(self.asked)
        if own == 0:
            return []
        sizes = [count * width for counts in self.asked for count, width in zip(counts, widths, strict=True)]
        if own > 1:
            arrived = _reordered(arrived, sizes, [rank * own + block for block in range(own) for rank in range(ranks)])
        return list(arrived.split([sum(sizes[block::own]) for block in range(own)]))


def _flat(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    if len(parts) == 1:
        return parts[0].contiguous().view(-1)
    return torch.cat([part.reshape(-1) for part in parts]) if parts else torch.empty(0, device=device)


def _reordered(values: Tensor, sizes: Sequence[int], order: Sequence[int]) -> Tensor:
    """The segments of a tensor in another order."""
    parts = values.split(list(sizes))
    return torch.cat([parts[number] for number in order])


class ReturnRows(torch.autograd.Function):
    """Rows to those who asked for them; backward, the gradients of rows to their owners (both collective)."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, handle: Tensor, exchange: RowExchange, *rows: Tensor
    ) -> tuple[Tensor, ...]:
        """See `RowExchange.to_requesters`; the handle requires grad, so that ranks without tables take part too."""
        ctx.exchange = exchange  # type: ignore[attr-defined]
        return tuple(exchange.to_requesters(rows))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.exchange.to_owners(gradients)  # type: ignore[attr-defined]


class PoolRows(torch.autograd.Function):
    """Weighted sums of distinct rows; backward, one gradient for each of them."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        rows: Tensor,
        ordered: SortedIds,
        offsets: Tensor,
        gains: Tensor | None,
        features: int,
        functions: LookupFunctions,
    ) -> Tensor:
        """Pools.

        Args:
            ctx: autograd's context.
            rows: float32 `[distinct, dimension]`.
            ordered: the `n` ids of the bags, sorted as the rows are.
            offsets: int64 `[features * batch + 1]`.
            gains: float32 `[n]`, or None for 1.0 each.
            features: number of features, whose bags follow each other.
            functions: what looks up.

        Returns:
            float32 `[batch, features * dimension]`.
        """
        batch = (offsets.numel() - 1) // features
        ctx.lookup = (ordered, offsets, gains, features, batch, functions)  # type: ignore[attr-defined]
        return functions.look_up(ordered.inverse(), offsets, gains, rows, features, batch)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ordered, offsets, gains, features, batch, functions = ctx.lookup  # type: ignore[attr-defined]
        gradient = gradients[0].contiguous()
        gradient = gradient.view(batch * features, gradient.shape[1] // features)
        bag = functions.bags(offsets, features, batch, ordered.order.numel())
        sorted_gains = None if gains is None else gains[ordered.order]
        folded = GradientRows(gradient, bag[ordered.order], sorted_gains).fold(ordered.starts)
        return folded, *(None,) * 5
