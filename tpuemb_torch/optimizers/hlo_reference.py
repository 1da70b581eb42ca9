"""Runs a user-defined optimizer in NumPy, instruction by instruction: the oracle of `hlo_translation.py`.

float32 values are float64 here (or rounded to float32 after every instruction), integers are exact Python integers
that wrap at their width, predicates are bools.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from tpuemb_torch.protos import hlo_pb2
from tpuemb_torch.protos.xla_data_pb2 import F32, PRED, S32, S64

Array = np.ndarray[Any, np.dtype[Any]]

_BITS: Mapping[int, int] = {S32: 32, S64: 64}


def interpret(module: hlo_pb2.HloModuleProto, inputs: Sequence[Array], precision: DTypeLike = np.float64) -> Any:
    """Returns the value of the entry computation's root.

    Args:
        module: a program that `hlo_translation.translate` takes.
        inputs: `(gradient, weights, slots..., [scalar])`, arrays that broadcast.
        precision: what each floating-point value is rounded to; numpy.float32 gives what exactly rounded float32
            arithmetic would.

    Returns:
        A tuple of arrays, as nested as the root.
    """
    computations = {computation.id: computation for computation in module.computations}

    def run(computation: hlo_pb2.HloComputationProto, arguments: Sequence[Any]) -> Any:
        results: dict[int, Any] = {}
        for step in computation.instructions:
            given = [results[number] for number in step.operand_ids]
            if step.opcode == "parameter":
                outcome = arguments[step.parameter_number]
            elif step.opcode in ("call", "fusion", "map"):
                outcome = run(computations[step.called_computation_ids[0]], given)
            elif step.opcode == "tuple":
                outcome = tuple(given)
            elif step.opcode == "get-tuple-element":
                outcome = given[0][step.tuple_index]
            elif step.opcode in ("reshape", "broadcast", "copy", "bitcast"):
                outcome = given[0]
            else:
                outcome = compute(step, given, precision)
            results[step.id] = outcome
        return results[computation.root_id]

    main = computations[module.entry_computation_id]
    with np.errstate(all="ignore"):
        return run(main, [np.asarray(x, dtype=precision).astype(np.float64) for x in inputs])


def compute(step: hlo_pb2.HloInstructionProto, given: Sequence[Array], precision: DTypeLike = np.float64) -> Array:
    """Returns the value of one instruction that makes a number of numbers."""
    kind = step.shape.element_type
    if step.opcode == "constant":
        literal = step.literal
        number = {F32: literal.f32s, PRED: literal.preds, S32: literal.s32s, S64: literal.s64s}[kind][0]  # type: ignore[index]
        return np.asarray(number, dtype=object if kind in _BITS else None)
    if step.opcode == "convert":
        return _rounded(_converted(given[0], kind), kind, precision)
    if step.opcode == "compare":
        return np.asarray(_COMPARED[step.comparison_direction](*given), dtype=bool)
    if step.opcode == "select":
        return np.where(*given)
    if kind in _BITS:
        return _each(lambda *numbers: _wrap(_INTEGER[step.opcode](*numbers), _BITS[kind]), *given)
    if kind == PRED and step.opcode in _LOGICAL:
        return _LOGICAL[step.opcode](*given)
    return _rounded(_REAL[step.opcode](*given), kind, precision)


def _rounded(values: Array, kind: int, precision: DTypeLike) -> Array:
    return np.asarray(values, dtype=precision).astype(np.float64) if kind == F32 else values


def _wrap(number: int, bits: int) -> int:
    """Two's complement."""
    half = 1 << (bits - 1)
    return (number + half) % (2 * half) - half


def _converted(values: Array, kind: int) -> Array:
    if kind == F32:
        return values.astype(np.float64)
    if kind == PRED:
        return np.asarray(values != 0, dtype=bool)
    return _each(lambda number: _whole(number, _BITS[kind]), values)


def _each(function: Any, *arrays: Array) -> Array:
    """A function of Python numbers, element by element."""
    return np.asarray(np.frompyfunc(function, len(arrays), 1)(*arrays), dtype=object)


