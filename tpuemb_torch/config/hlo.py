"""The structure of a user-defined optimizer: an HLO module that works on single elements.

`(gradient, weights, slots..., [dynamic input]) -> (weights, slots...)`, float32 of one element each.  The rules on
arity are those of TensorFlow's tensorflow/core/tpu/tpu_embedding_optimization_parameters_utils.cc; those on ids are
XLA's own when it reads a module (HloModule::CreateFromProto): operands and called computations come before their users.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tpuemb_torch.protos import hlo_pb2, xla_data_pb2

Problem = tuple[str, str]  # path below `program`, what is wrong there

_UNARY = (
    "abs bitcast broadcast cbrt ceil convert copy cosine exponential exponential-minus-one floor get-tuple-element "
    "is-finite log log-plus-one logistic negate not reshape round-nearest-afz round-nearest-even rsqrt sign sine sqrt "
    "tanh"
)
_BINARY = "add and compare divide maximum minimum multiply or power remainder subtract xor"
_CALLS = ("call", "fusion", "map")

#: Number of operands of each opcode; None for any number.
OPERANDS: Mapping[str, int | None] = {
    **dict.fromkeys(("parameter", "constant"), 0),
    **dict.fromkeys(_UNARY.split(), 1),
    **dict.fromkeys(_BINARY.split(), 2),
    **dict.fromkeys(("clamp", "select"), 3),
    **dict.fromkeys(("tuple", *_CALLS), None),
}


def entry_computation(program: hlo_pb2.HloModuleProto) -> hlo_pb2.HloComputationProto | None:
    """Returns the computation with the id `entry_computation_id`, None if there is none."""
    return next((c for c in program.computations if c.id == program.entry_computation_id), None)


def root_instruction(computation: hlo_pb2.HloComputationProto) -> hlo_pb2.HloInstructionProto | None:
    """Returns the instruction with the id `root_id`, None if there is none."""
    return next((i for i in computation.instructions if i.id == computation.root_id), None)


def count_slots(program: hlo_pb2.HloModuleProto) -> int:
    """Returns the number of slot variables of a program without problems: its outputs less the weights."""
    entry = entry_computation(program)
    root = root_instruction(entry) if entry is not None else None
    return len(root.shape.tuple_shapes) - 1 if root is not None else 0


def takes_dynamic_input(program: hlo_pb2.HloModuleProto) -> bool:
    """Whether a program without problems has a last, scalar argument: the learning rate."""
    entry = entry_computation(program)
    return entry is not None and len(_parameters(entry)) == count_slots(program) + 3


def problems(program: hlo_pb2.HloModuleProto) -> Iterator[Problem]:
    """Yields everything that keeps a program from being run element by element."""
    entry = entry_computation(program)
    if entry is None:
        known = ", ".join(str(c.id) for c in program.computations) or "none"
        yield "entry_computation_id", f"{program.entry_computation_id} is no computation of the program (ids: {known})"
        return
    found = False
    for problem in _structure(program):
        found = True
        yield problem
    if not found:  # shapes and arity mean nothing in a broken program
        index = list(program.computations).index(entry)
        for path, message in _signature(entry):
            yield f"computations[{index}]{path}", message


def _structure(program: hlo_pb2.HloModuleProto) -> Iterator[Problem]:
    earlier: dict[int, hlo_pb2.HloComputationProto] = {}
    for index, computation in enumerate(program.computations):
        path = f"computations[{index}]"
        if computation.id in earlier:
            yield f"{path}.id", f"{computation.id} is the id of an earlier computation, too"
        if root_instruction(computation) is None:
            yield f"{path}.root_id", f"{computation.root_id} is no instruction of computation {computation.name!r}"
        yield from _instructions(computation, path, earlier)
        numbers = [p.parameter_number for p in _parameters(computation)]
        if numbers != list(range(len(numbers))):
            yield path, f"the parameters of {computation.name!r} have the numbers {numbers}; expected 0, 1, 2 ..."
        earlier[computation.id] = computation


def _instructions(
    computation: hlo_pb2.HloComputationProto, path: str, computations: Mapping[int, hlo_pb2.HloComputationProto]
) -> Iterator[Problem]:
    earlier: set[int] = set()
    for index, instruction in enumerate(computation.instructions):
        where = f"{path}.instructions[{index}]"
        label = f"instruction {instruction.name!r} ({instruction.opcode})"
        if instruction.id in earlier:
            yield f"{where}.id", f"{label} has the id {instruction.id} of an earlier instruction"
        for i, operand in enumerate(instruction.operand_ids):
            if operand not in earlier:
                yield f"{where}.operand_ids[{i}]", f"{label} uses {operand}, which is no earlier instruction"
        earlier.add(instruction.id)
        if instruction.opcode not in OPERANDS:
            yield (
                f"{where}.opcode",
                f"{label} is not an element-wise operation; an optimizer may use: {', '.join(sorted(OPERANDS))}",
            )
            continue
        operands = OPERANDS[instruction.opcode]
        if operands is not None and len(instruction.operand_ids) != operands:
            yield f"{where}.operand_ids", f"{label} has {len(instruction.operand_ids)} operands, but needs {operands}"
        if instruction.opcode in _CALLS:
            yield from _call(instruction, label, where, computations)
        shape = instruction.shape
        if shape.element_type != xla_data_pb2.TUPLE and not _single_element(shape):
            yield (
                f"{where}.shape",
                f"{label} has the dimensions {list(shape.dimensions)}; an optimizer works on single elements, of "
                "shape [] or [1, 1]",
            )


def _call(
    instruction: hlo_pb2.HloInstructionProto,
    label: str,
    path: str,
    computations: Mapping[int, hlo_pb2.HloComputationProto],
) -> Iterator[Problem]:
    if len(instruction.called_computation_ids) != 1:
        count = len(instruction.called_computation_ids)
        yield f"{path}.called_computation_ids", f"{label} calls {count} computations, but must call 1"
        return
    called = computations.get(instruction.called_computation_ids[0])
    if called is None:
        number = instruction.called_computation_ids[0]
        yield f"{path}.called_computation_ids[0]", f"{label} calls {number}, which is no earlier computation"
    elif len(_parameters(called)) != len(instruction.operand_ids):
        yield (
            f"{path}.operand_ids",
            f"{label} passes {len(instruction.operand_ids)} operands to {called.name!r}, which has "
            f"{len(_parameters(called))} parameters",
        )


def _signature(entry: hlo_pb2.HloComputationProto) -> Iterator[Problem]:
    root = root_instruction(entry)
    assert root is not None
    parameters = _parameters(entry)
    if root.shape.element_type != xla_data_pb2.TUPLE:
        yield ".root_id", f"the result {root.name!r} is no tuple; return (weights, slots...), also without slots"
        return
    results = root.shape.tuple_shapes
    if root.opcode == "tuple" and len(root.operand_ids) != len(results):
        yield ".root_id", f"{root.name!r} has {len(root.operand_ids)} operands, but its shape {len(results)} elements"
    inputs, outputs = len(parameters), len(results)
    if inputs < 2 or inputs - outputs not in (1, 2):
        yield (
            "",
            f"the program has {inputs} inputs and {outputs} outputs; it needs the inputs (gradient, weights, slots..., "
            "[learning rate]) and the outputs (weights, slots...): at least 2 inputs, and 1 or 2 fewer outputs",
        )
    for number, parameter in enumerate(parameters):
        if parameter.shape.element_type != xla_data_pb2.F32:
            yield "", f"input {number} ({parameter.name!r}) is {_type(parameter.shape)}; every input is float32"
    for number, shape in enumerate(results):
        if shape.element_type != xla_data_pb2.F32 or not _single_element(shape):
            yield "", f"output {number} is {_type(shape)}{list(shape.dimensions)}; every output is one float32"


def _parameters(computation: hlo_pb2.HloComputationProto) -> list[hlo_pb2.HloInstructionProto]:
    found = (i for i in computation.instructions if i.opcode == "parameter")
    return sorted(found, key=lambda instruction: instruction.parameter_number)


def _single_element(shape: xla_data_pb2.ShapeProto) -> bool:
    return all(size == 1 for size in shape.dimensions) and not any(shape.is_dynamic_dimension)


def _type(shape: xla_data_pb2.ShapeProto) -> str:
    number = shape.element_type
    names = xla_data_pb2.PrimitiveType.DESCRIPTOR.values_by_number
    return names[number].name.lower() if number in names else f"type {number}"
