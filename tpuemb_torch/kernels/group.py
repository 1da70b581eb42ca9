"""Tables of one update rule and one dimension, stored back to back, looked up and updated in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from tpuemb_torch.config import Optimizer
from tpuemb_torch.kernels.constants import Constant
from tpuemb_torch.kernels.numbers import TableNumbers
from tpuemb_torch.kernels.row_step import CompiledRowStep, EagerRowStep
from tpuemb_torch.kernels.step_inputs import StepInputs
from tpuemb_torch.kernels.tables import StoredPart, TablePart
from tpuemb_torch.kernels.update import GradientRows, sweep_rows, update_rows
from tpuemb_torch.optimizers import create_rule
from tpuemb_torch.optimizers.quantization import quantize
from tpuemb_torch.preprocessing import SortedIds, sort_ids


def group_key(optimizer: Optimizer, dimension: int) -> tuple[object, ...]:
    """What tables must have in common to share a group; rates, limits and decay may differ."""
    return (
        optimizer.algorithm,
        tuple(optimizer.hyperparameters.items()),
        optimizer.program,
        optimizer.accumulation == "disabled",
        optimizer.quantization,
        dimension,
    )


class TableGroup(nn.Module):
    """Storage, lookup and fused update of the tables of one group.

    Buffers are flat (`[rows * dim]` float32): one for the weights and one for each slot, tables back to back.
    They are not parameters: no optimizer outside the group may touch them.
    """

    def __init__(self, parts: Sequence[TablePart], device: torch.device, kernel: str = "eager") -> None:
        super().__init__()
        optimizer = parts[0].table.optimizer
        self.parts = list(parts)
        self.rule = create_rule(optimizer)
        self.row_step = (CompiledRowStep if kernel == "compiled" else EagerRowStep)(self.rule)
        self.quantization = optimizer.quantization
        #: Each core's contribution is a step of its own, in core order, instead of one step with the sum.
        self.steps_per_core = optimizer.accumulation == "disabled"
        self.dim = len(parts[0].columns)
        self.state_names = ["parameters", *(slot.name for slot in self.rule.slots)]
        self.numbers = TableNumbers([part.table.optimizer for part in parts])
        starts = [0]
        for part in parts:
            starts.append(starts[-1] + len(part.rows))
        self.first_rows = starts
        self.rows = starts[-1]
        self._row_starts = Constant(starts, torch.int64)
        for name in self.state_names:
            self.register_buffer(f"state_{name}", torch.empty(self.rows * self.dim, device=device), persistent=False)

    def flat(self, name: str) -> Tensor:
        """The flat buffer of the weights ("parameters") or of a slot."""
        return self.get_buffer(f"state_{name}")

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

    def lookup(self, ids: Tensor, offsets: Tensor, gains: Tensor | None, ordered: SortedIds | None = None) -> Tensor:
        """Weighted sums of rows.

        Args:
            ids: int64 `[n]`, rows of the group's buffer.
            offsets: int64 `[bags + 1]`.
            gains: float32 `[n]` or None for 1.0 each.
            ordered: the ids sorted, if at hand.

        Returns:
            float32 `[bags, dim]`.
        """
        weights = self.flat("parameters").view(self.rows, self.dim)
        if self.quantization is not None:
            # Each distinct row once, then the bags over the quantized rows.
            ordered = sort_ids(ids, self.rows) if ordered is None else ordered
            q = self.quantization
            weights = quantize(weights.index_select(0, ordered.rows), q.lower, q.upper, q.num_buckets)
            ids = ordered.inverse()
        return functional.embedding_bag(
            ids, weights, offsets, mode="sum", include_last_offset=True, per_sample_weights=gains
        )

    def update(self, ordered: SortedIds, bag: Tensor, gains: Tensor | None, gradient: Tensor, rates: Tensor) -> None:
        """One optimizer step of the group.

        Args:
            ordered: the `n` ids looked up, rows of the group's buffer.
            bag: int64 `[n]`, row of `gradient` that each id's bag received.
            gains: float32 `[n]` or None.
            gradient: float32 `[bags, dim]`.
            rates: float32 `[num_learning_rates]`.
        """
        rows = GradientRows(gradient, bag[ordered.order], None if gains is None else gains[ordered.order])
        step = self.numbers.step(rates)
        apply = sweep_rows if self.rule.sweeps_all_rows else update_rows
        apply(self.row_step, self.numbers, step, self._row_starts.on(rates.device), self.state(), ordered, rows)


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
        """
        batch = (offsets.numel() - 1) // max(features, 1)
        ctx.group, ctx.features, ctx.batch, ctx.step_inputs = group, features, batch, step_inputs  # type: ignore[attr-defined]
        if ordered is None and group.quantization is not None:
            ordered = sort_ids(ids, group.rows)
        ctx.lookup = (ids, offsets, gains, ordered)  # type: ignore[attr-defined]
        out = group.lookup(ids, offsets, gains, ordered)
        if features <= 1:
            return out
        return out.view(features, batch, group.dim).transpose(0, 1).reshape(batch, features * group.dim).contiguous()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[None, ...]:
        group: TableGroup = ctx.group  # type: ignore[attr-defined]
        features, batch = ctx.features, ctx.batch  # type: ignore[attr-defined]
        ids, offsets, gains, ordered = ctx.lookup  # type: ignore[attr-defined]
        rates, scale, cores = ctx.step_inputs()  # type: ignore[attr-defined]
        rates = rates.to(ids.device)
        gradient = gradients[0] if scale == 1.0 else gradients[0] * scale
        gradient = gradient.contiguous().view(offsets.numel() - 1, group.dim)
        device = ids.device
        # Bag (feature f, sample b) is row `b * features + f` of the gradient.
        rows = torch.arange(batch, device=device)
        if features > 1:
            rows = (rows * features + torch.arange(features, device=device)[:, None]).reshape(-1)
        bag = torch.repeat_interleave(rows, offsets.diff(), output_size=ids.numel())
        if group.steps_per_core and cores > 1:
            # A shard's batch is the cores' batches one after the other.
            core = torch.div(bag, features * (batch // cores), rounding_mode="floor")
            for index in range(cores):
                mine = core == index
                own = sort_ids(ids[mine], group.rows)
                group.update(own, bag[mine], None if gains is None else gains[mine], gradient, rates)
        else:
            group.update(sort_ids(ids, group.rows) if ordered is None else ordered, bag, gains, gradient, rates)
        return (None,) * 8
