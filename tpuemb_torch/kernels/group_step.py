"""Which implementation steps a group: chosen at the first step, since it depends on the device and on the work."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils._triton import has_triton

from tpuemb_torch.kernels.constants import Constant
from tpuemb_torch.kernels.formula import UntranslatableError
from tpuemb_torch.kernels.lookup import NativeLookup, TorchLookup
from tpuemb_torch.kernels.native import BuildError
from tpuemb_torch.kernels.native_step import NativeStep
from tpuemb_torch.kernels.numbers import TableNumbers
from tpuemb_torch.kernels.row_step import CompiledRowStep, EagerRowStep
from tpuemb_torch.kernels.update import ChunkedStep
from tpuemb_torch.optimizers import StepNumbers, UpdateRule
from tpuemb_torch.preprocessing import SortedIds

_log = logging.getLogger("tpuemb_torch.kernels")

#: "auto" steps this many elements op by op before it compiles: about the time that compiling takes.
ELEMENTS_BEFORE_COMPILING = 1 << 22

#: `(numbers, row_starts, state, ids, bag, gains, gradient)`; see `GroupStep.__call__`.
Implementation = Callable[
    [StepNumbers, Tensor, Sequence[Tensor], SortedIds, Tensor, Tensor | None, Tensor],
    None,
]


class GroupStep:
    """One optimizer step of a group, in place.

    Args:
        rule: the update rule.
        numbers: the group's numbers.
        row_starts: first row of each table in the group's buffer, and the number of rows.
        kernel: "eager"; "compiled"; or "auto": compiled once enough has been stepped, eager where that cannot be.
    """

    def __init__(self, rule: UpdateRule, numbers: TableNumbers, row_starts: Sequence[int], kernel: str) -> None:
        self.rule = rule
        self.numbers = numbers
        self.kernel = kernel
        # Tables that agree in all numbers are one.
        tables = [row_starts[0], row_starts[-1]] if numbers.uniform else row_starts
        self._row_starts = Constant(tables, torch.int64)
        self._chosen: dict[str, Implementation] = {}
        self._stepped = 0

    def __call__(
        self,
        rates: Tensor,
        state: Sequence[Tensor],
        ids: SortedIds,
        bag: Tensor,
        gains: Tensor | None,
        gradient: Tensor,
    ) -> None:
        """Folds the gradients of each distinct row and steps it once.

        Args:
            rates: float32 `[num_learning_rates]`, on the group's device.
            state: weights and slots, float32 `[rows, dim]` each.
            ids: the `n` ids looked up, sorted.
            bag: int64 `[n]`, row of `gradient` that each id's bag received.
            gains: float32 `[n]`, or None for 1.0 each.
            gradient: float32 `[bags, dim]`.
        """
        numbers = self.numbers.step(rates)
        if self.numbers.uniform:
            numbers = StepNumbers(*(None if value is None else value[:1] for value in numbers))  # type: ignore[arg-type]
        implementation = self._implementation(state, ids, numbers)
        implementation(numbers, self._row_starts.on(rates.device), state, ids, bag, gains, gradient)

    @property
    def lookup(self) -> type[NativeLookup] | type[TorchLookup]:
        """What looks up and sorts the ids of this group: C++ once the step is."""
        return NativeLookup if isinstance(self._chosen.get("cpu"), NativeStep) else TorchLookup

    def __getstate__(self) -> dict[str, object]:
        # Copies and pickles choose, and load what was compiled, for themselves.
        return {**self.__dict__, "_chosen": {}}

    def _implementation(self, state: Sequence[Tensor], ids: SortedIds, numbers: StepNumbers) -> Implementation:
        device = state[0].device.type
        if device in self._chosen:
            return self._chosen[device]
        if self.kernel == "auto" and self._stepped < ELEMENTS_BEFORE_COMPILING:
            rows = state[0].shape[0] if self.rule.sweeps_all_rows else ids.rows.numel()
            self._stepped += rows * state[0].shape[1]
            return ChunkedStep(self.rule, EagerRowStep(self.rule))
        self._chosen[device] = self._choose(device, numbers)
        return self._chosen[device]

    def _choose(self, device: str, numbers: StepNumbers) -> Implementation:
        if self.kernel == "eager":
            return ChunkedStep(self.rule, EagerRowStep(self.rule))
        if device != "cpu":
            if self.kernel == "auto" and not has_triton():
                _warn_once("there is no Triton for this device")
                return ChunkedStep(self.rule, EagerRowStep(self.rule))
            return ChunkedStep(self.rule, CompiledRowStep(self.rule))
        try:
            step = NativeStep(self.rule, numbers)
            NativeLookup.build()
            return step
        except UntranslatableError as operation:
            if self.kernel == "compiled":
                return ChunkedStep(self.rule, CompiledRowStep(self.rule))
            _log.info("the %s step stays eager: no C++ for %s", self.rule.algorithm, operation)
        except BuildError as problem:
            if self.kernel == "compiled":
                raise
            _warn_once(str(problem))
        return ChunkedStep(self.rule, EagerRowStep(self.rule))


_warned: set[str] = set()


def _warn_once(problem: str) -> None:
    if problem not in _warned:
        _warned.add(problem)
        _log.warning("embedding tables are updated op by op, which is slower: %s", problem)
