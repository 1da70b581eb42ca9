"""The range of each hyper-parameter: its edges, and just outside."""

from __future__ import annotations

import warnings
from math import inf, nan

import numpy as np
import pytest

from tests.config import examples
from tpuemb_torch.config import ConfigError, load_config
from tpuemb_torch.config.ranges import RANGES, float32_text
from tpuemb_torch.protos import optimization_parameters_pb2 as parameters_pb2

ONEOF = parameters_pb2.OptimizationParameters.DESCRIPTOR.oneofs_by_name["parameters"]
FLOATS = [
    (case.name, field.name)
    for case in ONEOF.fields
    for field in case.message_type.fields
    if field.type == field.TYPE_FLOAT
]
HALF_OPEN = {("adam", "beta1"), ("adam", "beta2"), ("proximal_yogi", "beta1"), ("proximal_yogi", "beta2")}


def load(algorithm: str, field: str, value: float) -> None:
    proto = examples.with_optimizer(f"{algorithm} {{}}", dimension=1)
    message = getattr(proto.table_descriptor[0].optimization_parameters, algorithm)
    if algorithm == "adagrad_momentum":
        message.exponent = 2
    setattr(message, field, value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load_config(proto)


def check_rejected(algorithm: str, field: str, value: float) -> None:
    with pytest.raises(ConfigError) as caught:
        load(algorithm, field, value)
    assert caught.value.field == f"table_descriptor[0].optimization_parameters.{algorithm}.{field}"
    assert "table 't'" in caught.value.problem


def above(value: float) -> float:
    return float(np.nextafter(np.float32(value), np.float32(inf)))


def below(value: float) -> float:
    return float(np.nextafter(np.float32(value), np.float32(-inf)))


def test_the_table_names_real_fields() -> None:
    assert {(case, field) for case, fields in RANGES.items() for field in fields} <= set(FLOATS)


@pytest.mark.parametrize(("algorithm", "field"), FLOATS)
def test_numbers_are_finite(algorithm: str, field: str) -> None:
    for value in (nan, inf, -inf):
        check_rejected(algorithm, field, value)


@pytest.mark.parametrize(
    ("algorithm", "field"),
    [
        *((a, f) for a in ("ftrl", "proximal_adagrad", "proximal_yogi", "online_yogi") for f in ("l1", "l2")),
        *(
            (a, "epsilon")
            for a in ("adadelta", "adagrad_momentum", "adam", "rms_prop", "centered_rms_prop", "proximal_yogi")
        ),
        *((a, "momentum") for a in ("momentum", "adagrad_momentum", "rms_prop", "centered_rms_prop")),
        ("ftrl", "beta"),
        ("bounded_adagrad", "max_var_update"),
        ("bounded_adagrad", "max_accumulator"),
        ("frequency_aware_adagrad", "max_lr_multiplier"),
        ("frequency_aware_adagrad", "initial_accumulator_value"),
        ("frequency_estimator", "max_delta"),
        ("mdl_adagrad_light", "l2"),
    ],
)
def test_not_negative(algorithm: str, field: str) -> None:
    load(algorithm, field, 0)
    load(algorithm, field, 1e30)
    check_rejected(algorithm, field, below(0))


@pytest.mark.parametrize(
    ("algorithm", "field"),
    [
        *HALF_OPEN,
        ("lion", "beta1"),
        ("lion", "beta2"),
        ("online_yogi", "beta2"),
        ("adagrad_momentum", "beta2"),
        ("adadelta", "rho"),
        ("rms_prop", "rho"),
        ("centered_rms_prop", "rho"),
        ("frequency_aware_adagrad", "accumulator_decay"),
        ("frequency_estimator", "tau"),
    ],
)
def test_decays_are_in_the_unit_interval(algorithm: str, field: str) -> None:
    load(algorithm, field, 0)
    load(algorithm, field, below(1))
    check_rejected(algorithm, field, below(0))
    check_rejected(algorithm, field, above(1))
    if (algorithm, field) in HALF_OPEN:
        check_rejected(algorithm, field, 1)
    else:
        load(algorithm, field, 1)


def test_ftrl_lr_power() -> None:
    load("ftrl", "lr_power", 0)
    load("ftrl", "lr_power", -3)
    check_rejected("ftrl", "lr_power", above(0))


def test_adagrad_momentum_exponent() -> None:
    load("adagrad_momentum", "exponent", above(0))
    check_rejected("adagrad_momentum", "exponent", 0)
    check_rejected("adagrad_momentum", "exponent", -1)


def test_the_error_says_value_limit_and_what_to_do() -> None:
    with pytest.raises(ConfigError) as caught:
        load("adam", "beta2", -0.1)
    assert caught.value.problem == "-0.1 (table 't') is outside [0, 1); TensorFlow's default is 0.999"


@pytest.mark.parametrize("value", [0.1, -0.1, 1e-7, 3.0, 0.0, 16777217.0, 3.4028234663852886e38, 1e-45, inf, nan])
def test_float32_text_is_exact(value: float) -> None:
    text = float32_text(float(np.float32(value)))
    np.testing.assert_array_equal(np.float32(text), np.float32(value))
    assert len(text) <= 15
