"""Translates a user-defined optimizer from HLO to a torch function.

What each operation does follows XLA (https://openxla.org/xla/operation_semantics, and for what that leaves open the
CPU compiler's xla/service/elemental_ir_emitter.cc): minimum, maximum and clamp propagate NaN, remainder has the sign of
the dividend, the sign of NaN is NaN, an integer divided by 0 is -1 with the dividend as remainder, integers wrap, a
number converted to an integer is cut towards 0, NaN to 0, and what is too large to the nearest integer there is.  Not
defined, as in XLA: which zero `maximum(0.0, -0.0)` is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx, nn

from tpuemb_torch.config import hlo, hlo_types
from tpuemb_torch.config.hlo_types import FORWARDING, LITERAL_FIELDS
from tpuemb_torch.protos import hlo_pb2, xla_data_pb2

#: A value while the graph is built.
Value = fx.Node | tuple["Value", ...]

_DTYPES: Mapping[int, torch.dtype] = {
    xla_data_pb2.F32: torch.float32,
    xla_data_pb2.PRED: torch.bool,
    xla_data_pb2.S32: torch.int32,
    xla_data_pb2.S64: torch.int64,
}


@lru_cache(maxsize=64)
def translate(program: bytes) -> Callable[..., tuple[Tensor, ...]]:
    """Returns a program as a straight-line function of tensors.

    Args:
        program: a serialized `xla.HloModuleProto`: `(gradient, weights, slots..., [scalar]) -> (weights, slots...)`.

    Returns:
        A function of as many tensors as the program has inputs: float32 `[rows, dim]`, the scalar 0-dim or `[rows, 1]`.
        It returns new float32 `[rows, dim]` tensors, and works under `torch.compile`.

    Raises:
        ValueError: for a program that cannot be run element by element; it names the instruction.
    """
    module = hlo_pb2.HloModuleProto.FromString(program)
    for check in (hlo.problems, hlo_types.problems):
        for path, message in check(module):
            raise ValueError(f"program.{path}: {message}")
    entry = hlo.entry_computation(module)
    assert entry is not None
    graph = fx.Graph()
    count = 2 + hlo.count_slots(module) + hlo.takes_dynamic_input(module)
    inputs = [graph.placeholder(f"input_{i}") for i in range(count)]
    outputs = _Translation(graph, module, weights=inputs[1]).inline(entry, inputs)
    graph.output(tuple(graph.call_function(_copied if o in inputs else _sized, (o, inputs[1])) for o in outputs))
    graph.eliminate_dead_code()
    return fx.GraphModule(nn.Module(), graph, class_name="UserDefinedProgram")


class _Translation:
    """Writes instructions into a graph; tuples, calls and what only changes shapes leave no trace there."""

    def __init__(self, graph: fx.Graph, module: hlo_pb2.HloModuleProto, weights: fx.Node) -> None:
        self.graph = graph
        self.weights = weights
        self.computations = {computation.id: computation for computation in module.computations}

    def inline(self, computation: hlo_pb2.HloComputationProto, arguments: Sequence[Value]) -> Any:
        """Writes the body of a computation and returns the value of its root."""
        values: dict[int, Any] = {}
        for instruction in computation.instructions:
            operands = [values[operand] for operand in instruction.operand_ids]
            if instruction.opcode == "parameter":
                values[instruction.id] = arguments[instruction.parameter_number]
            else:
                values[instruction.id] = self.value(instruction, operands)
        return values[computation.root_id]

    def value(self, instruction: hlo_pb2.HloInstructionProto, operands: list[Any]) -> Value:
        """Returns what an instruction makes of its operands."""
        opcode = instruction.opcode
        if opcode == "tuple":
            return tuple(operands)
        if opcode == "get-tuple-element":
            return operands[0][instruction.tuple_index]  # type: ignore[no-any-return]
        if opcode in FORWARDING:
            return operands[0]  # type: ignore[no-any-return]
        if instruction.called_computation_ids:
            return self.inline(self.computations[instruction.called_computation_ids[0]], operands)  # type: ignore[no-any-return]
        element = instruction.shape.element_type
        if opcode == "constant":
            (number,) = getattr(instruction.literal, LITERAL_FIELDS[element])
            return self.graph.call_function(_constant, (number, _DTYPES[element], self.weights))
        if opcode == "convert":
            return self.graph.call_function(_convert, (*operands, _DTYPES[element]))
        if opcode == "compare":
            return self.graph.call_function(COMPARISONS[instruction.comparison_direction], tuple(operands))
        return self.graph.call_function(OPERATIONS[opcode], tuple(operands))


def _sized(output: Tensor, weights: Tensor) -> Tensor:
    return output.expand_as(weights)


def _copied(output: Tensor, weights: Tensor) -> Tensor:
    return output.expand_as(weights).clone()


def _constant(number: float, dtype: torch.dtype, weights: Tensor) -> Tensor:
    return torch.full((), number, dtype=dtype, device=weights.device)


def _divide(a: Tensor, b: Tensor) -> Tensor:
    if a.is_floating_point():
        return a / b
    # The smallest integer divided by -1 is itself, as its negative is.
    quotient = torch.div(a, _safe_divisor(b), rounding_mode="trunc")
    return torch.where(b == 0, -1, torch.where(b == -1, -a, quotient))


def _remainder(a: Tensor, b: Tensor) -> Tensor:
    if a.is_floating_point():
        # In float64, where a remainder of float32 numbers is exact: torch's vectorized float32 fmod gives NaN where the
        # quotient overflows.
        return torch.fmod(a.double(), b.double()).to(a.dtype)
    remainder = torch.fmod(a, _safe_divisor(b))
    return torch.where(b == 0, a, torch.where(b == -1, 0, remainder))


def _safe_divisor(b: Tensor) -> Tensor:
    """1 in place of the divisors that stop a processor: 0 and -1."""
    return torch.where((b == 0) | (b == -1), 1, b)


def _cbrt(x: Tensor) -> Tensor:
    # In double precision: float32(1/3) as exponent would cost up to 8 ulps.
    return torch.copysign(x.double().abs().pow(1.0 / 3.0).float(), x)


def _round_half_away(x: Tensor) -> Tensor:
    whole = x.abs().trunc()
    return torch.copysign(torch.where(x.abs() - whole >= 0.5, whole + 1.0, whole), x)


def _sign(x: Tensor) -> Tensor:
    # torch's sign of NaN is 0, of -0.0 is 0.0.
    return torch.where(x.abs() > 0, x.sign(), x) if x.is_floating_point() else x.sign()


def _clamp(low: Tensor, x: Tensor, high: Tensor) -> Tensor:
    return torch.minimum(torch.maximum(low, x), high)


def _convert(x: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.bool:
        return x != 0
    if dtype.is_floating_point or not x.is_floating_point():
        return x.to(dtype)
    limits = torch.iinfo(dtype)
    bound = 2.0 ** (limits.bits - 1)
    inside = torch.where((x >= -bound) & (x < bound), x, 0.0).to(dtype)
    return torch.where(x >= bound, limits.max, torch.where(x < -bound, limits.min, inside))


#: What the opcodes do that make a number of numbers; the others are in `_Translation.value`.
OPERATIONS: Mapping[str, Callable[..., Tensor]] = {
    "abs": torch.abs,
    "add": torch.add,
    "and": torch.bitwise_and,
    "cbrt": _cbrt,
    "ceil": torch.ceil,
    "clamp": _clamp,
    "cosine": torch.cos,
    "divide": _divide,
    "exponential": torch.exp,
    "exponential-minus-one": torch.expm1,
    "floor": torch.floor,
    "is-finite": torch.isfinite,
    "log": torch.log,
    "log-plus-one": torch.log1p,
    "logistic": torch.sigmoid,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "multiply": torch.mul,
    "negate": torch.neg,
    "not": torch.bitwise_not,
    "or": torch.bitwise_or,
    "power": torch.pow,
    "remainder": _remainder,
    "round-nearest-afz": _round_half_away,
    "round-nearest-even": torch.round,
    "rsqrt": torch.rsqrt,
    "select": torch.where,
    "sign": _sign,
    "sine": torch.sin,
    "sqrt": torch.sqrt,
    "subtract": torch.sub,
    "tanh": torch.tanh,
    "xor": torch.bitwise_xor,
}

COMPARISONS: Mapping[str, Callable[..., Tensor]] = {
    "EQ": torch.eq,
    "NE": torch.ne,
    "GE": torch.ge,
    "GT": torch.gt,
    "LE": torch.le,
    "LT": torch.lt,
}
