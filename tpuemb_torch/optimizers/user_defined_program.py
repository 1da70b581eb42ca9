"""An optimizer written by the user as an HLO module."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from tpuemb_torch.config.hlo import count_slots, takes_dynamic_input
from tpuemb_torch.optimizers.base import Array, Slot, UpdateRule, register
from tpuemb_torch.optimizers.hlo_reference import interpret
from tpuemb_torch.optimizers.hlo_translation import translate
from tpuemb_torch.protos import hlo_pb2

if TYPE_CHECKING:
    from tpuemb_torch.config.schema import Optimizer


@register("user_defined_program")
class UserDefinedProgram(UpdateRule):
    """The optimizer that an HLO module computes, element by element:

        w, Slot_0, Slot_1, ... <- program(g, w, Slot_0, Slot_1, ..., [lr])

    The scalar is passed where the program has two inputs more than outputs; it is the table's learning rate, constant
    or dynamic.  The learning rate of a program without it is not used (but may scale weight decay).  The program runs
    once for each row that occurs in a step, also with a zero gradient.  It has no epsilon but its own, and what it
    does with 0/0 stays: no NaN is caught.

    Source: UserDefinedProgramParameters in optimization_parameters.proto; the rules on the numbers of inputs and
    outputs, and the names of the slots, in TensorFlow's
    tensorflow/core/tpu/tpu_embedding_optimization_parameters_utils.cc.  That slots are 0 where nothing was loaded is
    our choice.

    Args:
        program: a serialized `xla.HloModuleProto`.

    Raises:
        ValueError: for a program that cannot be run element by element; it names the instruction.
    """

    def __init__(self, program: bytes) -> None:
        super().__init__()
        self._module = hlo_pb2.HloModuleProto.FromString(program)
        self._function = translate(program)
        self._takes_scalar = takes_dynamic_input(self._module)
        self.slots = _slots(self._module)

    @classmethod
    def of(cls, optimizer: Optimizer) -> UserDefinedProgram:
        return cls(_program_of(optimizer))

    @classmethod
    def slots_of(cls, optimizer: Optimizer) -> tuple[Slot, ...]:
        return _slots(hlo_pb2.HloModuleProto.FromString(_program_of(optimizer)))

    def update(self, w: Tensor, g: Tensor, lr: Tensor, *slots: Tensor) -> tuple[Tensor, ...]:
        return self._function(g, w, *slots, lr) if self._takes_scalar else self._function(g, w, *slots)

    def reference(self, w: Array, g: Array, lr: Array | float, *slots: Array) -> tuple[Array, ...]:
        scalar = [np.asarray(lr)] if self._takes_scalar else []
        outputs = interpret(self._module, [g, w, *slots, *scalar])
        return tuple(np.broadcast_to(output, np.shape(w)) for output in outputs)


def _slots(module: hlo_pb2.HloModuleProto) -> tuple[Slot, ...]:
    return tuple(Slot(f"Slot_{i}", initial=0.0) for i in range(count_slots(module)))


def _program_of(optimizer: Optimizer) -> bytes:
    if optimizer.program is None:
        raise ValueError("user_defined_program without a program: give the optimizer its serialized HloModuleProto")
    return optimizer.program
