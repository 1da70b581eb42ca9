"""Reads HLO text into an `xla.HloModuleProto`: enough of it for optimizers, as XLA prints it or shorter."""

from __future__ import annotations

import re

from tpuemb_torch.config.hlo_types import LITERAL_FIELDS
from tpuemb_torch.protos import hlo_pb2, xla_data_pb2

_INSTRUCTION = re.compile(
    r"(?P<root>ROOT )?%?(?P<name>\S+) = (?P<shape>\(.*\)(?= [\w-]+\()|\S+) "
    r"(?P<opcode>[\w-]+)\((?P<arguments>.*)\)(?P<attributes>[^)]*)"
)


def parse(text: str) -> hlo_pb2.HloModuleProto:
    """Returns the module of a text: a header line, then computations, called ones first, the last one `ENTRY`.

    Operands may be written with or without `%` and shapes; layouts are ignored; an entry that gives a single value is
    made to give a tuple of it, as an optimizer must.
    """
    module = hlo_pb2.HloModuleProto(name="module")
    ids: dict[str, int] = {}
    computations: dict[str, int] = {}
    computation = hlo_pb2.HloComputationProto()
    for raw in text.strip().splitlines()[1:]:
        line = re.sub(r"(?<=\])\{[\d,]*\}", "", raw.strip())
        if line.endswith("{"):
            name = line.removeprefix("ENTRY ").split()[0].lstrip("%")
            computation = module.computations.add(name=name, id=len(computations) + 1)
            computations[name] = computation.id
            if line.startswith("ENTRY "):
                module.entry_computation_id = computation.id
        elif match := _INSTRUCTION.fullmatch(line):
            instruction = computation.instructions.add(name=match["name"], opcode=match["opcode"], id=len(ids) + 1)
            ids[f"{computation.name}/{match['name']}"] = instruction.id
            _shape(instruction.shape, match["shape"])
            _fill(instruction, match["arguments"], match["attributes"], computations, ids, computation.name)
            if match["root"]:
                computation.root_id = instruction.id
    _give_a_tuple(module.computations[-1], len(ids) + 1)
    return module


def _shape(shape: xla_data_pb2.ShapeProto, text: str) -> None:
    if text.startswith("("):
        shape.element_type = xla_data_pb2.TUPLE
        depth, part = 0, ""
        for character in text[1:-1] + ",":
            depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(character, 0)
            if character == "," and depth == 0:
                _shape(shape.tuple_shapes.add(), part.strip())
                part = ""
            else:
                part += character
        return
    kind, dimensions = text.rstrip("]").split("[")
    shape.element_type = xla_data_pb2.PrimitiveType.Value(kind.upper())
    shape.dimensions.extend(int(size) for size in dimensions.split(",") if size)


def _fill(
    instruction: hlo_pb2.HloInstructionProto,
    arguments: str,
    attributes: str,
    computations: dict[str, int],
    ids: dict[str, int],
    computation: str,
) -> None:
    if instruction.opcode == "parameter":
        instruction.parameter_number = int(arguments)
    elif instruction.opcode == "constant":
        values = getattr(instruction.literal, LITERAL_FIELDS[instruction.shape.element_type])
        values.append(arguments == "true" if arguments in ("true", "false") else _number(arguments))
    else:
        names = re.findall(r"%([\w.\-]+)", arguments) or re.findall(r"[\w.\-]+", arguments)
        instruction.operand_ids.extend(ids[f"{computation}/{name}"] for name in names)
    for key, value in re.findall(r"(\w+)=%?([\w.\-]+)", attributes):
        if key == "direction":
            instruction.comparison_direction = value
        elif key == "index":
            instruction.tuple_index = int(value)
        elif key in ("calls", "to_apply"):
            instruction.called_computation_ids.append(computations[value])


def _number(text: str) -> int | float:
    return int(text) if re.fullmatch(r"-?\d+", text) else float(text)


def _give_a_tuple(entry: hlo_pb2.HloComputationProto, new_id: int) -> None:
    root = next(i for i in entry.instructions if i.id == entry.root_id)
    if root.shape.element_type == xla_data_pb2.TUPLE:
        return
    result = entry.instructions.add(name="result", opcode="tuple", id=new_id, operand_ids=[root.id])
    result.shape.element_type = xla_data_pb2.TUPLE
    result.shape.tuple_shapes.add().CopyFrom(root.shape)
    entry.root_id = new_id
