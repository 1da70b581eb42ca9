"""User-defined optimizers: what makes a program one that runs element by element."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.config import examples
from tpuemb_torch.config import ConfigError, load_config
from tpuemb_torch.config.hlo import OPERANDS, count_slots, takes_dynamic_input
from tpuemb_torch.protos import hlo_pb2, xla_data_pb2

PATH = "table_descriptor[0].optimization_parameters.user_defined_program.program"
Module = hlo_pb2.HloModuleProto


@pytest.mark.parametrize("with_rate", [True, False])
@pytest.mark.parametrize("num_slots", [0, 1, 6])
def test_valid(num_slots: int, with_rate: bool) -> None:
    module = examples.program(num_slots, with_rate)
    load_config(examples.with_program(module))
    assert count_slots(module) == num_slots
    assert takes_dynamic_input(module) == with_rate


@pytest.mark.parametrize(
    ("num_slots", "status", "words"),
    [
        (7, "DISABLED", None),
        (7, "ENABLED", "7 slots and the gradient accumulator .*limit of 7.*gradient_accumulation_status: DISABLED"),
        (7, "UNSPECIFIED", "7 slots and the gradient accumulator"),
        (8, "DISABLED", "8 slots .*limit of 7: use fewer slots$"),
        (8, "ENABLED", "8 slots and the gradient accumulator .*use fewer slots$"),
    ],
)
def test_number_of_slots(num_slots: int, status: str, words: str | None) -> None:
    proto = examples.with_program(examples.program(num_slots))
    parameters = proto.table_descriptor[0].optimization_parameters
    parameters.gradient_accumulation_status = getattr(examples_status(), status)
    if words is None:
        load_config(proto)
        return
    with pytest.raises(ConfigError) as caught:
        load_config(proto)
    assert caught.value.field == PATH
    assert re.search(words, caught.value.problem)


def examples_status() -> object:
    from tpuemb_torch.protos.optimization_parameters_pb2 import GradientAccumulationStatus

    return GradientAccumulationStatus


def set_entry(module: Module) -> None:
    module.entry_computation_id = 3


def set_root(module: Module) -> None:
    module.computations[0].root_id = 999


def duplicate_id(module: Module) -> None:
    module.computations[0].instructions[1].id = 1


def duplicate_computation(module: Module) -> None:
    module.computations.append(module.computations[0])


def unknown_operand(module: Module) -> None:
    module.computations[0].instructions[-2].operand_ids[1] = 4711


def operand_after_use(module: Module) -> None:
    instructions = list(module.computations[0].instructions)
    instructions[3], instructions[4] = instructions[4], instructions[3]
    del module.computations[0].instructions[:]
    module.computations[0].instructions.extend(instructions)


def forbidden(module: Module) -> None:
    module.computations[0].instructions[-2].opcode = "reduce"


def no_opcode(module: Module) -> None:
    module.computations[0].instructions[-2].opcode = ""


def too_few_operands(module: Module) -> None:
    del module.computations[0].instructions[-2].operand_ids[1:]


def wide(module: Module) -> None:
    module.computations[0].instructions[-2].shape.dimensions[1] = 8


def dynamic_size(module: Module) -> None:
    module.computations[0].instructions[-2].shape.is_dynamic_dimension.append(True)


def parameter_gap(module: Module) -> None:
    module.computations[0].instructions[1].parameter_number = 5


def parameter_type(module: Module) -> None:
    module.computations[0].instructions[0].shape.element_type = xla_data_pb2.S32


def output_type(module: Module) -> None:
    module.computations[0].instructions[-1].shape.tuple_shapes[0].element_type = xla_data_pb2.BF16


def unknown_type(module: Module) -> None:
    module.computations[0].instructions[-1].shape.tuple_shapes[0].element_type = 99  # type: ignore[assignment]


def no_tuple(module: Module) -> None:
    module.computations[0].root_id = 53


def shape_of_tuple(module: Module) -> None:
    module.computations[0].instructions[-1].operand_ids.append(2)


def one_input(module: Module) -> None:
    entry = module.computations[0]
    del entry.instructions[0]
    entry.instructions[0].parameter_number = 0
    entry.instructions[1].parameter_number = 1
    for index in (3, 4):
        entry.instructions[index].operand_ids[1] = 2
    del entry.instructions[1:4]
    entry.instructions[1].operand_ids[:] = [2, 2]


def too_many_outputs(module: Module) -> None:
    root = module.computations[0].instructions[-1]
    for _ in range(3):
        root.operand_ids.append(2)
        root.shape.tuple_shapes.add(element_type=xla_data_pb2.F32)


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        (set_entry, ".entry_computation_id", r"3 is no computation .*ids: 7"),
        (set_root, ".computations[0].root_id", "999 is no instruction of computation 'sgd'"),
        (duplicate_id, ".computations[0].instructions[1].id", "'w' .* id 1 of an earlier"),
        (duplicate_computation, ".computations[1].id", "7 is the id of an earlier computation"),
        (unknown_operand, ".computations[0].instructions[5].operand_ids[1]", "'next' .*4711"),
        (operand_after_use, ".computations[0].instructions[3].operand_ids[0]", "'step' .*51"),
        (forbidden, ".computations[0].instructions[5].opcode", r"'next' \(reduce\) is not an element-wise .*add, and"),
        (no_opcode, ".computations[0].instructions[5].opcode", "'next'"),
        (too_few_operands, ".computations[0].instructions[5].operand_ids", "1 operands, but needs 2"),
        (wide, ".computations[0].instructions[5].shape", r"'next' .*\[1, 8\]"),
        (dynamic_size, ".computations[0].instructions[5].shape", "'next'"),
        (parameter_gap, ".computations[0]", r"\[0, 2, 5\]"),
        (parameter_type, ".computations[0]", "input 0 .*'g'.* s32"),
        (output_type, ".computations[0]", "output 0 is bf16"),
        (unknown_type, ".computations[0]", "output 0 is type 99"),
        (no_tuple, ".computations[0].root_id", "'next' is no tuple"),
        (shape_of_tuple, ".computations[0].root_id", "2 operands, but its shape 1"),
        (one_input, ".computations[0]", "1 inputs and 1 outputs"),
        (too_many_outputs, ".computations[0]", "3 inputs and 4 outputs"),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_broken(change: Callable[[Module], None], field: str, words: str) -> None:
    module = examples.program()
    change(module)
    with pytest.raises(ConfigError) as caught:
        load_config(examples.with_program(module))
    assert caught.value.field == PATH + field
    assert re.search(words, caught.value.problem)
    assert "table 't'" in caught.value.problem


def test_no_program() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(examples.with_optimizer("user_defined_program {}"))
    assert caught.value.field == f"{PATH}.entry_computation_id"


def with_call(opcode: str) -> Module:
    """The step as a called computation."""
    module = examples.program()
    called = hlo_pb2.HloComputationProto(name="square", id=3, root_id=2)
    called.instructions.append(examples.instruction("x", "parameter", 1))
    called.instructions.append(examples.instruction("xx", "multiply", 2, (1, 1)))
    entry = module.computations[0]
    entry.instructions[-2].operand_ids[1] = 60
    call = examples.instruction("call", opcode, 60, (52,), called_computation_ids=[3])
    instructions = [*entry.instructions[:-2], call, *entry.instructions[-2:]]
    del entry.instructions[:]
    entry.instructions.extend(instructions)
    module.computations.insert(0, called)
    return module


@pytest.mark.parametrize("opcode", ["call", "fusion", "map"])
def test_calls(opcode: str) -> None:
    load_config(examples.with_program(with_call(opcode)))
    where = f"{PATH}.computations[1].instructions[5]"
    for change, field, words in (
        ([], ".called_computation_ids", "calls 0 computations"),
        ([7], ".called_computation_ids[0]", "calls 7, which is no earlier"),  # itself: a loop
    ):
        module = with_call(opcode)
        module.computations[1].instructions[5].called_computation_ids[:] = change
        with pytest.raises(ConfigError) as caught:
            load_config(examples.with_program(module))
        assert caught.value.field == where + field
        assert words in caught.value.problem
    module = with_call(opcode)
    module.computations[1].instructions[5].operand_ids.append(1)
    with pytest.raises(ConfigError, match="passes 2 operands to 'square', which has 1"):
        load_config(examples.with_program(module))


def test_the_operations_that_an_optimizer_may_use() -> None:
    allowed = """
        parameter constant tuple get-tuple-element reshape broadcast convert copy bitcast add subtract multiply divide
        remainder power sqrt rsqrt cbrt maximum minimum clamp compare select abs negate sign exponential
        exponential-minus-one log log-plus-one logistic tanh sine cosine floor ceil round-nearest-afz
        round-nearest-even and or xor not is-finite call fusion map
    """
    assert sorted(OPERANDS) == sorted(allowed.split())
