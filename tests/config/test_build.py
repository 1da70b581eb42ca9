"""The dataclasses: normalised numbers, names, shapes."""

from __future__ import annotations

import dataclasses
import pickle
import time

import pytest

from tests.config import examples
from tpuemb_torch.config import Limits, Quantization, load_config

Proto = examples.Proto


def test_feature_layout() -> None:
    config = load_config(examples.BY_FEATURE)
    assert config.layout == "feature"
    assert (config.mode, config.sharding_strategy) == ("training", "div")
    assert (config.num_hosts, config.num_tensor_cores) == (1, 2)
    assert not config.pipeline_execution_with_tensor_core
    assert [(t.name, t.vocabulary_size, t.dimension) for t in config.tables] == [("users", 100, 8), ("items", 50, 4)]
    assert [(f.name, f.table_id, f.input_shape) for f in config.features] == [
        ("user", 0, (16,)),
        ("clicked", 1, (16, 5)),
    ]
    assert [f.table for f in config.features] == list(config.tables)
    assert config.output_shapes == ((16, 8), (16, 5, 4))
    assert config.num_learning_rates == 1


def test_table_layout() -> None:
    config = load_config(examples.BY_TABLE)
    assert config.layout == "table"
    assert (config.mode, config.sharding_strategy) == ("inference", "mod")
    assert config.batch_size_per_tensor_core == 16
    assert [t.num_features for t in config.tables] == [1, 3]
    assert [(f.name, f.table_id, f.input_shape) for f in config.features] == [("users", 0, (16,)), ("items", 1, (48,))]
    assert config.output_shapes == ((16, 8), (48, 4))
    assert config.num_learning_rates == 0


def test_batch_is_the_greatest_common_divisor_of_the_features() -> None:
    proto = Proto(mode=Proto.TRAINING, num_hosts=1, num_tensor_cores=1)
    for i in range(2):
        table = proto.table_descriptor.add(name=f"t{i}", vocabulary_size=10, dimension=8)
        table.optimization_parameters.adagrad.SetInParent()
        table.optimization_parameters.learning_rate.constant = 1
    for table_id, shape in ((0, [4]), (1, [4, 3]), (0, [2, 2, 2])):
        proto.feature_descriptor.add(table_id=table_id, input_shape=shape)
    config = load_config(proto)
    assert config.batch_size_per_tensor_core == 4
    assert [t.num_features for t in config.tables] == [3, 3]
    assert config.output_shapes == ((4, 8), (4, 3, 8), (2, 2, 2, 8))
    assert [f.name for f in config.features] == ["feature_0", "feature_1", "feature_2"]


def test_thousands_of_tables() -> None:
    proto = Proto(mode=Proto.TRAINING, num_hosts=1, num_tensor_cores=1)
    for i in range(3000):
        table = proto.table_descriptor.add(name=f"t{i}", vocabulary_size=10, dimension=4)
        table.optimization_parameters.adagrad.SetInParent()
        table.optimization_parameters.learning_rate.constant = 1
        for _ in range(2):
            proto.feature_descriptor.add(table_id=i, input_shape=[4])
    start = time.perf_counter()
    config = load_config(proto)
    assert time.perf_counter() - start < 5  # 0.4 s; 20 s if every table looks at every feature
    assert {t.num_features for t in config.tables} == {2}


@pytest.mark.parametrize(
    ("mode", "name"),
    [(Proto.INFERENCE, "inference"), (Proto.TRAINING, "training"), (Proto.BACKWARD_PASS_ONLY, "backward_pass_only")],
)
def test_modes(mode: int, name: str) -> None:
    proto = examples.by_feature()
    proto.mode = mode  # type: ignore[assignment]
    assert load_config(proto).mode == name


def test_options_of_the_job() -> None:
    proto = examples.by_feature()
    proto.pipeline_execution_with_tensor_core = True
    proto.profile_data_directory = "/profiles"
    config = load_config(proto)
    assert config.pipeline_execution_with_tensor_core
    assert config.profile_data_directory == "/profiles"


def test_options_of_a_table() -> None:
    optimizer = (
        load_config(
            examples.with_optimizer(
                """
                learning_rate { constant: 0.5 }
                adam { beta1: 0.5 use_non_lazy_adam: true }
                clipping_limits { lower { value: 0 } }
                gradient_clipping_limits { lower { value: -2 } upper { value: 3 } }
                weight_decay_factor: 0.25
                multiply_weight_decay_factor_by_learning_rate: true
                simulated_quantization {
                  enabled: true num_buckets: 16 clipping_limits { lower { value: -1 } upper { value: 1 } }
                }
                gradient_accumulation_status: ENABLED
                low_dimensional_packing_status: DISABLED
                hot_id_replication_configuration { status: MIGRATION_ONLY }
                """
            )
        )
        .tables[0]
        .optimizer
    )
    assert optimizer.algorithm == "adam"
    assert dict(optimizer.hyperparameters) == {
        "beta1": 0.5,
        "beta2": 0.0,
        "epsilon": 0.0,
        "use_non_lazy_adam": True,
        "use_sum_inside_sqrt": False,
    }
    assert optimizer.clipping_limits == Limits(0.0, float("inf"))
    assert optimizer.clipping_limits.active
    assert optimizer.gradient_clipping_limits == Limits(-2.0, 3.0)
    assert optimizer.weight_decay_factor == 0.25
    assert optimizer.multiply_weight_decay_factor_by_learning_rate
    assert optimizer.quantization == Quantization(-1.0, 1.0, 16)
    assert optimizer.accumulation == "enabled"
    assert optimizer.low_dimensional_packing == "disabled"
    assert optimizer.hot_id_replication == "migration_only"


def test_user_defined_program() -> None:
    module = examples.program(num_slots=2)
    optimizer = load_config(examples.with_program(module)).tables[0].optimizer
    assert optimizer.algorithm == "user_defined_program"
    assert optimizer.program is not None
    assert type(module).FromString(optimizer.program) == module
    assert dict(optimizer.hyperparameters) == {}


def test_frozen_equal_hashable_and_picklable() -> None:
    config = load_config(examples.BY_FEATURE)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.mode = "inference"  # type: ignore[misc]
    with pytest.raises(TypeError):
        config.tables[1].optimizer.hyperparameters["beta1"] = 0.5  # type: ignore[index]
    again = load_config(examples.by_feature())
    assert again == config
    assert hash(again.tables) == hash(config.tables)
    assert pickle.loads(pickle.dumps(config)) == config


def test_to_proto_gives_a_copy() -> None:
    config = load_config(examples.BY_FEATURE)
    assert config.to_proto() == examples.by_feature()
    config.to_proto().mode = Proto.INFERENCE
    assert config.to_proto().mode == Proto.TRAINING
    assert load_config(config.serialize()) == config
    assert load_config(config.to_text()) == config
