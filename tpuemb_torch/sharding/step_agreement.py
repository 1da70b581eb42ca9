"""What ranks agree on before each batch and each step: errors, sizes and learning rates, in one small all_reduce."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tpuemb_torch.kernels import StepSource
from tpuemb_torch.preprocessing import InputError
from tpuemb_torch.sharding.agreement import NO_SAY, extremes, ranges_of


class BatchesEndedError(InputError):
    """Another rank has come to the end of its batches."""


class StepAgreement:
    """Agrees with the other ranks; every method is collective.

    Args:
        group: the ranks.
        device: where they communicate.
        steps: the learning rates of this rank.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, steps: StepSource) -> None:
        self._group = group
        self._device = device
        self._steps = steps

    def on_batch(
        self,
        error: InputError | None = None,
        stride: int = 0,
        weighted: bool = False,
        ended: bool = False,
        rates: list[int] | None = None,
    ) -> tuple[int, bool]:
        """The largest batch of all ranks, and whether any has weights.

        Args:
            error: what is wrong with this rank's batch; raised after the others know.
            stride: samples of this rank's batch.
            weighted: whether it has weights.
            ended: whether this rank has no more batches.
            rates: `rate_words`, where they are to be compared.

        Raises:
            InputError: if any rank has an error, or has no more batches while this one has.
            ValueError: if the ranks' learning rates differ.
        """
        own = [stride, error is not None, weighted, ended, *(rates or no_rate_words(self._steps))]
        largest, failed, any_weighted, any_ended, *all_rates = self._maxima(torch.tensor(own, dtype=torch.int64))
        if error is not None:
            raise error
        if any_ended and not ended:
            raise BatchesEndedError("another rank has no more batches: give all ranks the same number of batches")
        if failed:
            raise InputError("another rank rejected its part of the batch or its learning rates; its message says why")
        if not ended:
            check_same_rates([int(word) for word in all_rates], self._steps)
        return int(largest), bool(any_weighted)

    def on_step(self, error: Exception | None, rates: Tensor | None) -> None:
        """That a step may be applied.

        Args:
            error: what is wrong with this rank's gradients or rates; raised after the others know.
            rates: float32 `[num_learning_rates]`; must be the same on all ranks.

        Raises:
            InputError: if another rank has an error.
            ValueError: if the ranks' rates differ.
        """
        count = self._steps.num_learning_rates
        mine = torch.zeros(count, dtype=torch.float32) if rates is None else rates
        failed, *both = self._maxima(
            torch.cat([torch.tensor([error is not None]).double(), mine.double(), -mine.double()])
        )
        if error is not None:
            raise error
        if failed:
            raise InputError(
                "another rank refused its step (its model, gradients or learning rates); its message says why"
            )
        for tag, (high, minus_low) in enumerate(zip(both[:count], both[count:], strict=True)):
            if high != -minus_low:
                lower, higher = (str(np.float32(rate)) for rate in (-minus_low, high))
                raise ValueError(
                    f"learning rate of tag {tag} is {lower} on one rank and {higher} on another: send the same on all"
                )

    def _maxima(self, own: Tensor) -> list[float]:
        state = own.to(self._device)
        dist.all_reduce(state, op=dist.ReduceOp.MAX, group=self._group)
        found: list[float] = state.tolist()
        return found


# Learning rates travel with the sizes of the batches, as bits.


def rate_words(steps: StepSource) -> list[int]:
    """This rank's dynamic rates, those of now and those of its steps since they were compared last, for `MAX`."""
    now, used = steps.now(), steps.used
    return [now is not None, now is None, *_rate_extremes(now, steps), *_rate_extremes(used, steps)]


def no_rate_words(steps: StepSource) -> list[int]:
    """What a rank gives whose rates are not to be compared."""
    return [0, 0] + [NO_SAY] * (4 * steps.num_learning_rates)


def check_same_rates(words: Sequence[int], steps: StepSource) -> None:
    """Raises ValueError unless maxima of all ranks' `rate_words` say that their rates are equal."""
    some_set, some_unset, *numbers = words
    count = 2 * steps.num_learning_rates
    now, used = ranges_of(numbers[:count]), ranges_of(numbers[count:])
    if some_set or some_unset:
        steps.forget_used()
    for tag, (low, high) in enumerate(used):
        if low != high:
            raise ValueError(
                f"learning rate of tag {tag} in the last step was {_rate(low)} on one rank and {_rate(high)} on "
                "another: their tables were stepped differently; go back to a checkpoint, and set the same on all"
            )
    for tag, (low, high) in enumerate(now):
        if low != high:
            raise ValueError(
                f"learning rate of tag {tag} is {_rate(low)} on one rank and {_rate(high)} on another: set the same "
                "on all"
            )
    if some_set and some_unset:
        raise ValueError("learning rates are set on one rank and not on another: set the same on all")


def _rate_extremes(rates: Tensor | None, steps: StepSource) -> list[int]:
    if rates is None:
        return [NO_SAY] * (2 * steps.num_learning_rates)
    return extremes((rates + 0.0).view(torch.int32).tolist())  # + 0.0: -0.0 is 0.0


def _rate(bits: int) -> str:
    return str(np.int32(bits).view(np.float32))
