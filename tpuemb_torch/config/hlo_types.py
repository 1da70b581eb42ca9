"""The element types of a user-defined optimizer's instructions: float32, with predicates and integers inside.

A second look at a program whose structure is sound (see `hlo.py`): operands, results, constants and calls agree in
type, and the program is of a size that can be run.  The rules are those of XLA's shape inference
(xla/service/shape_inference.cc) for the types that are supported here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tpuemb_torch.config.hlo import Problem, root_instruction
from tpuemb_torch.protos import hlo_pb2, xla_data_pb2

F32, PRED, S32, S64 = xla_data_pb2.F32, xla_data_pb2.PRED, xla_data_pb2.S32, xla_data_pb2.S64

#: One element's type: a number of `xla.PrimitiveType`, or the types of a tuple's elements.
Type = int | tuple["Type", ...]

#: Field of a literal that holds the values of a type; these are the types an instruction may have.
LITERAL_FIELDS: Mapping[int, str] = {F32: "f32s", PRED: "preds", S32: "s32s", S64: "s64s"}
#: The six of XLA's `ComparisonDirection`.
DIRECTIONS = ("EQ", "NE", "GE", "GT", "LE", "LT")
#: Instructions after all calls are written out, and calls within calls: far above any optimizer.
MAX_INSTRUCTIONS = 10_000
MAX_CALL_DEPTH = 50

_FLOATS = frozenset({F32})
_INTEGERS = frozenset({S32, S64})
_NUMBERS = _FLOATS | _INTEGERS
_ALL = _NUMBERS | {PRED}
#: Opcodes whose operands and result are all of one type, by the types it may be.
UNIFORM: Mapping[str, frozenset[int]] = {
    **dict.fromkeys(
        "abs add clamp divide maximum minimum multiply negate power remainder sign subtract".split(), _NUMBERS
    ),
    **dict.fromkeys(
        "cbrt ceil cosine exponential exponential-minus-one floor log log-plus-one logistic round-nearest-afz "
        "round-nearest-even rsqrt sine sqrt tanh".split(),
        _FLOATS,
    ),
    **dict.fromkeys("and not or xor".split(), _INTEGERS | {PRED}),
}
#: Opcodes that hand on their operand, which may be a tuple.
FORWARDING = ("bitcast", "broadcast", "copy", "reshape")

Computations = Mapping[int, hlo_pb2.HloComputationProto]


def problems(program: hlo_pb2.HloModuleProto) -> Iterator[Problem]:
    """Yields every disagreement of types in a program without other problems, as (path below the program, what)."""
    earlier: dict[int, hlo_pb2.HloComputationProto] = {}
    sizes: dict[int, int] = {}
    depths: dict[int, int] = {}
    for index, computation in enumerate(program.computations):
        types: dict[int, Type] = {}
        size = depth = 0
        for i, instruction in enumerate(computation.instructions):
            operands = [types[operand] for operand in instruction.operand_ids]
            result = types[instruction.id] = type_of(instruction.shape)
            message = _problem(instruction, result, operands, earlier)
            if message is not None:
                label = f"instruction {instruction.name!r} ({instruction.opcode})"
                yield f"computations[{index}].instructions[{i}]", f"{label} {message}"
            called = instruction.called_computation_ids
            size += sizes[called[0]] if called else 1
            depth = max(depth, depths[called[0]] + 1 if called else 0)
        if size > MAX_INSTRUCTIONS:
            yield (
                f"computations[{index}]",
                f"{computation.name!r} has {size} instructions with all calls written out; the limit is "
                f"{MAX_INSTRUCTIONS}",
            )
        if depth > MAX_CALL_DEPTH:
            yield f"computations[{index}]", f"{computation.name!r} calls {depth} deep; the limit is {MAX_CALL_DEPTH}"
        earlier[computation.id], sizes[computation.id], depths[computation.id] = computation, size, depth


def type_of(shape: xla_data_pb2.ShapeProto) -> Type:
    """Returns the type of a shape; dimensions do not matter, they are all 1."""
    if shape.element_type == xla_data_pb2.TUPLE:
        return tuple(type_of(part) for part in shape.tuple_shapes)
    return int(shape.element_type)


def type_text(of: Type) -> str:
    """Returns a type as HLO text writes it: "f32", "(f32, pred)"."""
    if isinstance(of, tuple):
        return f"({', '.join(type_text(part) for part in of)})"
    names = xla_data_pb2.PrimitiveType.DESCRIPTOR.values_by_number
    return names[of].name.lower() if of in names else f"type{of}"


def _problem(
    instruction: hlo_pb2.HloInstructionProto, result: Type, operands: list[Type], computations: Computations
) -> str | None:
    """What is wrong with one instruction, whose operands are right."""
    opcode = instruction.opcode
    if any(leaf not in _ALL for leaf in _leaves(result)):
        allowed = ", ".join(type_text(of) for of in sorted(_ALL))
        return f"is {type_text(result)}; an optimizer may use the types {allowed}"
    expected: str | None = None
    if opcode == "constant":
        count = len(getattr(instruction.literal, LITERAL_FIELDS[result])) if isinstance(result, int) else 0
        return None if count == 1 else f"holds {count} values of type {type_text(result)}; a constant is one element"
    if opcode == "get-tuple-element":
        elements, index = operands[0], instruction.tuple_index
        if not isinstance(elements, tuple) or not 0 <= index < len(elements):
            return f"takes element {index} of {type_text(elements)}, which has no such element"
        expected = None if elements[index] == result else type_text(elements[index])
    elif opcode == "tuple":
        expected = None if tuple(operands) == result else "a tuple of its operands"
    elif opcode in FORWARDING:
        expected = None if operands == [result] else "the type of its operand"
    elif instruction.called_computation_ids:
        expected = _of_call(result, operands, computations[instruction.called_computation_ids[0]])
    elif opcode in UNIFORM:
        if operands != [result] * len(operands) or result not in UNIFORM[opcode]:
            expected = f"operands and result of one type, {' or '.join(map(type_text, sorted(UNIFORM[opcode])))}"
    elif opcode == "compare":
        if instruction.comparison_direction not in DIRECTIONS:
            return f"has the direction {instruction.comparison_direction!r}; use one of {', '.join(DIRECTIONS)}"
        if instruction.comparison_type == "TOTALORDER":
            return "compares in TOTALORDER; compare with the type FLOAT"
        if operands[0] != operands[1] or result != PRED or isinstance(operands[0], tuple):
            expected = "two operands of one type, and pred"
    elif opcode == "select":
        if operands != [PRED, result, result] or isinstance(result, tuple):
            expected = "pred, and two operands of the result's type"
    elif opcode == "is-finite":
        expected = None if (operands, result) == ([F32], PRED) else "f32, and pred"
    elif opcode == "convert":
        expected = "single elements" if any(isinstance(of, tuple) for of in (*operands, result)) else None
    if expected is None:
        return None
    return f"has the types {type_text(tuple(operands))} -> {type_text(result)}; expected {expected}"


def _of_call(result: Type, operands: list[Type], called: hlo_pb2.HloComputationProto) -> str | None:
    """The types a call should have, None if it has them."""
    numbered = {i.parameter_number: type_of(i.shape) for i in called.instructions if i.opcode == "parameter"}
    parameters = [numbered[number] for number in sorted(numbered)]
    root = root_instruction(called)
    assert root is not None
    if operands == parameters and type_of(root.shape) == result:
        return None
    return f"those of {called.name!r}: {type_text(tuple(parameters))} -> {type_text(type_of(root.shape))}"


def _leaves(of: Type) -> Iterator[int]:
    if isinstance(of, tuple):
        for part in of:
            yield from _leaves(part)
    else:
        yield of
