"""The kernel: all tables of this process (or of one TorchRec group), looked up and updated together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch
from torch import Tensor, nn

from tpuemb_torch.kernels.constants import Constant
from tpuemb_torch.kernels.fbgemm_step import fbgemm_refusal
from tpuemb_torch.kernels.group import FusedLookup, TableGroup, group_key
from tpuemb_torch.kernels.native import compiler
from tpuemb_torch.kernels.step_inputs import StepInputs
from tpuemb_torch.kernels.tables import StoredPart, TablePart, fill_initial
from tpuemb_torch.preprocessing import SortedIds

KERNELS = ("auto", "compiled", "eager", "fbgemm")


def check_kernel(kernel: str) -> None:
    """Raises ValueError for a kernel that there is not, naming those that there are."""
    if kernel not in KERNELS:
        raise ValueError(f"kernel {kernel!r} is not available: choose one of {', '.join(KERNELS)}")
    if kernel == "compiled" and compiler() is None:
        raise ValueError('kernel "compiled" needs a C++ compiler: install g++ or clang++ (or set CXX), or use "eager"')


def _check_fbgemm(parts: Sequence[TablePart], device: torch.device) -> None:
    """Raises ValueError for tables that FBGEMM's fused optimizers do not train as their configuration says."""
    if device.type not in ("cpu", "meta"):
        raise ValueError(f'kernel "fbgemm" is for the CPU, not {device}: use "compiled"')
    for part in parts:
        refusal = fbgemm_refusal(part.table, len(part.columns))
        if refusal is not None:
            raise ValueError(refusal)


def _group_key(part: TablePart, kernel: str) -> tuple[object, ...]:
    """What the tables of a group have in common; FBGEMM takes one rate for all."""
    optimizer = part.table.optimizer
    rate = optimizer.learning_rate if kernel == "fbgemm" else None
    return *group_key(optimizer, len(part.columns)), rate


def group_runs(parts: Sequence[TablePart], kernel: str) -> list[list[int]]:
    """The parts, by number, that form each `TableGroup`: consecutive ones that agree in all but numbers."""
    return [list(run) for _, run in groupby(range(len(parts)), key=lambda i: _group_key(parts[i], kernel))]


@dataclass(frozen=True, eq=False)
class LookupFeatures:
    """The features of a lookup, in the order of their tables.

    Attributes:
        per_group: number of features of each table group.
        first_rows: int64 `[features]`, first row of each feature's part in the buffer of its group.
    """

    per_group: list[int]
    first_rows: Constant