def _whole(number: float | int, bits: int) -> int:
    """The integer an integer or a predicate wraps to, or that a real number is cut to, within the type's limits."""
    if not isinstance(number, float):
        return _wrap(int(number), bits)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    if np.isnan(number):
        return 0
    if number <= low or number >= high:
        return low if number < 0 else high
    return int(number)


def _divided(a: int, b: int) -> tuple[int, int]:
    """Quotient towards 0 and remainder with the sign of a."""
    if b == 0:
        return -1, a
    quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
    return quotient, a - quotient * b


def _powered(base: int, exponent: int) -> int:
    if exponent >= 0:
        return pow(base, exponent, 1 << 64)
    return {1: 1, -1: 1 if exponent % 2 == 0 else -1}.get(base, 0)


def _larger(a: Array, b: Array) -> Array:
    return np.where(np.isnan(a) | np.isnan(b), np.nan, np.where(a > b, a, b))


def _smaller(a: Array, b: Array) -> Array:
    return np.where(np.isnan(a) | np.isnan(b), np.nan, np.where(a < b, a, b))


def _half_away(x: Array) -> Array:
    tie = np.abs(x - np.trunc(x)) == 0.5
    return np.where(tie, np.trunc(x) + np.sign(x), np.rint(x))


_COMPARED: Mapping[str, Callable[[Any, Any], Any]] = {
    "EQ": lambda a, b: a == b,
    "NE": lambda a, b: a != b,
    "GE": lambda a, b: a >= b,
    "GT": lambda a, b: a > b,
    "LE": lambda a, b: a <= b,
    "LT": lambda a, b: a < b,
}

_LOGICAL: Mapping[str, Callable[..., Array]] = {
    "and": np.logical_and,
    "or": np.logical_or,
    "xor": np.logical_xor,
    "not": np.logical_not,
}

_INTEGER: Mapping[str, Callable[..., int]] = {
    "abs": abs,
    "add": lambda a, b: a + b,
    "and": lambda a, b: a & b,
    "clamp": lambda low, x, high: min(max(low, x), high),
    "divide": lambda a, b: _divided(a, b)[0],
    "maximum": max,
    "minimum": min,
    "multiply": lambda a, b: a * b,
    "negate": lambda a: -a,
    "not": lambda a: ~a,
    "or": lambda a, b: a | b,
    "power": _powered,
    "remainder": lambda a, b: _divided(a, b)[1],
    "sign": lambda a: (a > 0) - (a < 0),
    "subtract": lambda a, b: a - b,
    "xor": lambda a, b: a ^ b,
}

_REAL: Mapping[str, Callable[..., Array]] = {
    "abs": np.abs,
    "add": np.add,
    "cbrt": np.cbrt,
    "ceil": np.ceil,
    "clamp": lambda low, x, high: _smaller(_larger(low, x), high),
    "cosine": np.cos,
    "divide": np.divide,
    "exponential": np.exp,
    "exponential-minus-one": np.expm1,
    "floor": np.floor,
    "is-finite": np.isfinite,
    "log": np.log,
    "log-plus-one": np.log1p,
    "logistic": lambda x: np.where(x < 0, np.exp(x) / (1.0 + np.exp(x)), 1.0 / (1.0 + np.exp(-x))),
    "maximum": lambda a, b: _larger(a, b),
    "minimum": lambda a, b: _smaller(a, b),
    "multiply": np.multiply,
    "negate": np.negative,
    "power": np.power,
    "remainder": np.fmod,
    "round-nearest-afz": _half_away,
    "round-nearest-even": np.rint,
    "rsqrt": lambda x: 1.0 / np.sqrt(x),
    "sign": lambda x: np.where(x > 0, 1.0, np.where(x < 0, -1.0, x)),
    "sine": np.sin,
    "sqrt": np.sqrt,
    "subtract": np.subtract,
    "tanh": np.tanh,
}
