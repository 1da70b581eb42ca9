"""An optimizer whose fields are all unset: proto3 says 0 and false, and nothing else may creep in."""

from __future__ import annotations

import pytest

from tests.config import examples
from tpuemb_torch.config import ConfigError, LearningRate, Limits, load_config
from tpuemb_torch.protos import optimization_parameters_pb2 as parameters_pb2

#: Every scalar field of every oneof case.
UNSET: dict[str, dict[str, float | bool]] = {
    "adagrad": {},
    "adagrad_momentum": {"momentum": 0.0, "use_nesterov": False, "exponent": 0.0, "beta2": 0.0, "epsilon": 0.0},
    "bounded_adagrad": {"update_accumulator_first": False, "max_var_update": 0.0, "max_accumulator": 0.0},
    "frequency_aware_adagrad": {
        "l1_regularization_strength": 0.0,
        "l2_regularization_strength": 0.0,
        "probability_exponent": 0.0,
        "max_lr_multiplier": 0.0,
        "accumulator_decay": 0.0,
        "initial_accumulator_value": 0.0,
    },
    "stochastic_gradient_descent": {},
    "ftrl": {
        "l1": 0.0,
        "l2": 0.0,
        "lr_power": 0.0,
        "beta": 0.0,
        "multiply_linear_by_lr": False,
        "allow_zero_accumulator": False,
    },
    "adam": {"beta1": 0.0, "beta2": 0.0, "epsilon": 0.0, "use_non_lazy_adam": False, "use_sum_inside_sqrt": False},
    "momentum": {"momentum": 0.0, "use_nesterov": False},
    "lion": {"beta1": 0.0, "beta2": 0.0, "use_non_lazy_lion": False},
    "rms_prop": {"rho": 0.0, "momentum": 0.0, "epsilon": 0.0},
    "centered_rms_prop": {"rho": 0.0, "momentum": 0.0, "epsilon": 0.0},
    "mdl_adagrad_light": {
        "l2": 0.0,
        "lr_power": 0.0,
        "min_servable_mdl_benefit": 0.0,
        "mdl_mix_in_margin": 0.0,
        "mdl_benefit_rampup_coeff": 0.0,
        "mdl_min_weight": 0.0,
        "benefit_revisit_scale": 0.0,
        "max_event_benefit": 0.0,
        "max_total_benefit": 0.0,
        "mdl_hard_limit": 0.0,
        "hard_limit_min_benefit": False,
        "mdl_regularize": False,
    },
    "adadelta": {"rho": 0.0, "epsilon": 0.0},
    "proximal_adagrad": {"l1": 0.0, "l2": 0.0},
    "online_yogi": {"l1": 0.0, "l2": 0.0, "beta2": 0.0},
    "proximal_yogi": {"l1": 0.0, "l2": 0.0, "beta1": 0.0, "beta2": 0.0, "epsilon": 0.0},
    "frequency_estimator": {"tau": 0.0, "max_delta": 0.0, "outlier_threshold": 0.0, "weight_exponent": 0.0},
    "user_defined_program": {},
    "assign": {},
}
#: What an unset number cannot mean.
REJECTED = {"adagrad_momentum": "exponent", "user_defined_program": "program.entry_computation_id"}


def test_the_table_has_every_optimizer() -> None:
    oneof = parameters_pb2.OptimizationParameters.DESCRIPTOR.oneofs_by_name["parameters"]
    assert set(UNSET) == {field.name for field in oneof.fields}


@pytest.mark.filterwarnings("ignore::tpuemb_torch.config.ConfigWarning")
@pytest.mark.parametrize("algorithm", sorted(set(UNSET) - set(REJECTED)))
def test_unset_fields_are_zero(algorithm: str) -> None:
    proto = examples.with_optimizer(f"{algorithm} {{}}", dimension=1)
    optimizer = load_config(proto).tables[0].optimizer
    assert optimizer.algorithm == algorithm
    resolved = {name: (type(value), value) for name, value in optimizer.hyperparameters.items()}
    assert resolved == {name: (type(value), value) for name, value in UNSET[algorithm].items()}
    assert optimizer.step_counter_tag == (0 if algorithm == "frequency_aware_adagrad" else None)
    assert optimizer.program is None


@pytest.mark.parametrize("algorithm", sorted(REJECTED))
def test_unset_fields_that_have_no_meaning(algorithm: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(examples.with_optimizer(f"{algorithm} {{}}"))
    path = f"table_descriptor[0].optimization_parameters.{algorithm}.{REJECTED[algorithm]}"
    assert caught.value.field == path
    if algorithm == "adagrad_momentum":
        assert "unset" in str(caught.value) and "default is 2" in str(caught.value)


def test_common_options_that_are_unset() -> None:
    optimizer = load_config(examples.with_optimizer("adagrad {}")).tables[0].optimizer
    assert optimizer.learning_rate == LearningRate(constant=pytest.approx(0.1))
    assert optimizer.clipping_limits == optimizer.gradient_clipping_limits == Limits()
    assert not optimizer.clipping_limits.active
    assert optimizer.weight_decay_factor == 0
    assert not optimizer.multiply_weight_decay_factor_by_learning_rate
    assert optimizer.quantization is None
    assert optimizer.accumulation == optimizer.low_dimensional_packing == optimizer.hot_id_replication == "unspecified"
    assert optimizer.tags == ()


def test_a_float_has_its_float32_value() -> None:
    optimizer = load_config(examples.with_optimizer("adadelta { rho: 0.95 }")).tables[0].optimizer
    assert optimizer.hyperparameters["rho"] == 0.949999988079071  # float32(0.95)
