"""Random valid configurations round-trip; random and damaged input gives ConfigError and nothing else."""

from __future__ import annotations

import struct
import warnings
from math import gcd, prod

import pytest
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.config import examples
from tpuemb_torch.config import Config, ConfigError, load_config
from tpuemb_torch.config.parse import Format
from tpuemb_torch.config.ranges import RANGES
from tpuemb_torch.config.write import to_json, to_text, to_yaml
from tpuemb_torch.protos import optimization_parameters_pb2 as parameters_pb2

Proto = examples.Proto
ONEOF = parameters_pb2.OptimizationParameters.DESCRIPTOR.oneofs_by_name["parameters"]
ALGORITHMS = sorted(field.name for field in ONEOF.fields if field.name != "user_defined_program")

names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
rates = st.floats(0, 2.0**100, width=32)


def load(source: object, format: Format | None = None) -> Config:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load_config(source, format=format)  # type: ignore[arg-type]


@st.composite
def optimizers(draw: st.DrawFn, tag: int | None) -> parameters_pb2.OptimizationParameters:
    parameters = parameters_pb2.OptimizationParameters()
    name = draw(st.sampled_from(ALGORITHMS))
    message = getattr(parameters, name)
    message.SetInParent()
    for field in message.DESCRIPTOR.fields:
        if field.type == FieldDescriptor.TYPE_BOOL:
            setattr(message, field.name, draw(st.booleans()))
        elif field.type == FieldDescriptor.TYPE_FLOAT:
            allowed = RANGES.get(name, {}).get(field.name)
            value = draw(st.floats(-1, 1, width=32) if allowed is not None else finite)
            if allowed is None or value in allowed:
                setattr(message, field.name, value)
    if name == "adagrad_momentum" and message.exponent == 0:
        message.exponent = 2
    if tag is not None:
        parameters.learning_rate.dynamic.tag = tag
    else:
        parameters.learning_rate.constant = draw(rates)
    for limits in (parameters.clipping_limits, parameters.gradient_clipping_limits):
        if draw(st.booleans()):
            lower, upper = sorted((draw(finite), draw(finite)))
            limits.lower.value = lower
            if draw(st.booleans()):
                limits.upper.value = upper
    if name != "mdl_adagrad_light":
        parameters.weight_decay_factor = draw(rates)
    parameters.multiply_weight_decay_factor_by_learning_rate = draw(st.booleans())
    lazy = not getattr(message, "use_non_lazy_adam", False) and not getattr(message, "use_non_lazy_lion", False)
    parameters.gradient_accumulation_status = draw(st.sampled_from([0, 1, 2] if lazy else [0, 1]))
    parameters.low_dimensional_packing_status = draw(st.sampled_from([0, 1, 2]))
    return parameters


@st.composite
def protos(draw: st.DrawFn) -> Proto:
    proto = Proto(
        mode=draw(st.sampled_from([1, 2, 3])),
        num_hosts=draw(st.integers(1, 2**31 - 1)),
        num_tensor_cores=draw(st.integers(1, 2**31 - 1)),
        sharding_strategy=draw(st.sampled_from([0, 1])),
        profile_data_directory=draw(st.text(st.characters(codec="utf-8"), max_size=5)),
    )
    table_names = draw(st.lists(names, min_size=1, max_size=4, unique=True))
    dynamic = draw(st.lists(st.booleans(), min_size=len(table_names), max_size=len(table_names)))
    # Tag 0 exists wherever there may be a step counter that is not set.
    for i, name in enumerate(table_names):
        tag = 0 if i == 0 else (sum(dynamic[1:i]) + 1 if dynamic[i] else None)
        proto.table_descriptor.add(
            name=name,
            vocabulary_size=draw(st.integers(1, 2**63 - 1)),
            dimension=draw(st.integers(1, 2**31 - 1)),
            optimization_parameters=draw(optimizers(tag)),
        )
    if draw(st.booleans()):
        proto.batch_size_per_tensor_core = draw(st.integers(1, 1000))
        for table in proto.table_descriptor:
            table.num_features = draw(st.integers(1, 1000))
    else:
        extra = draw(st.lists(st.integers(0, len(table_names) - 1), max_size=4))
        for table_id in draw(st.permutations([*range(len(table_names)), *extra])):
            shape = draw(st.lists(st.integers(1, 64), min_size=1, max_size=4))
            proto.feature_descriptor.add(table_id=table_id, input_shape=shape)
    return proto


relaxed = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@relaxed
@given(protos())
def test_valid_configurations(proto: Proto) -> None:
    config = load(proto)
    assert config.to_proto() == proto
    for write, format in ((to_text, "text"), (to_json, "json"), (to_yaml, "yaml")):
        assert load(write(proto), format) == config  # type: ignore[arg-type]
    assert len(config.output_shapes) == len(config.features)
    for table, described in zip(config.tables, proto.table_descriptor, strict=True):
        assert table.name == described.name
        message = getattr(described.optimization_parameters, table.optimizer.algorithm)
        for name, value in table.optimizer.hyperparameters.items():
            assert struct.pack("<d", value) == struct.pack("<d", getattr(message, name))
    if config.layout == "feature":
        sizes = [prod(feature.input_shape) for feature in config.features]
        assert config.batch_size_per_tensor_core == gcd(*sizes)
        assert sum(t.num_features for t in config.tables) * config.batch_size_per_tensor_core == sum(sizes)


@relaxed
@given(st.binary(max_size=200))
def test_random_bytes(data: bytes) -> None:
    with pytest.raises(ConfigError) as caught:
        load(data)
    assert caught.value.field


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_bytes(data: st.DataObject) -> None:
    original = examples.with_program(examples.program(1)).SerializeToString()
    original = data.draw(st.sampled_from([original, examples.by_feature().SerializeToString()]))
    damaged = bytearray(original)
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(damaged) - 1))
        match data.draw(st.sampled_from(["flip", "cut", "insert"])):
            case "flip":
                damaged[position] ^= 1 << data.draw(st.integers(0, 7))
            case "cut":
                del damaged[position : position + data.draw(st.integers(1, 9))]
            case "insert":
                damaged[position:position] = data.draw(st.binary(max_size=4))
        if not damaged:
            break
    check_loads_or_fails(bytes(damaged), "binary")


@settings(max_examples=200, deadline=None)
@given(st.data(), st.sampled_from(["text", "json", "yaml"]))
def test_damaged_text(data: st.DataObject, format: Format) -> None:
    write = {"text": to_text, "json": to_json, "yaml": to_yaml}[format]
    text = write(examples.by_feature())
    position = data.draw(st.integers(0, len(text)))
    length = data.draw(st.integers(0, 12))
    damaged = text[:position] + data.draw(st.text(max_size=5)) + text[position + length :]
    check_loads_or_fails(damaged + "\n", format)


@relaxed
@given(st.text(max_size=80), st.sampled_from([None, "text", "json", "yaml"]))
def test_random_text(text: str, format: Format | None) -> None:
    check_loads_or_fails(text, format)


def check_loads_or_fails(source: bytes | str, format: Format | None) -> None:
    """Whatever loads is consistent; whatever does not raises ConfigError."""
    try:
        config = load(source, format)
    except ConfigError as error:
        assert error.field
        assert str(error)
        return
    assert load(config.to_proto()).tables == config.tables
    assert all(size > 0 for shape in config.output_shapes for size in shape)
