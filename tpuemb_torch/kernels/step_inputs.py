"""What a backward needs besides gradients: the dynamic rates, and how the ranks' gradients add up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class StepInputs(NamedTuple):
    """The inputs of one step.

    Attributes:
        rates: float32 `[num_learning_rates]`, dynamic inputs by tag.
        scale: factor on the gradient that arrives at the kernel.
        cores: number of cores whose batches the kernel sees, one after the other.
    """

    rates: Tensor
    scale: float
    cores: int


class StepSource:
    """Holds the inputs of the next step for all kernels of a collection.

    Args:
        num_learning_rates: number of dynamic tags.
        cores: see `StepInputs`.
        scale: factor on the gradients' sum over all cores.
        divisor: gives, at the time of the backward, by what the gradients that arrive were divided on their way; None
            is 1.
    """

    def __init__(
        self,
        num_learning_rates: int,
        cores: int = 1,
        scale: float = 1.0,
        divisor: Callable[[], float] | None = None,
    ) -> None:
        self.num_learning_rates = num_learning_rates
        self.cores = cores
        self._scale = scale
        self._divisor = divisor
        self.rates = torch.empty(0, dtype=torch.float32) if num_learning_rates == 0 else None
        self._followed: Callable[[], Sequence[float | Tensor]] | None = None
        self._agreed = False
        self._used: list[Tensor] = []

    def set_rates(self, rates: Sequence[float | Tensor]) -> None:
        """Sets the dynamic inputs by tag, until they are set again.

        Raises:
            ValueError: for a wrong number of rates, or one that is not a finite scalar.
            TypeError: for one that is not a number or a float32 tensor.
        """
        self.rates = check_rates(rates, self.num_learning_rates)
        self._followed = None

    def follow(self, rates: Callable[[], Sequence[float | Tensor]]) -> None:
        """Takes the dynamic inputs from a function, asked at each step."""
        self._followed = rates

    @contextmanager
    def using(self, rates: Tensor) -> Iterator[None]:
        """Takes given, checked inputs, which are those of all ranks, for one step, whatever is followed."""
        followed, self._followed = self._followed, None
        self.rates, self._agreed = rates, True
        try:
            yield
        finally:
            self._followed, self._agreed = followed, False

    def take_over(self, other: StepSource) -> None:
        """Goes on with the rates of another source."""
        self.rates, self._followed = other.rates, other._followed

    def now(self) -> Tensor | None:
        """The dynamic inputs that a step would take now; None before any were set.  Raises as `set_rates`."""
        return self.rates if self._followed is None else check_rates(self._followed(), self.num_learning_rates)

    def required(self) -> Tensor:
        """The dynamic inputs of the next step; raises RuntimeError before any were set."""
        self.rates = self.now()
        if self.rates is None:
            raise RuntimeError(
                f"the config has {self.num_learning_rates} dynamic learning rate(s): "
                "call set_learning_rates() before the backward"
            )
        return self.rates

    @property
    def used(self) -> Tensor | None:
        """The dynamic inputs of the steps since `forget_used` that no one compared with those of other ranks.

        None if there was no such step, or if there were several with different inputs: a rank may take part in only
        some of them.
        """
        return self._used[0] if len(self._used) == 1 else None

    def forget_used(self) -> None:
        """Called when `used` was compared."""
        self._used = []

    def __call__(self) -> StepInputs:
        """The inputs of the next step, for gradients that were divided on their way."""
        inputs = self.undivided()
        return inputs if self._divisor is None else inputs._replace(scale=self._scale * self._divisor())

    def undivided(self) -> StepInputs:
        """The inputs of the next step, for gradients that arrive as they were sent."""
        rates = self.required()
        if not self._agreed and not any(torch.equal(rates, used) for used in self._used):
            self._used = [*self._used[:1], rates]  # two that differ say as much as more
        return StepInputs(rates, self._scale, self.cores)


def check_rates(rates: Sequence[float | Tensor], count: int) -> Tensor:
    """Dynamic inputs as a float32 `[count]` tensor; raises as `StepSource.set_rates`."""
    if not isinstance(rates, Sequence | Tensor | np.ndarray) or isinstance(rates, str):
        raise TypeError(f"learning rates must be a sequence of {count} scalars, got {type(rates).__name__}")
    rates = list(rates)
    if len(rates) != count:
        raise ValueError(
            f"{len(rates)} learning rates given, but the config has {count} dynamic tags: give one scalar per tag"
        )
    values = []
    for tag, rate in enumerate(rates):
        if isinstance(rate, Tensor):
            if rate.dim() != 0:
                raise ValueError(f"learning rate of tag {tag} must be a scalar (rank 0), got shape {list(rate.shape)}")
            if rate.dtype != torch.float32:
                raise TypeError(f"learning rate of tag {tag} must be float32, got {rate.dtype}")
        elif isinstance(rate, bool) or not hasattr(rate, "__float__"):
            raise TypeError(f"learning rate of tag {tag} must be a number, got {type(rate).__name__}")
        values.append(float(rate))
    result = torch.tensor(values, dtype=torch.float32)
    for tag, value in enumerate(values):
        if not bool(torch.isfinite(result[tag])):
            raise ValueError(f"learning rate of tag {tag} is {value}: it must be finite as a float32")
    return result
