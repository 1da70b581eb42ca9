"""A user-defined optimizer as a listing, one line per instruction, in the manner of XLA's HLO text."""

from __future__ import annotations

from tpuemb_torch.config.hlo import entry_computation
from tpuemb_torch.config.ranges import float32_text
from tpuemb_torch.protos import hlo_pb2, xla_data_pb2

_VALUES = ("preds", "s32s", "s64s", "u32s", "u64s", "f32s", "f64s")


def program_listing(program: bytes) -> list[str]:
    """Returns the lines of a serialized `xla.HloModuleProto`."""
    module = hlo_pb2.HloModuleProto.FromString(program)
    entry = entry_computation(module)
    names = {computation.id: computation.name for computation in module.computations}
    lines = []
    for computation in module.computations:
        lines.append(f"{'ENTRY ' if computation is entry else ''}{computation.name} {{")
        operands = {instruction.id: instruction.name for instruction in computation.instructions}
        for instruction in computation.instructions:
            root = "ROOT " if instruction.id == computation.root_id else ""
            lines.append(f"  {root}{instruction.name} = {_right_hand_side(instruction, operands, names)}")
        lines.append("}")
    return lines


def _right_hand_side(
    instruction: hlo_pb2.HloInstructionProto, operands: dict[int, str], computations: dict[int, str]
) -> str:
    if instruction.opcode == "parameter":
        arguments = str(instruction.parameter_number)
    elif instruction.opcode == "constant":
        arguments = _literal(instruction.literal)
    else:
        arguments = ", ".join(operands.get(i, str(i)) for i in instruction.operand_ids)
    attributes = ""
    if instruction.opcode == "compare":
        attributes = f", direction={instruction.comparison_direction}"
    elif instruction.opcode == "get-tuple-element":
        attributes = f", index={instruction.tuple_index}"
    elif instruction.called_computation_ids:
        called = ", ".join(computations.get(i, str(i)) for i in instruction.called_computation_ids)
        attributes = f", calls={called}"
    return f"{_shape(instruction.shape)} {instruction.opcode}({arguments}){attributes}"


def _literal(literal: xla_data_pb2.LiteralProto) -> str:
    for field in _VALUES:
        values = getattr(literal, field)
        if values:
            shown = [float32_text(v) if field == "f32s" else str(v).lower() for v in values]
            return ", ".join(shown)
    return "..."


def _shape(shape: xla_data_pb2.ShapeProto) -> str:
    if shape.element_type == xla_data_pb2.TUPLE:
        return f"({', '.join(_shape(part) for part in shape.tuple_shapes)})"
    names = xla_data_pb2.PrimitiveType.DESCRIPTOR.values_by_number
    name = names[shape.element_type].name.lower() if shape.element_type in names else f"type{shape.element_type}"
    return f"{name}[{','.join(str(size) for size in shape.dimensions)}]"
