"""The table of update rules under test: one row per algorithm and variant, and states to step from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from tests.hlo_text import parse
from tpuemb_torch.config.schema import LearningRate, Limits, Optimizer
from tpuemb_torch.optimizers import StepNumbers, UpdateRule, apply_step, create_rule, slots_of

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Case:
    """One row: an algorithm with hyper-parameters, and what a zero gradient changes on a touched row."""

    variant: str
    algorithm: str
    #: What changes with g = 0 where every value of the state is "interesting": "w" and slot names.
    zero_gradient_changes: frozenset[str]
    hyperparameters: Mapping[str, float | bool] = field(default_factory=dict)
    #: user_defined_program only: the serialized module.
    program: bytes | None = None

    @property
    def id(self) -> str:
        return f"{self.algorithm}-{self.variant}" if self.variant else self.algorithm

    @property
    def rule(self) -> UpdateRule:
        return create_rule(self.optimizer)

    @property
    def optimizer(self) -> Optimizer:
        numbers = {name: as_float32(value) for name, value in self.hyperparameters.items()}
        return Optimizer(self.algorithm, numbers, LearningRate(constant=0.1), program=self.program)

    @property
    def slot_names(self) -> tuple[str, ...]:
        return tuple(slot.name for slot in slots_of(self.optimizer))

    @property
    def learning_rate(self) -> float:
        return 20.0 if self.algorithm == "frequency_estimator" else as_float32(0.1)  # there it is the step


def as_float32(value: float | bool) -> float | bool:
    """A hyper-parameter as the proto holds it."""
    return value if isinstance(value, bool) else float(np.float32(value))


def _case(algorithm: str, changes: str = "", /, variant: str = "", **hyperparameters: Any) -> Case:
    return Case(variant, algorithm, frozenset(changes.split()), hyperparameters)


ADAM: dict[str, Any] = {"beta1": 0.9, "beta2": 0.99, "epsilon": 1e-3}
MOMENTUM: dict[str, Any] = {"momentum": 0.9, "exponent": 2.0, "epsilon": 0.01}
F2A: dict[str, Any] = {
    "max_lr_multiplier": 50.0,
    "probability_exponent": 0.5,
    "accumulator_decay": 0.9,
    "initial_accumulator_value": 0.01,
}
MDL: dict[str, Any] = {
    "lr_power": -0.5,
    "mdl_benefit_rampup_coeff": 2.0,
    "min_servable_mdl_benefit": 0.1,
    "mdl_min_weight": 0.2,
    "max_event_benefit": 0.5,
    "max_total_benefit": 1.0,
}
YOGI: dict[str, Any] = {"beta1": 0.9, "beta2": 0.99, "epsilon": 1e-3}

PROGRAM = parse(
    """
    HloModule momentum
    ENTRY momentum {
      gradient = f32[1,1] parameter(0)
      weights = f32[1,1] parameter(1)
      momenta = f32[1,1] parameter(2)
      rate = f32[] parameter(3)
      decay = f32[] constant(0.9)
      decays = f32[1,1] broadcast(decay)
      kept = f32[1,1] multiply(decays, momenta)
      new = f32[1,1] add(kept, gradient)
      rates = f32[1,1] broadcast(rate)
      step = f32[1,1] multiply(rates, new)
      moved = f32[1,1] subtract(weights, step)
      ROOT result = (f32[1,1], f32[1,1]) tuple(moved, new)
    }
    """
).SerializeToString()

CASES: Sequence[Case] = (
    _case("stochastic_gradient_descent"),
    _case("adagrad"),
    _case("adagrad_momentum", "w momenta", variant="beta2_1", beta2=1.0, **MOMENTUM),
    _case("adagrad_momentum", "w momenta accumulators", variant="beta2", beta2=0.9, **MOMENTUM),
    _case("adagrad_momentum", "w momenta", variant="nesterov", beta2=1.0, use_nesterov=True, **MOMENTUM),
    _case("adagrad_momentum", "w momenta", variant="exponent_3", beta2=1.0, **(MOMENTUM | {"exponent": 3.0})),
    _case("bounded_adagrad"),
    _case("bounded_adagrad", variant="first", update_accumulator_first=True),
    _case("bounded_adagrad", variant="bounds", max_var_update=0.05, max_accumulator=4.0),
    _case("bounded_adagrad", variant="all", update_accumulator_first=True, max_var_update=0.05, max_accumulator=4.0),
    _case("frequency_aware_adagrad", "accumulators counters", **F2A),
    _case("frequency_aware_adagrad", "w accumulators counters", variant="l1", l1_regularization_strength=0.1, **F2A),
    _case("frequency_aware_adagrad", "w accumulators counters", variant="l2", l2_regularization_strength=0.1, **F2A),
    _case("frequency_aware_adagrad", "accumulators counters", variant="cap", **(F2A | {"max_lr_multiplier": 1.5})),
    _case("ftrl", "w", variant="plain", lr_power=-0.5),
    _case("ftrl", "w", variant="all", lr_power=-0.5, l1=0.05, l2=0.1, beta=0.7),
    _case("ftrl", "w", variant="power", lr_power=-0.7, l1=0.05, l2=0.1),
    _case("ftrl", "w", variant="power_0", lr_power=0.0, l1=0.05, l2=0.1),
    _case("ftrl", "w", variant="multiply", lr_power=-0.5, l1=0.05, l2=0.1, beta=0.7, multiply_linear_by_lr=True),
    _case("adam", "w momenta velocities", variant="outside", **ADAM),
    _case("adam", "w momenta velocities", variant="inside", use_sum_inside_sqrt=True, **ADAM),
    _case("adam", "w momenta velocities", variant="no_epsilon", beta1=0.9, beta2=0.99),
    _case("adam", "w momenta velocities", variant="sweep", use_non_lazy_adam=True, **ADAM),
    _case("momentum", "w momenta", momentum=0.9),
    _case("momentum", "w momenta", variant="nesterov", momentum=0.9, use_nesterov=True),
    _case("lion", "w momenta", beta1=0.9, beta2=0.99),
    _case("lion", "w momenta", variant="sweep", beta1=0.9, beta2=0.99, use_non_lazy_lion=True),
    _case("rms_prop", "w ms mom", rho=0.9, momentum=0.8, epsilon=1e-3),
    _case("rms_prop", "w ms mom", variant="no_epsilon", rho=0.9, momentum=0.8),
    _case("centered_rms_prop", "w ms mom mg", rho=0.9, momentum=0.8, epsilon=1e-3),
    _case("adadelta", "accumulators updates", rho=0.9, epsilon=1e-3),
    _case("adadelta", "accumulators updates", variant="no_epsilon", rho=0.9),
    _case("proximal_adagrad", variant="plain"),
    _case("proximal_adagrad", "w", variant="l1", l1=0.05),
    _case("proximal_adagrad", "w", variant="l1_l2", l1=0.05, l2=0.2),
    _case("online_yogi", "w", variant="plain", beta2=0.99),
    _case("online_yogi", "w", variant="l1_l2", beta2=0.99, l1=0.05, l2=0.2),
    _case("proximal_yogi", "w m", variant="plain", **YOGI),
    _case("proximal_yogi", "w m", variant="l1", l1=0.05, **YOGI),
    _case("proximal_yogi", "w m", variant="l2", l2=0.2, **YOGI),
    _case("proximal_yogi", "w m", variant="l1_l2", l1=0.05, l2=0.2, **YOGI),
    _case("frequency_estimator", "w last_hit_step", tau=0.1, max_delta=15.0, outlier_threshold=2.0),
    _case("assign", "w"),
    _case("mdl_adagrad_light", "w", **MDL),
    _case("mdl_adagrad_light", "w weights", variant="l2", l2=0.1, **MDL),
    _case("mdl_adagrad_light", "w", variant="no_power", **(MDL | {"lr_power": 0.0})),
    Case("momentum", "user_defined_program", frozenset({"w", "Slot_0"}), program=PROGRAM),
)

#: Slots that may be negative; the others are sums or means of squares, or counts.
SIGNED = frozenset({"linears", "momenta", "mom", "mg", "m", "weights", "benefits", "Slot_0"})


def state(case: Case, rng: np.random.Generator, shape: tuple[int, ...] = (16, 8)) -> tuple[Array, Array, list[Array]]:
    """Returns weights, gradients and slots (float32) that no rule leaves alone by accident: nothing is 0."""

    def signed(low: float, high: float) -> Array:
        return array(rng.uniform(low, high, shape) * rng.choice([-1.0, 1.0], shape))

    w, g = signed(0.1, 1.0), signed(0.1, 2.0)
    slots = {name: signed(0.1, 1.0) for name in case.slot_names}
    for name in slots.keys() - SIGNED:
        slots[name] = np.abs(slots[name])
    if "counters" in slots:
        slots["counters"] = rng.integers(1, 10, shape).astype(np.float32)
    if "mg" in slots:  # a variance is positive
        slots["ms"] += slots["mg"] ** 2
    if "last_hit_step" in slots:
        w, slots["last_hit_step"] = np.abs(w) * 10, rng.integers(0, 15, shape).astype(np.float32)
    return w, g, list(slots.values())


STEP = 30.0  # the step counter that frequency_aware_adagrad sees


def run(
    case: Case, w: Array, g: Array, slots: Sequence[Array], lr: float | Array | None = None, step: float | Array = STEP
) -> list[Array]:
    """One step of the tensor formula: weights and slots after it."""
    rate = case.learning_rate if lr is None else lr
    numbers = StepNumbers(lr=tensor(rate), step=tensor(step))
    return [out.numpy() for out in apply_step(case.rule, numbers, tensor(w), tensor(g), *map(tensor, slots))]


def run_reference(
    case: Case, w: Array, g: Array, slots: Sequence[Array], lr: float | Array | None = None, step: float | Array = STEP
) -> list[Array]:
    """One step of the float64 oracle."""
    rate = np.asarray(case.learning_rate if lr is None else lr, dtype=np.float64)
    arrays = [np.asarray(x, dtype=np.float64) for x in (w, g, *slots)]
    rule = case.rule
    if "step" in rule.dynamic_inputs:
        return list(rule.reference(arrays[0], arrays[1], rate, *arrays[2:], step=np.float64(step)))  # type: ignore[call-arg]
    return list(rule.reference(arrays[0], arrays[1], rate, *arrays[2:]))


def numbers(optimizer: Optimizer, lr: float | Array, step: float | Array | None = None) -> StepNumbers:
    """The numbers of a step of one table, from its configuration."""

    def limits(x: Limits) -> tuple[Tensor | None, Tensor | None]:
        return (tensor(x.lower), tensor(x.upper)) if x.active else (None, None)

    rate = tensor(lr)
    decay = None
    if optimizer.weight_decay_factor != 0:
        decay = tensor(optimizer.weight_decay_factor)
        decay = decay * rate if optimizer.multiply_weight_decay_factor_by_learning_rate else decay
    gradient, weight = limits(optimizer.gradient_clipping_limits), limits(optimizer.clipping_limits)
    return StepNumbers(rate, decay, *gradient, *weight, step=None if step is None else tensor(step))


def array(x: ArrayLike) -> Array:
    return np.asarray(x, dtype=np.float32)


def tensor(x: ArrayLike) -> Tensor:
    return torch.as_tensor(array(x))
