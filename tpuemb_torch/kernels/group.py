"""Tables of one update rule and one dimension, stored back to back, looked up and updated in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from tpuemb_torch.config import Optimizer
from tpuemb_torch.kernels.buffers import advise_huge_pages
from tpuemb_torch.kernels.fbgemm_step import FbgemmStep
from tpuemb_torch.kernels.group_step import GroupStep
from tpuemb_torch.kernels.numbers import TableNumbers
from tpuemb_torch.kernels.step_inputs import StepInputs
from tpuemb_torch.kernels.tables import StoredPart, TablePart
from tpuemb_torch.optimizers import create_rule
from tpuemb_torch.optimizers.quantization import quantize
from tpuemb_torch.preprocessing import SortedIds


def group_key(optimizer: Optimizer, dimension: int) -> tuple[object, ...]:
    """What tables must have in common to share a group; rates, limits and decay may differ."""
    return (
        optimizer.algorithm,
        tuple(optimizer.hyperparameters.items()),
        optimizer.program,
        optimizer.accumulates,
        optimizer.quantization,
        dimension,
    )


class TableGroup(nn.Module):
    """Storage, lookup and fused update of the tables of one group.

    Buffers are flat (`[rows * dim]` float32): one for the weights and one for each slot, tables back to back.
    They are neither parameters nor, to torch, buffers: what averages, broadcasts or copies those of a model has the
    weights already, as the collection's parameters.
    """

    def __init__(self, parts: Sequence[TablePart], device: torch.device, kernel: str = "eager") -> None:
        super().__init__()
        optimizer = parts[0].table.optimizer
        self.parts = list(parts)
        self.rule = create_rule(optimizer)
        self.quantization = optimizer.quantization
        #: Each core's contribution is a step of its own, in core order, instead of one step with the sum.
        self.steps_per_core = not optimizer.accumulates
        self.dim = len(parts[0].columns)
        self.state_names = ["parameters", *(slot.name for slot in self.rule.slots)]
        self.numbers = TableNumbers([part.table.optimizer for part in parts])
        starts = [0]
        for part in parts:
            starts.append(starts[-1] + len(part.rows))
        self.first_rows = starts
        self.rows = starts[-1]
        self.step = GroupStep(self.rule, self.numbers, starts, "eager" if kernel == "fbgemm" else kernel)
        self.fbgemm = FbgemmStep(optimizer.algorithm) if kernel == "fbgemm" else None
        self._flat: dict[str, Tensor] = {}
        for name in self.state_names:
            buffer = torch.empty(self.rows * self.dim, dtype=torch.float32, device=device)
            advise_huge_pages(buffer)
            self._flat[name] = buffer

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TableGroup:
        """Moves or allocates the buffers (`to`, `to_empty`)."""
        super()._apply(fn, recurse)
        with torch.no_grad():
            self._flat = {name: fn(buffer) for name, buffer in self._flat.items()}
        for buffer in self._flat.values():
            advise_huge_pages(buffer)
        return self

    def flat(self, name: str) -> Tensor:
        """The flat buffer of the weights ("parameters") or of a slot."""
        return self._flat[name]

    def state(self) -> list[Tensor]:
        """Weights and slots as `[rows, dim]` views."""
        return [self.flat(name).view(self.rows, self.dim) for name in self.state_names]

    def stored(self) -> list[StoredPart]:
        """Views by part."""
        state = dict(zip(self.state_names, self.state(), strict=True))
        return [
            StoredPart(part, {name: values[begin : begin + len(part.rows)] for name, values in state.items()})
            for part, begin in zip(self.parts, self.first_rows, strict=False)
        ]

    def lookup(
        self, ids: Tensor, offsets: Tensor, gains: Tensor | None, features: int, batch: int, ordered: SortedIds | None
    ) -> Tensor:
        """Weighted sums of rows.

        Args:
            ids: int64 `[n]`, rows of the group's buffer.
            offsets: int64 `[features * batch + 1]`.
            gains: float32 `[n]` or None for 1.0 each.
            features: number of features, whose bags follow each other.
            batch: number of samples.
            ordered: the ids sorted, if at hand.

        Returns:
            float32 `[batch, features * dim]`.
        """
        weights = self.flat("parameters").view(self.rows, self.dim)
        if self.quantization is not None:
            # Each distinct row once, then the bags over the quantized rows.
            ordered = self.step.lookup.sort(ids, self.rows) if ordered is None else ordered
            q = self.quantization
            weights = quantize(weights.index_select(0, ordered.rows), q.lower, q.upper, q.num_buckets)
            ids = ordered.inverse()
        return self.step.lookup.look_up(ids, offsets, gains, weights, features, batch)

    def update(self, ordered: SortedIds, bag: Tensor, gains: Tensor | None, gradient: Tensor, rates: Tensor) -> None:
        """One optimizer step of the group.

        Args:
            ordered: the `n` ids looked up, rows of the group's buffer.
            bag: int64 `[n]`, row of `gradient` that each id's bag received.
            gains: float32 `[n]` or None.
            gradient: float32 `[bags, dim]`.
            rates: float32 `[num_learning_rates]`.
        """
        self.step(rates, self.state(), ordered, bag, gains, gradient)


class FusedLookup(torch.autograd.Function):
    """Lookup whose backward is the optimizer step of the rows it read."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        handle: Tensor,
        group: TableGroup,
        ids: Tensor,
        offsets: Tensor,
        gains: Tensor | None,
        ordered: SortedIds | None,
        features: int,
        step_inputs: Callable[[], StepInputs],
        core_bags: Sequence[int] | None = None,
    ) -> Tensor:
        """Looks up bags.

        Returns:
            float32 `[batch, features * dim]` of `features * batch` bags, feature-major; or float32 `[bags, dim]`
            where `features` is 0.

        Args:
            ctx: autograd's context.
            handle: any tensor that requires grad: it makes this a node of the graph.
            group: the tables.
            ids: int64 `[n]`, rows of the group's buffer.
            offsets: int64 `[bags + 1]`.
            gains: float32 `[n]` or None.
            ordered: the ids sorted, or None: then the backward sorts them.
            features: number of features that are columns of the result, or 0 for bags as rows.
            step_inputs: called once in each backward.
            core_bags: number of bags of each core, whose bags follow each other; None: each has as many samples.
        """
        batch = (offsets.numel() - 1) // max(features, 1)
        ctx.group, ctx.features, ctx.batch, ctx.step_inputs = group, features, batch, step_inputs  # type: ignore[attr-defined]
        if ordered is None and group.quantization is not None:
            ordered = group.step.lookup.sort(ids, group.rows)
        ctx.lookup = (ids, offsets, gains, ordered)  # type: ignore[attr-defined]
        ctx.core_bags = core_bags  # type: ignore[attr-defined]
        return group.lookup(ids, offsets, gains, max(features, 1), batch, ordered)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[None, ...]:
        group: TableGroup = ctx.group  # type: ignore[attr-defined]
        features, batch = ctx.features, ctx.batch  # type: ignore[attr-defined]
        ids, offsets, gains, ordered = ctx.lookup  # type: ignore[attr-defined]
        rates, scale, cores = ctx.step_inputs()  # type: ignore[attr-defined]
        rates = rates.to(ids.device)
        gradient = gradients[0].contiguous().view(offsets.numel() - 1, group.dim)
        if scale != 1.0:
            if ids.numel() < gradient.numel():  # the smaller of the two factors of a row's gradient
                gains = torch.full_like(ids, scale, dtype=torch.float32) if gains is None else gains * scale
            else:
                gradient = gradient * scale
        step = group.step
        if group.fbgemm is not None:
            if ids.numel():  # FBGEMM refuses a table without rows
                rate, state = group.numbers.step(rates).lr[0], group.state()
                group.fbgemm(rate, state, ids, offsets, gains, gradient.view(batch, max(features, 1) * group.dim))
            return (None,) * 9
        bag = step.lookup.bags(offsets, max(features, 1), batch, ids.numel())
        if group.steps_per_core and cores > 1:
            # A shard's batch is the cores' batches one after the other.
            if ctx.core_bags is None:  # type: ignore[attr-defined]
                core = torch.div(bag, max(features, 1) * (batch // cores), rounding_mode="floor")
            else:
                ends = torch.tensor(ctx.core_bags, device=bag.device).cumsum(0)  # type: ignore[attr-defined]
                core = torch.searchsorted(ends, bag, right=True)
            for index in range(cores):
                mine = core == index
                own = step.lookup.sort(ids[mine], group.rows)
                group.update(own, bag[mine], None if gains is None else gains[mine], gradient, rates)
        else:
            if ordered is None:
                ordered = step.lookup.sort(ids, group.rows)
            group.update(ordered, bag, gains, gradient, rates)
        return (None,) * 9
