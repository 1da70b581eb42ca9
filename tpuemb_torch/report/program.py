"""A user-defined optimizer as a formula: `Slot_0' = Slot_0 + g*g`, `w' = w - lr*g/sqrt(Slot_0')`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpuemb_torch.config import hlo_types
from tpuemb_torch.config.hlo import count_slots, entry_computation
from tpuemb_torch.config.ranges import float32_text
from tpuemb_torch.protos import hlo_pb2

#: An expression longer than this gets a name.
_LONGEST = 100

#: Infix operators and how tightly they bind; they group from the left, as float32 arithmetic must be read.
_INFIX: Mapping[str, tuple[str, int]] = {
    "or": (" or ", 1),
    "xor": (" xor ", 1),
    "and": (" and ", 2),
    "EQ": (" == ", 4),
    "NE": (" != ", 4),
    "GE": (" >= ", 4),
    "GT": (" > ", 4),
    "LE": (" <= ", 4),
    "LT": (" < ", 4),
    "add": (" + ", 5),
    "subtract": (" - ", 5),
    "multiply": ("*", 6),
    "divide": ("/", 6),
    "remainder": (" % ", 6),
}
_PREFIX: Mapping[str, tuple[str, int]] = {"not": ("not ", 3), "negate": ("-", 7)}
_ATOM = 8

#: Functions whose names differ from HLO's.
_FUNCTIONS: Mapping[str, str] = {
    "cosine": "cos",
    "exponential": "exp",
    "exponential-minus-one": "expm1",
    "log-plus-one": "log1p",
    "maximum": "max",
    "minimum": "min",
    "power": "pow",
    "round-nearest-afz": "round_half_away",
    "round-nearest-even": "round_half_even",
    "sine": "sin",
}


@dataclass(eq=False)
class _Term:
    """A value of the program, inputs and constants included."""

    #: Opcode, or the direction of a comparison; "name" for what is written as it is.
    operation: str
    operands: Sequence[_Term] = ()
    #: As it is written where it is used, and how tightly that binds.
    text: str = ""
    binding: int = _ATOM
    uses: int = 0


def program_formula(program: bytes) -> list[str]:
    """Returns the assignments of a serialized `xla.HloModuleProto`, one a line.

    The inputs are g (gradient), w, Slot_0 ... and lr (the learning rate), the outputs w', Slot_0' ...  A value with
    several uses has a name, and what only changes shapes is left out.  Of a program that does not run, the one line
    returned says why.
    """
    module = hlo_pb2.HloModuleProto.FromString(program)
    for path, problem in hlo_types.problems(module):
        return [f"cannot be run: {path}: {problem}"]
    entry = entry_computation(module)
    assert entry is not None
    state = ["w", *(f"Slot_{i}" for i in range(count_slots(module)))]
    terms: list[_Term] = []
    inputs = [_Term("name", text=name) for name in ("g", *state, "lr")]
    outputs: Sequence[_Term] = _inline(entry, inputs, module, terms)
    names: dict[_Term, str] = {}
    for name, output in zip(state, outputs, strict=True):
        output.uses += 1
        names.setdefault(output, f"{name}'")
    for term in reversed(terms):
        if term.uses:
            for operand in term.operands:
                operand.uses += 1
    lines = []
    temporaries = 0
    for term in terms:
        if not term.uses or term.operation == "name":
            continue
        term.text, term.binding = _written(term)
        if term in names or term.uses > 1 or len(term.text) > _LONGEST:
            if term not in names:
                temporaries += 1
            name = names.get(term, f"t{temporaries}")
            lines.append(f"{name} = {term.text}")
            term.text, term.binding = name, _ATOM
    for name, output in zip(state, outputs, strict=True):
        if output.text != f"{name}'":  # an input or a constant, or the same value as another output
            lines.append(f"{name}' = {output.text}")
    return lines


def _inline(
    computation: hlo_pb2.HloComputationProto,
    arguments: Sequence[Any],
    module: hlo_pb2.HloModuleProto,
    terms: list[_Term],
) -> Any:
    """Appends the terms of a computation, its calls written out, and returns its root: a term or a tuple."""
    values: dict[int, Any] = {}
    for instruction in computation.instructions:
        operands = [values[i] for i in instruction.operand_ids]
        opcode = instruction.opcode
        value: Any
        if opcode == "parameter":
            value = arguments[instruction.parameter_number]
        elif opcode == "tuple":
            value = tuple(operands)
        elif opcode == "get-tuple-element":
            value = operands[0][instruction.tuple_index]
        elif opcode in hlo_types.FORWARDING:
            value = operands[0]
        elif instruction.called_computation_ids:
            called = next(c for c in module.computations if c.id == instruction.called_computation_ids[0])
            value = _inline(called, operands, module, terms)
        elif opcode == "constant":
            value = _Term("name", text=_constant(instruction))
            value.binding = _ATOM if value.text[0] != "-" else _PREFIX["negate"][1]
        else:
            if opcode == "compare":
                opcode = instruction.comparison_direction
            elif opcode == "convert":
                opcode = hlo_types.type_text(instruction.shape.element_type)
            value = _Term(opcode, operands)
            terms.append(value)
        values[instruction.id] = value
    return values[computation.root_id]


def _written(term: _Term) -> tuple[str, int]:
    """A term in terms of its operands, with parentheses where needed."""
    operands = term.operands
    if term.operation in _INFIX:
        symbol, binding = _INFIX[term.operation]
        left, right = operands
        strict = binding == 4  # a < b < c would read as two comparisons
        return f"{_within(left, binding + strict)}{symbol}{_within(right, binding + 1)}", binding
    if term.operation in _PREFIX:
        symbol, binding = _PREFIX[term.operation]
        return f"{symbol}{_within(operands[0], binding + 1)}", binding
    function = _FUNCTIONS.get(term.operation, term.operation.replace("-", "_"))
    return f"{function}({', '.join(operand.text for operand in operands)})", _ATOM


def _within(term: _Term, binding: int) -> str:
    return term.text if term.binding >= binding else f"({term.text})"


def _constant(instruction: hlo_pb2.HloInstructionProto) -> str:
    element = instruction.shape.element_type
    (value,) = getattr(instruction.literal, hlo_types.LITERAL_FIELDS[element])
    return float32_text(value) if element == hlo_types.F32 else str(value).lower()