class TableBatchedEmbedding(nn.Module):
    """Table-batched lookup with the optimizers of the tables fused into its backward.

    It has the surface of FBGEMM's table-batched embedding that TorchRec touches, so that it can stand in its
    place.  Consecutive tables that agree in all but numbers form one `TableGroup`.

    Args:
        parts: the tables' parts held here, in order.
        feature_parts: for each feature, the index of its part; ascending.
        device: where the buffers live ("meta": nowhere).
        seed: seed of the initial weights.
        step_inputs: called in each backward.
        kernel: see `GroupStep`.
    """

    def __init__(
        self,
        parts: Sequence[TablePart],
        feature_parts: Sequence[int],
        device: torch.device,
        seed: int,
        step_inputs: Callable[[], StepInputs],
        kernel: str = "auto",
    ) -> None:
        super().__init__()
        if list(feature_parts) != sorted(feature_parts):
            raise ValueError(f"features must come in the order of their tables, got {list(feature_parts)}")
        self.parts = list(parts)
        self._step_inputs = step_inputs
        if kernel == "fbgemm":
            _check_fbgemm(parts, device)
        members = group_runs(parts, kernel)
        self.groups = nn.ModuleList(TableGroup([parts[i] for i in run], device, kernel) for run in members)
        first_rows = [row for group in self.table_groups() for row in group.first_rows[:-1]]
        group_of = [number for number, run in enumerate(members) for _ in run]
        self._first_rows, self._group_of = first_rows, group_of
        self.features = self.lookup_features(feature_parts)
        self.feature_dims = [len(parts[i].columns) for i in feature_parts]
        # Makes the lookup a node of the graph although no tensor of the module requires grad.
        self._handle = torch.empty(0, dtype=torch.float32, device=device, requires_grad=True)
        if device.type != "meta":
            self.reset_parameters(seed)

    def lookup_features(self, feature_parts: Sequence[int]) -> LookupFeatures:
        """Features that `look_up_bags` can be asked for, by the index of each one's part; ascending."""
        # Features of a group are consecutive, as its tables are.
        per_group = [0] * len(self.groups)
        for part in feature_parts:
            per_group[self._group_of[part]] += 1
        return LookupFeatures(per_group, Constant([self._first_rows[part] for part in feature_parts], torch.int64))

    def table_groups(self) -> list[TableGroup]:
        """The groups, in the order of the parts."""
        return [group for group in self.groups if isinstance(group, TableGroup)]

    @property
    def device(self) -> torch.device:
        """Where the tables are."""
        return next((group.flat("parameters").device for group in self.table_groups()), torch.device("cpu"))

    def reset_parameters(self, seed: int) -> None:
        """Writes the initial weights and slots."""
        for group in self.table_groups():
            slots = {slot.name: slot.initial for slot in group.rule.slots}
            for stored in group.stored():
                fill_initial(stored, slots, seed)

    def stored(self) -> list[StoredPart]:
        """The parts with live views of their weights and slots, in order."""
        return [stored for group in self.table_groups() for stored in group.stored()]

    def forward(
        self,
        indices: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None = None,
        ordered: SortedIds | None = None,
    ) -> Tensor:
        """Looks up weighted bags.

        Args:
            indices: int64 `[n]`, ids local to each part, feature-major.
            offsets: int64 `[features * batch + 1]`.
            per_sample_weights: float32 `[n]` gains, or None for 1.0 each.
            ordered: the ids sorted by row, all parts' rows back to back, if that was done ahead.

        Returns:
            float32 `[batch, sum of the features' dims]`.
        """
        features = len(self.feature_dims)
        if features == 0:
            return torch.empty(0, 0, dtype=torch.float32, device=offsets.device)
        batch = (offsets.numel() - 1) // features
        bags = [batch] * features
        outputs = self._look_up(self.features, indices, offsets, per_sample_weights, ordered, bags, columns=True)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def look_up_bags(
        self,
        features: LookupFeatures,
        indices: Tensor,
        offsets: Tensor,
        gains: Tensor | None,
        bags: Sequence[int],
        ordered: SortedIds | None = None,
    ) -> list[Tensor]:
        """Looks up weighted bags, of which features may have different numbers.

        Args:
            features: from `lookup_features`.
            indices: int64 `[n]`, ids local to each part, feature-major.
            offsets: int64 `[sum of bags + 1]`.
            gains: float32 `[n]`, or None for 1.0 each.
            bags: number of bags of each feature.
            ordered: as for `forward`.

        Returns:
            float32 `[bags, dim]` per feature: views of one result.
        """
        outputs = self._look_up(features, indices, offsets, gains, ordered, bags, columns=False)
        if len(outputs) > 1:
            # One node of the graph for all groups: rows whose activations a loss does not use take a step with a
            # gradient of zero, as on TPU, in whatever group they are.
            flat = torch.cat([out.reshape(-1) for out in outputs])
            parts = torch.unsafe_split_with_sizes(flat, [out.numel() for out in outputs])
            outputs = [part.view_as(out) for part, out in zip(parts, outputs, strict=True)]
        counts = [count for count in features.per_group if count]
        starts = [0, *accumulate(counts)]
        return [
            rows
            for out, first, count in zip(outputs, starts, counts, strict=False)
            for rows in torch.unsafe_split_with_sizes(out, list(bags[first : first + count]))
        ]

    def look_up_rows(self, rows: Sequence[Tensor], core_rows: Sequence[Sequence[int]]) -> list[Tensor]:
        """Looks up rows by themselves; the backward adds up the gradients of those that occur more than once.

        Args:
            rows: int64 `[n]` per group, rows of its buffer, core after core.
            core_rows: number of rows of each core, per group.

        Returns:
            float32 `[n, dim]` per group.
        """
        return [
            FusedLookup.apply(
                self._handle,
                group,
                own,
                torch.arange(own.numel() + 1, device=own.device),
                None,
                None,
                0,
                self._step_inputs,
                cores,
            )
            for group, own, cores in zip(self.table_groups(), rows, core_rows, strict=True)
        ]

    def _look_up(
        self,
        features: LookupFeatures,
        indices: Tensor,
        offsets: Tensor,
        gains: Tensor | None,
        ordered: SortedIds | None,
        bags: Sequence[int],
        columns: bool,
    ) -> list[Tensor]:
        """One result per group that has features: features as columns, or bags as rows."""
        first_bags = [0, *accumulate(bags)]
        bounds = offsets[torch.tensor(first_bags, device=offsets.device)]
        groups = self.table_groups()
        # Any group's will do: the results are the same.
        ids = groups[0].step.lookup.add_first_rows(indices, bounds, features.first_rows.on(indices.device))
        ordered_of: Sequence[SortedIds | None] = [None] * len(groups)
        if ordered is not None:
            ordered_of = ordered.split([0, *accumulate(group.rows for group in groups[:-1])])
        outputs = []
        first = 0
        for group, count, own_order in zip(groups, features.per_group, ordered_of, strict=True):
            if count == 0:
                continue
            own_bags = offsets[first_bags[first] : first_bags[first + count] + 1]
            begin, end = (0, ids.numel()) if count == len(bags) else bounds[[first, first + count]].tolist()
            own_gains = None if gains is None else gains[begin:end]
            lookup = (ids[begin:end], own_bags - begin, own_gains, own_order)
            outputs.append(FusedLookup.apply(self._handle, group, *lookup, count if columns else 0, self._step_inputs))
            first += count
        return outputs

    # What TorchRec's fused optimizer asks of a kernel.

    def split_embedding_weights(self) -> list[Tensor]:
        """One live `[rows, dim]` view of the weights per part."""
        return [stored.tensors["parameters"] for stored in self.stored()]

    def get_optimizer_state(self) -> list[dict[str, Tensor]]:
        """One dict of live slot views per part."""
        return [{k: v for k, v in stored.tensors.items() if k != "parameters"} for stored in self.stored()]

    def get_learning_rate(self) -> float:
        """Not the rate of any table: rates come from the config and `set_learning_rates`."""
        return 0.0

    def set_learning_rate(self, lr: float) -> None:
        """Refuses a rate from a TorchRec optimizer or scheduler, which would be ignored otherwise."""
        if lr != 0.0:
            raise RuntimeError(
                f"learning rate {lr} set on a fused optimizer: rates of these tables come from their "
                "TPUEmbeddingConfiguration; give dynamic ones to set_learning_rates()"
            )

    def set_optimizer_step(self, step: int) -> None:
        """No optimizer of the TPU embedding layer has a step counter of its own."""

    def update_hyper_parameters(self, params_dict: dict[str, object]) -> None:
        """Refuses hyper-parameters that do not come from the config."""
        if params_dict:
            raise RuntimeError(f"hyper-parameters {sorted(params_dict)} of fused tables come from their config")

    def flush(self) -> None:
        """There is no cache to write back."""

    def reset_cache_states(self) -> None:
        """There is no cache to drop."""
