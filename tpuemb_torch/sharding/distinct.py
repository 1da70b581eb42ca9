"""The distinct exchange: a rank asks for each row of its batch once, and sends one gradient for it back.

    requester: ids -> distinct rows -> ask              pool <- rows         fold gradients -> send
                                        \\              /                                       \\
    owner:                                look rows up                                           sum, step

Rows travel as they are: gains and combiners are the requester's affair.  It is what TPUs do with deduplication data,
and less traffic than sums of bags wherever a rank's batch has fewer distinct rows than the sums would be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from tpuemb_torch.kernels import StepInputs
from tpuemb_torch.kernels.constants import Constant
from tpuemb_torch.kernels.lookup import NativeLookup, TorchLookup
from tpuemb_torch.kernels.update import GradientRows
from tpuemb_torch.preprocessing import SortedIds
from tpuemb_torch.sharding.addresses import RowAddresses

LookupFunctions: TypeAlias = type[NativeLookup] | type[TorchLookup]
#: Numbers of rows, or of numbers in them.
Sizes: TypeAlias = NDArray[np.int64]


class ExchangeLayout:
    """Who sends what to whom, as far as it is the same in every batch.

    Args:
        addresses: of all rows.
        rank: this rank.
        ranks: how many there are.
    """

    def __init__(self, addresses: RowAddresses, rank: int, ranks: int) -> None:
        self.addresses = addresses
        blocks = addresses.blocks
        #: Blocks in the order of their addresses: columns and ranks.
        self.widths = np.array([block.dimension for block in blocks], dtype=np.int64)
        self.ranks = np.array([block.rank for block in blocks], dtype=np.int64)
        #: Blocks rank by rank, where those are then, and how many each rank has.
        self.by_rank = np.argsort(self.ranks, kind="stable")
        self.places = np.argsort(self.by_rank, kind="stable")
        self.blocks_of = np.bincount(self.ranks, minlength=ranks).tolist()
        self.order = Constant(self.by_rank.tolist(), torch.int64)
        self.in_order = bool((self.places == np.arange(len(blocks))).all())
        self.own = [block for block in blocks if block.rank == rank]
        #: Kernel groups are in the order of their tables: the own block of each.
        self.block_of_group = sorted(range(len(self.own)), key=lambda number: self.own[number].group)
        self.own_widths = np.array([block.dimension for block in self.own], dtype=np.int64)
        #: What comes rank by rank, own block by own block, and what goes back.
        pairs = np.arange(ranks * len(self.own)).reshape(ranks, len(self.own))
        self.to_own_blocks = pairs.T.reshape(-1)
        self.to_ranks = pairs.reshape(len(self.own), ranks).T.reshape(-1)
        self.first_of_dimension = np.searchsorted(self.widths, addresses.dimensions)
        largest = max((block.rows for block in blocks), default=0)
        self.id_dtype = torch.int32 if largest <= torch.iinfo(torch.int32).max else torch.int64


class RowExchange:
    """What travels in one batch.

    Args:
        layout: what is the same in every batch.
        wanted: number of rows that this rank asks for, by block.
        asked: number of rows that each rank asks of each own block, `[ranks, own blocks]`.
        group: the ranks.
        device: where the rows are.
    """

    def __init__(
        self, layout: ExchangeLayout, wanted: Tensor, asked: Tensor, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self.layout = layout
        self.wanted = wanted.cpu().numpy()
        self.asked = asked.cpu().numpy()
        self._group = group
        self._device = device

    def send_ids(self, rows: Tensor) -> tuple[Tensor, dist.Work]:
        """Starts to send rows to their owners.

        Args:
            rows: `[distinct]`, rows of the blocks' buffers, block after block.

        Returns:
            What arrives, and what to wait for; see `received_ids`.
        """
        return self._send(self._to_ranks(rows, self.wanted), self.wanted, self.asked)

    def received_ids(self, arrived: Tensor) -> list[Tensor]:
        """int64 `[n]` for each own block: the rows that are asked of it, rank after rank."""
        return [rows.long() for rows in self._by_own_block(arrived, self.asked)]

    def to_requesters(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Sends rows to those who asked for them.

        Args:
            rows: float32 `[n, dimension]` per own block, in the order of `received_ids`.

        Returns:
            float32 `[distinct, dimension]` per dimension, in the order of the addresses.
        """
        layout = self.layout
        wanted, asked = self.wanted * layout.widths, self.asked * layout.own_widths
        flat = self._flat(rows)
        if len(layout.own) > 1:
            flat = _reordered(flat, asked.T.reshape(-1), layout.to_ranks)
        arrived, work = self._send(flat, wanted, asked, back=True)
        work.wait()
        if not layout.in_order:
            arrived = _reordered(arrived, wanted[layout.by_rank], layout.places)
        parts = arrived.split(np.add.reduceat(wanted, layout.first_of_dimension).tolist())
        return [part.view(-1, width) for part, width in zip(parts, layout.addresses.dimensions, strict=True)]

    def to_owners(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The way back of `to_requesters`: gradients of the requested rows to the owners."""
        layout = self.layout
        wanted, asked = self.wanted * layout.widths, self.asked * layout.own_widths
        arrived, work = self._send(self._to_ranks(self._flat(gradients), wanted), wanted, asked)
        work.wait()
        parts = self._by_own_block(arrived, asked)
        return [part.view(-1, block.dimension) for part, block in zip(parts, layout.own, strict=True)]

    def _send(self, flat: Tensor, wanted: Sizes, asked: Sizes, back: bool = False) -> tuple[Tensor, dist.Work]:
        """One all-to-all of what is ordered by ranks, to the owners or back; sizes are those of the blocks."""
        to_owners = np.zeros(len(asked), dtype=np.int64)
        np.add.at(to_owners, self.layout.ranks, wanted)
        sent, received = to_owners.tolist(), asked.sum(1).tolist()
        if back:
            sent, received = received, sent
        arriving = flat.new_empty(sum(received))
        work = dist.all_to_all_single(arriving, flat, received, sent, group=self._group, async_op=True)
        assert work is not None
        return arriving, work

    def _to_ranks(self, values: Tensor, wanted: Sizes) -> Tensor:
        """From the order of the addresses to that of the ranks."""
        return values if self.layout.in_order else _reordered(values, wanted, self.layout.by_rank)

    def _by_own_block(self, arrived: Tensor, asked: Sizes) -> list[Tensor]:
        """From the order of the ranks to that of the own blocks."""
        if len(self.layout.own) > 1:
            arrived = _reordered(arrived, asked.reshape(-1), self.layout.to_own_blocks)
        return list(arrived.split(asked.sum(0).tolist())) if self.layout.own else []

    def _flat(self, parts: Sequence[Tensor]) -> Tensor:
        if len(parts) == 1:
            return parts[0].contiguous().view(-1)
        if not parts:
            return torch.empty(0, dtype=torch.float32, device=self._device)
        return torch.cat([part.reshape(-1) for part in parts])


#: Segments shorter than this, on average, are gathered number by number: a copy of each one takes longer.
_SHORT = 1000


def _reordered(values: Tensor, sizes: Sizes, order: Sizes) -> Tensor:
    """The segments of a tensor in another order."""
    if values.numel() >= _SHORT * len(sizes):
        parts = values.split(sizes.tolist())
        return torch.cat([parts[number] for number in order.tolist()])
    starts, sizes = (np.cumsum(sizes) - sizes)[order], sizes[order]
    moves = np.stack([starts - (np.cumsum(sizes) - sizes), sizes])
    # Not from pinned memory: CUDA has its own copy of the numbers when it returns, and nothing waits for the device.
    shifts, counts = torch.from_numpy(moves).to(values.device, non_blocking=True)
    source = torch.repeat_interleave(shifts, counts, output_size=values.numel())
    return values[source + torch.arange(values.numel(), device=values.device)]


class ReturnRows(torch.autograd.Function):
    """Rows to those who asked for them; backward, the gradients of rows to their owners (both collective)."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        handle: Tensor,
        exchange: RowExchange,
        step_inputs: Callable[[], StepInputs],
        *rows: Tensor,
    ) -> tuple[Tensor, ...]:
        """See `RowExchange.to_requesters`; the handle requires grad, so that ranks without tables take part too."""
        ctx.exchange, ctx.step_inputs = exchange, step_inputs  # type: ignore[attr-defined]
        return tuple(exchange.to_requesters(rows))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # A step without its rates fails: on all ranks here, before those without tables wait for the next exchange.
        ctx.step_inputs()  # type: ignore[attr-defined]
        return None, None, None, *ctx.exchange.to_owners(gradients)  # type: ignore[attr-defined]


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
