"""The contract of an optimizer: its slots and its formula on elements."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

import numpy as np
from torch import Tensor

if TYPE_CHECKING:
    from tpuemb_torch.config.schema import Optimizer

Array = np.ndarray


@dataclass(frozen=True)
class Slot:
    """One slot variable: its name in checkpoints and Load/Retrieve ops, and its value where nothing was loaded."""

    name: str
    initial: float


class UpdateRule(ABC):
    """The step of one algorithm on the rows that it touches.

    `update` and `reference` are the same mathematics written twice: once on float32 tensors (the one formula
    that eager mode, the CPU and the GPU compilers run), once in float64 NumPy, independently, as the oracle.
    Both are element-wise, so any shapes that broadcast will do; gradients are already summed and clipped, and
    weight decay and weight clipping happen around the rule (see `step.py`).

    `update` is pure and has no data-dependent Python control flow, so that `torch.compile(dynamic=True)` takes
    it as it is; it may branch on hyper-parameters, which are Python numbers.

    A subclass annotates its hyper-parameters as class attributes under their proto names, with proto3's value
    for an unset field (0 or False) as the default; the constructor sets them.
    """

    #: Name of the oneof case in `OptimizationParameters`.
    algorithm: ClassVar[str]
    #: Slot variables after `parameters`, in the order of the state and of the Load/Retrieve ops.  Where they depend
    #: on the configuration, an instance has its own; ask `slots_of(optimizer)` without one.
    slots: tuple[Slot, ...] = ()
    #: The part of the op names: Load{op_name}Parameters; None where TensorFlow has no own ops.
    op_name: ClassVar[str | None] = None
    #: Why a table does not train with this rule unless its user insists; None for a rule that can be relied on.
    untrainable_reason: ClassVar[str | None] = None
    #: The scalars of a step, besides hyper-parameters: "lr" is positional; "step" (the step counter of
    #: frequency_aware_adagrad) is an extra keyword of `update` and `reference`.
    dynamic_inputs: ClassVar[tuple[Literal["lr", "step"], ...]] = ("lr",)
    #: Whether the step goes over all rows of the table, also those without a lookup.
    sweeps_all_rows: bool = False

    def __init__(self, hyperparameters: Mapping[str, float | bool] | None = None) -> None:
        """Sets the hyper-parameters; those left out keep proto3's value of an unset field.

        Raises:
            TypeError: for a name that the algorithm does not have.
        """
        self.hyperparameters = dict(hyperparameters or {})
        known = inspect.get_annotations(type(self))
        for name, value in self.hyperparameters.items():
            if name not in known:
                own = ", ".join(known) or "none"
                raise TypeError(f"{self.algorithm} has no hyper-parameter {name!r}; it has: {own}")
            setattr(self, name, value)

    @classmethod
    def of(cls, optimizer: Optimizer) -> UpdateRule:
        """The rule of a table's optimizer, which is of this algorithm."""
        return cls(optimizer.hyperparameters)

    @classmethod
    def slots_of(cls, optimizer: Optimizer) -> tuple[Slot, ...]:
        """The slots of `of(optimizer)`, without building it."""
        return cls.slots

    @abstractmethod
    def update(self, w: Tensor, g: Tensor, lr: Tensor, *slots: Tensor) -> tuple[Tensor, ...]:
        """Returns the new weights and slots.

        Args:
            w: weights, `[rows, dim]` float32.
            g: gradients, `[rows, dim]` float32, summed over the global batch and clipped.
            lr: learning rate, float32 0-dim or `[rows, 1]`.
            slots: slot values, each `[rows, dim]` float32, in the order of `self.slots`.
        """

    @abstractmethod
    def reference(self, w: Array, g: Array, lr: Array | float, *slots: Array) -> tuple[Array, ...]:
        """The same in float64 NumPy."""


_RULES: dict[str, type[UpdateRule]] = {}

Rule = TypeVar("Rule", bound=type[UpdateRule])


def register(algorithm: str) -> Callable[[Rule], Rule]:
    """Class decorator: makes a rule known under the name of its oneof case."""

    def decorate(rule: Rule) -> Rule:
        rule.algorithm = algorithm
        _RULES[algorithm] = rule
        return rule

    return decorate


def rules() -> Mapping[str, type[UpdateRule]]:
    """All rules by algorithm name."""
    return dict(_RULES)


def rule_class(algorithm: str) -> type[UpdateRule]:
    """Returns the class of an algorithm.

    Raises:
        NotImplementedError: for one that has no rule; the message lists those that have.
    """
    try:
        return _RULES[algorithm]
    except KeyError:
        known = ", ".join(sorted(_RULES))
        raise NotImplementedError(f"no update rule for algorithm {algorithm!r}; available: {known}") from None


def create_rule(optimizer: Optimizer) -> UpdateRule:
    """Returns the update rule of a table's optimizer.

    Raises:
        NotImplementedError: where the algorithm has no rule.
        ValueError: for a user-defined program that cannot be run.
    """
    return rule_class(optimizer.algorithm).of(optimizer)


def slots_of(optimizer: Optimizer) -> tuple[Slot, ...]:
    """Returns the slot variables of a table's optimizer, in the order of the state.

    Raises:
        NotImplementedError: where the algorithm has no rule.
    """
    return rule_class(optimizer.algorithm).slots_of(optimizer)
