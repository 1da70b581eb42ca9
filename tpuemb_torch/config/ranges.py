"""The range of every hyper-parameter, and TensorFlow's default where it has one.

Sources: the checks of TensorFlow's tensorflow/python/tpu/tpu_embedding_v2_utils.py and of its CPU kernels
(tensorflow/core/kernels/training_ops.cc), the mathematics where those are silent.  A bound that Python excludes only
because an unset number is 0 (epsilon > 0) is included here: in the proto 0 cannot be told from unset.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf


@dataclass(frozen=True)
class Range:
    """An interval of finite numbers."""

    lower: float = -inf
    upper: float = inf
    lower_open: bool = False
    upper_open: bool = False
    #: TensorFlow's default, to be suggested.
    default: float | None = None

    def __contains__(self, value: float) -> bool:
        above = value > self.lower if self.lower_open else value >= self.lower
        below = value < self.upper if self.upper_open else value <= self.upper
        return above and below and abs(value) != inf

    def __str__(self) -> str:
        left = "(" if self.lower_open or self.lower == -inf else "["
        right = ")" if self.upper_open or self.upper == inf else "]"
        return f"{left}{self.lower:g}, {self.upper:g}{right}"

    def usually(self, default: float) -> Range:
        """The same interval with a default."""
        return replace(self, default=default)


def float32_text(value: float) -> str:
    """The shortest decimal that is read back as the same float32: 0.1, not 0.10000000149011612."""
    try:
        stored = struct.pack("<f", value)
    except OverflowError:
        return repr(value)
    texts = (f"{value:.{digits}g}" for digits in range(6, 10))
    return next((text for text in texts if struct.pack("<f", float(text)) == stored), repr(value))


FINITE = Range()
NON_NEGATIVE = Range(lower=0)
POSITIVE = Range(lower=0, lower_open=True)
NON_POSITIVE = Range(upper=0)
UNIT = Range(0, 1)
DECAY = Range(0, 1, upper_open=True)

_REGULARIZED = {"l1": NON_NEGATIVE.usually(0), "l2": NON_NEGATIVE.usually(0)}
_RMS = {"rho": UNIT, "momentum": NON_NEGATIVE, "epsilon": NON_NEGATIVE}

#: By oneof case and field; a number that is not listed must only be finite.
RANGES: Mapping[str, Mapping[str, Range]] = {
    "adadelta": {"rho": UNIT, "epsilon": NON_NEGATIVE},
    "adagrad_momentum": {
        "momentum": NON_NEGATIVE.usually(0),
        "exponent": POSITIVE.usually(2),
        "beta2": UNIT.usually(1),
        "epsilon": NON_NEGATIVE.usually(1e-10),
    },
    "adam": {"beta1": DECAY.usually(0.9), "beta2": DECAY.usually(0.999), "epsilon": NON_NEGATIVE.usually(1e-7)},
    "bounded_adagrad": {"max_var_update": NON_NEGATIVE, "max_accumulator": NON_NEGATIVE},
    "centered_rms_prop": _RMS,
    "frequency_aware_adagrad": {
        "l1_regularization_strength": NON_NEGATIVE,
        "l2_regularization_strength": NON_NEGATIVE,
        "probability_exponent": NON_NEGATIVE,
        "max_lr_multiplier": NON_NEGATIVE,
        "accumulator_decay": UNIT,
        "initial_accumulator_value": NON_NEGATIVE,
    },
    "frequency_estimator": {"tau": UNIT, "max_delta": NON_NEGATIVE, "outlier_threshold": NON_NEGATIVE},
    "ftrl": {**_REGULARIZED, "lr_power": NON_POSITIVE.usually(-0.5), "beta": NON_NEGATIVE.usually(0)},
    "lion": {"beta1": UNIT.usually(0.9), "beta2": UNIT.usually(0.99)},
    "mdl_adagrad_light": {"l2": NON_NEGATIVE},
    "momentum": {"momentum": NON_NEGATIVE},
    "online_yogi": {**_REGULARIZED, "beta2": UNIT},
    "proximal_adagrad": _REGULARIZED,
    "proximal_yogi": {
        **_REGULARIZED,
        "beta1": DECAY.usually(0.9),
        "beta2": DECAY.usually(0.999),
        "epsilon": NON_NEGATIVE.usually(1e-3),
    },
    "rms_prop": _RMS,
}
