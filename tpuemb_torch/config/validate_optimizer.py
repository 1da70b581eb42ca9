"""The rules that a table's `OptimizationParameters` must keep."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf, isfinite, isnan

from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

from tpuemb_torch.config import hlo, hlo_types
from tpuemb_torch.config.errors import ConfigError
from tpuemb_torch.config.parse import Proto
from tpuemb_torch.config.ranges import FINITE, NON_NEGATIVE, RANGES, Range, float32_text
from tpuemb_torch.protos import optimization_parameters_pb2 as parameters_pb2

#: Slots beside `parameters`, the hidden gradient accumulator included (kMaxAuxiliaryParameterCount).
MAX_SLOTS = 7

Table = Proto.TableDescriptor
Parameters = parameters_pb2.OptimizationParameters
_Accumulation = parameters_pb2.GradientAccumulationStatus


def algorithm(parameters: Parameters) -> str | None:
    """Returns the name of the chosen oneof case."""
    name: str | None = parameters.WhichOneof("parameters")
    return name


def scalar_fields(message: Message) -> dict[str, float | bool]:
    """Returns every float and bool field of an optimizer's message, unset ones with their proto3 default."""
    scalar = (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_BOOL)
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields if field.type in scalar}


def optimizer_tags(parameters: Parameters) -> Iterator[tuple[str, int]]:
    """Yields the dynamic inputs as (field, tag): the learning rate's, and a step counter's, which is 0 if not set."""
    if parameters.learning_rate.WhichOneof("learning_rate") == "dynamic":
        yield "learning_rate.dynamic.tag", parameters.learning_rate.dynamic.tag
    if algorithm(parameters) == "frequency_aware_adagrad":
        yield "frequency_aware_adagrad.step_counter.tag", parameters.frequency_aware_adagrad.step_counter.tag


def accumulates(parameters: Parameters) -> bool:
    """Whether gradients of one step are summed first; UNSPECIFIED means yes."""
    return parameters.gradient_accumulation_status != _Accumulation.DISABLED


def enum_problem(field: str, number: int, descriptor: EnumDescriptor) -> Iterator[ConfigError]:
    """Yields an error if a proto3 enum, which can hold any number, holds one without a name."""
    if number not in descriptor.values_by_number:
        known = ", ".join(f"{value.name} = {value.number}" for value in descriptor.values)
        yield ConfigError(field, f"{number} is no {descriptor.full_name.partition('.tpu.')[2]}; use one of {known}")


def optimizer_problems(table: Table, table_path: str) -> Iterator[ConfigError]:
    """Yields every rule that the optimizer of a table breaks."""
    parameters = table.optimization_parameters
    path = f"{table_path}.optimization_parameters"
    label = f"(table {table.name!r})"
    name = algorithm(parameters)
    if name is None:
        known = ", ".join(sorted(f.name for f in Parameters.DESCRIPTOR.oneofs_by_name["parameters"].fields))
        yield ConfigError(f"{path}.parameters", f"no optimizer is chosen {label}; set one of {known}")
    yield from _learning_rate(parameters, path, label)
    for limits in ("clipping_limits", "gradient_clipping_limits"):
        yield from _limits(getattr(parameters, limits), f"{path}.{limits}", label)
    yield from _number(
        parameters.weight_decay_factor,
        NON_NEGATIVE,
        f"{path}.weight_decay_factor",
        label,
        "0 switches weight decay off",
    )
    if parameters.simulated_quantization.enabled:
        yield from _quantization(parameters.simulated_quantization, f"{path}.simulated_quantization", label)
    yield from _statuses(parameters, path)
    if name is None:
        return
    message = getattr(parameters, name)
    for field, value in scalar_fields(message).items():
        if not isinstance(value, bool):
            allowed = RANGES.get(name, {}).get(field, FINITE)
            hint = "" if allowed.default is None else f"TensorFlow's default is {allowed.default:g}"
            yield from _number(value, allowed, f"{path}.{name}.{field}", label, hint)
    yield from _combination(table, name, path, label)
    if name == "user_defined_program":
        yield from _program(parameters, f"{path}.{name}.program", label)


def _number(value: float, allowed: Range, path: str, label: str, hint: str) -> Iterator[ConfigError]:
    if value not in allowed:
        unset = "unset, which means 0" if value == 0 else float32_text(value)
        what = f"; {hint}" if hint else "; set a number in this range"
        yield ConfigError(path, f"{unset} {label} is outside {allowed}{what}")


