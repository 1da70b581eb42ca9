"""Turns a valid proto into the frozen dataclasses, every number resolved."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from tpuemb_torch.config import hlo
from tpuemb_torch.config.parse import Proto
from tpuemb_torch.config.schema import Config, Feature, LearningRate, Limits, Optimizer, Quantization, Table
from tpuemb_torch.config.unknown import unknown_numbers
from tpuemb_torch.config.validate import batch_and_rows_per_sample, feature_names
from tpuemb_torch.config.validate_optimizer import algorithm, scalar_fields
from tpuemb_torch.protos import optimization_parameters_pb2 as parameters_pb2

Parameters = parameters_pb2.OptimizationParameters


def build(proto: Proto, data: bytes) -> Config:
    """Returns the configuration of a proto that has no problems.

    Args:
        proto: the message.
        data: the same, serialized: what `Config.serialize()` returns.
    """
    by_feature = len(proto.feature_descriptor) > 0
    batch, rows_per_sample = batch_and_rows_per_sample(proto)
    tables = [
        Table(
            name=table.name,
            vocabulary_size=table.vocabulary_size,
            dimension=table.dimension,
            num_features=rows,
            optimizer=_optimizer(table.optimization_parameters),
        )
        for table, rows in zip(proto.table_descriptor, rows_per_sample, strict=True)
    ]
    if by_feature:
        features = [
            Feature(name, feature.table_id, tables[feature.table_id], tuple(feature.input_shape))
            for name, feature in zip(feature_names(proto), proto.feature_descriptor, strict=True)
        ]
    else:
        features = [Feature(t.name, i, t, (batch * t.num_features,)) for i, t in enumerate(tables)]
    return Config(
        tables=tuple(tables),
        features=tuple(features),
        mode=Proto.Mode.Name(proto.mode).lower(),  # type: ignore[arg-type]
        num_hosts=proto.num_hosts,
        num_tensor_cores=proto.num_tensor_cores,
        batch_size_per_tensor_core=batch,
        sharding_strategy="mod" if proto.sharding_strategy == Proto.MOD else "div",
        pipeline_execution_with_tensor_core=proto.pipeline_execution_with_tensor_core,
        profile_data_directory=proto.profile_data_directory,
        layout="feature" if by_feature else "table",
        _proto=data,
    )


def doubts(proto: Proto) -> Iterator[str]:
    """Yields what is legal in a valid proto, but probably not meant."""
    for i, table in enumerate(proto.table_descriptor):
        parameters = table.optimization_parameters
        path = f"table_descriptor[{i}].optimization_parameters"
        label = f"(table {table.name!r})"
        name = algorithm(parameters)
        if not parameters.HasField("learning_rate") and _uses_learning_rate(parameters):
            yield f"{path}.learning_rate: not set {label}, so the rate is 0 and the weights are not trained; set one"
        elif name == "ftrl" and not parameters.ftrl.multiply_linear_by_lr and _is_zero(parameters.learning_rate):
            yield (
                f"{path}.learning_rate.constant: 0 {label} makes ftrl divide by zero in its first step; set "
                "multiply_linear_by_lr: true, or another rate"
            )
        if name == "frequency_aware_adagrad" and parameters.frequency_aware_adagrad.max_lr_multiplier == 0:
            yield f"{path}.{name}.max_lr_multiplier: 0 or not set {label}, so gradients have no effect; set a limit"
        if name == "frequency_estimator" and table.dimension != 1:
            yield (
                f"table_descriptor[{i}].dimension: {table.dimension} {label} keeps as many estimates per id with "
                "frequency_estimator; TensorFlow's Python API takes only 1"
            )
        old = {1: "the tag of the learning rate", 15: "use_gradient_accumulation"}
        for number in sorted(unknown_numbers(parameters) & old.keys()):
            yield (
                f"{path}: field {number} {label} is ignored: {old[number]} of an older proto; convert it to "
                f"{'learning_rate.dynamic.tag' if number == 1 else 'gradient_accumulation_status'}"
            )


def _optimizer(parameters: Parameters) -> Optimizer:
    name = algorithm(parameters)
    assert name is not None
    message = getattr(parameters, name)
    quantization = parameters.simulated_quantization
    accumulation = parameters_pb2.GradientAccumulationStatus.Status.Name(parameters.gradient_accumulation_status)
    packing = parameters_pb2.LowDimensionalPackingStatus.Status.Name(parameters.low_dimensional_packing_status)
    replication = parameters_pb2.HotIdReplicationConfiguration.Status.Name(
        parameters.hot_id_replication_configuration.status
    )
    return Optimizer(
        algorithm=name,
        hyperparameters=scalar_fields(message),
        learning_rate=_learning_rate(parameters.learning_rate),
        clipping_limits=_limits(parameters.clipping_limits),
        gradient_clipping_limits=_limits(parameters.gradient_clipping_limits),
        weight_decay_factor=parameters.weight_decay_factor,
        multiply_weight_decay_factor_by_learning_rate=parameters.multiply_weight_decay_factor_by_learning_rate,
        quantization=Quantization(
            quantization.clipping_limits.lower.value,
            quantization.clipping_limits.upper.value,
            quantization.num_buckets,
        )
        if quantization.enabled
        else None,
        accumulation=accumulation.lower(),  # type: ignore[arg-type]
        low_dimensional_packing=packing.lower(),
        hot_id_replication=replication.lower(),
        step_counter_tag=message.step_counter.tag if name == "frequency_aware_adagrad" else None,
        program=message.program.SerializeToString(deterministic=True) if name == "user_defined_program" else None,
    )


def _learning_rate(rate: parameters_pb2.LearningRate) -> LearningRate:
    if rate.WhichOneof("learning_rate") == "dynamic":
        return LearningRate(tag=rate.dynamic.tag)
    return LearningRate(constant=rate.constant)


def _limits(limits: parameters_pb2.ClippingLimits) -> Limits:
    return Limits(
        limits.lower.value if limits.HasField("lower") else -inf,
        limits.upper.value if limits.HasField("upper") else inf,
    )


def _is_zero(rate: parameters_pb2.LearningRate) -> bool:
    return rate.WhichOneof("learning_rate") == "constant" and rate.constant == 0


def _uses_learning_rate(parameters: Parameters) -> bool:
    name = algorithm(parameters)
    if name == "user_defined_program":
        return hlo.takes_dynamic_input(parameters.user_defined_program.program)
    return name != "assign"