def _learning_rate(parameters: Parameters, path: str, label: str) -> Iterator[ConfigError]:
    if not parameters.HasField("learning_rate"):
        return  # a constant 0, with a warning
    kind = parameters.learning_rate.WhichOneof("learning_rate")
    if kind is None:
        yield ConfigError(f"{path}.learning_rate", f"is empty {label}; set `constant` or `dynamic {{ tag }}`")
    elif kind == "constant":
        constant = parameters.learning_rate.constant
        yield from _number(
            constant, NON_NEGATIVE, f"{path}.learning_rate.constant", label, "set a finite rate that is not negative"
        )
    elif parameters.learning_rate.dynamic.tag < 0:
        tag = parameters.learning_rate.dynamic.tag
        yield ConfigError(f"{path}.learning_rate.dynamic.tag", f"{tag} {label} is negative; tags count from 0")


def _limits(limits: parameters_pb2.ClippingLimits, path: str, label: str) -> Iterator[ConfigError]:
    lower = limits.lower.value if limits.HasField("lower") else -inf
    upper = limits.upper.value if limits.HasField("upper") else inf
    for name, value, impossible in (("lower", lower, inf), ("upper", upper, -inf)):
        if isnan(value) or value == impossible:
            yield ConfigError(
                f"{path}.{name}", f"{float32_text(value)} {label} is no limit; remove it to leave that side open"
            )
            return
    if lower > upper:
        yield ConfigError(
            f"{path}.lower",
            f"{float32_text(lower)} {label} is above the upper limit {float32_text(upper)}; exchange them",
        )


def _quantization(quantization: parameters_pb2.SimulatedQuantization, path: str, label: str) -> Iterator[ConfigError]:
    if quantization.num_buckets < 2:
        yield ConfigError(
            f"{path}.num_buckets", f"{quantization.num_buckets} {label} must be at least 2; or set enabled: false"
        )
    limits = quantization.clipping_limits
    for name in ("lower", "upper"):
        value = getattr(limits, name).value if limits.HasField(name) else None
        if value is None or not isfinite(value):
            found = "is not set" if value is None else float32_text(value)
            yield ConfigError(
                f"{path}.clipping_limits.{name}", f"{found} {label}; quantization needs two finite limits"
            )
            return
    if not limits.lower.value < limits.upper.value:
        yield ConfigError(
            f"{path}.clipping_limits.lower",
            f"{float32_text(limits.lower.value)} {label} must be below the upper limit "
            f"{float32_text(limits.upper.value)}",
        )


def _statuses(parameters: Parameters, path: str) -> Iterator[ConfigError]:
    yield from enum_problem(
        f"{path}.gradient_accumulation_status", parameters.gradient_accumulation_status, _Accumulation.Status.DESCRIPTOR
    )
    yield from enum_problem(
        f"{path}.low_dimensional_packing_status",
        parameters.low_dimensional_packing_status,
        parameters_pb2.LowDimensionalPackingStatus.Status.DESCRIPTOR,
    )
    yield from enum_problem(
        f"{path}.hot_id_replication_configuration.status",
        parameters.hot_id_replication_configuration.status,
        parameters_pb2.HotIdReplicationConfiguration.Status.DESCRIPTOR,
    )


def _combination(table: Table, name: str, path: str, label: str) -> Iterator[ConfigError]:
    parameters = table.optimization_parameters
    lazy = {"adam": "use_non_lazy_adam", "lion": "use_non_lazy_lion"}.get(name)
    if lazy is not None and getattr(getattr(parameters, name), lazy) and not accumulates(parameters):
        yield ConfigError(
            f"{path}.{name}.{lazy}",
            f"true {label} needs gradient accumulation, or each contribution would step the whole table: set "
            "gradient_accumulation_status: ENABLED, or the lazy form",
        )
    if name == "mdl_adagrad_light" and parameters.weight_decay_factor != 0:
        yield ConfigError(
            f"{path}.weight_decay_factor",
            f"{float32_text(parameters.weight_decay_factor)} {label}: mdl_adagrad_light does not support "
            "weight decay; remove it",
        )


def _program(parameters: Parameters, path: str, label: str) -> Iterator[ConfigError]:
    broken = False
    for where, message in hlo.problems(parameters.user_defined_program.program):
        broken = True
        yield ConfigError(f"{path}.{where}", f"{message} {label}")
    if broken:
        return
    for where, message in hlo_types.problems(parameters.user_defined_program.program):
        yield ConfigError(f"{path}.{where}", f"{message} {label}")
    slots, hidden = hlo.count_slots(parameters.user_defined_program.program), int(accumulates(parameters))
    if slots + hidden > MAX_SLOTS:
        accumulator = " and the gradient accumulator" if hidden else ""
        yield ConfigError(
            path,
            f"{slots} slots{accumulator} {label} are more than the limit of {MAX_SLOTS}: use fewer slots"
            + (", or set gradient_accumulation_status: DISABLED" if hidden and slots <= MAX_SLOTS else ""),
        )
