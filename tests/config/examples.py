"""Small configurations that the tests change in one place."""

from __future__ import annotations

from google.protobuf import text_format

from tpuemb_torch.protos import hlo_pb2, xla_data_pb2
from tpuemb_torch.protos import tpu_embedding_configuration_pb2 as configuration_pb2

Proto = configuration_pb2.TPUEmbeddingConfiguration

BY_FEATURE = """
table_descriptor {
  name: "users"
  vocabulary_size: 100
  dimension: 8
  optimization_parameters { learning_rate { constant: 0.1 } adagrad {} }
}
table_descriptor {
  name: "items"
  vocabulary_size: 50
  dimension: 4
  optimization_parameters {
    learning_rate { dynamic { tag: 0 } }
    adam { beta1: 0.9 beta2: 0.999 epsilon: 1e-7 use_sum_inside_sqrt: true }
  }
}
mode: TRAINING
num_hosts: 1
num_tensor_cores: 2
feature_descriptor { name: "user" table_id: 0 input_shape: 16 }
feature_descriptor { name: "clicked" table_id: 1 input_shape: 16 input_shape: 5 }
"""

BY_TABLE = """
table_descriptor {
  name: "users"
  vocabulary_size: 100
  dimension: 8
  num_features: 1
  optimization_parameters { learning_rate { constant: 0.1 } adagrad {} }
}
table_descriptor {
  name: "items"
  vocabulary_size: 50
  dimension: 4
  num_features: 3
  optimization_parameters { learning_rate { constant: 0.2 } stochastic_gradient_descent {} }
}
mode: INFERENCE
num_hosts: 2
num_tensor_cores: 4
batch_size_per_tensor_core: 16
sharding_strategy: MOD
"""


def by_feature() -> Proto:
    """Two tables, two features."""
    return text_format.Parse(BY_FEATURE, Proto())


def by_table() -> Proto:
    """The older layout."""
    return text_format.Parse(BY_TABLE, Proto())


def with_optimizer(text: str, dimension: int = 8) -> Proto:
    """One table with the optimizer `text` (and a learning rate, if `text` has none)."""
    proto = Proto(mode=Proto.TRAINING, num_hosts=1, num_tensor_cores=1)
    table = proto.table_descriptor.add(name="t", vocabulary_size=10, dimension=dimension)
    text_format.Parse(text, table.optimization_parameters)
    if "learning_rate" not in text:
        table.optimization_parameters.learning_rate.constant = 0.1
    proto.feature_descriptor.add(table_id=0, input_shape=[4])
    return proto


def instruction(
    name: str,
    opcode: str,
    id: int,
    operands: tuple[int, ...] = (),
    dimensions: tuple[int, ...] = (1, 1),
    **fields: object,
) -> hlo_pb2.HloInstructionProto:
    """An instruction that gives float32."""
    made = hlo_pb2.HloInstructionProto(name=name, opcode=opcode, id=id, operand_ids=operands, **fields)
    made.shape.element_type = xla_data_pb2.F32
    made.shape.dimensions.extend(dimensions)
    return made


def program(num_slots: int = 0, with_rate: bool = True) -> hlo_pb2.HloModuleProto:
    """w - lr * g (or w - g), with slots that stay as they are."""
    module = hlo_pb2.HloModuleProto(name="sgd", entry_computation_name="sgd", entry_computation_id=7)
    entry = module.computations.add(name="sgd", id=7)
    entry.instructions.append(instruction("g", "parameter", 1, parameter_number=0))
    entry.instructions.append(instruction("w", "parameter", 2, parameter_number=1))
    slots = range(3, 3 + num_slots)
    for number, i in enumerate(slots):
        entry.instructions.append(instruction(f"s{number}", "parameter", i, parameter_number=i - 1))
    step = 1
    if with_rate:
        entry.instructions.append(instruction("lr", "parameter", 50, dimensions=(), parameter_number=2 + num_slots))
        entry.instructions.append(instruction("wide", "broadcast", 51, (50,)))
        entry.instructions.append(instruction("step", "multiply", 52, (51, 1)))
        step = 52
    entry.instructions.append(instruction("next", "subtract", 53, (2, step)))
    root = entry.instructions.add(name="root", opcode="tuple", id=54, operand_ids=[53, *slots])
    root.shape.element_type = xla_data_pb2.TUPLE
    for _ in root.operand_ids:
        root.shape.tuple_shapes.add(element_type=xla_data_pb2.F32, dimensions=[1, 1])
    entry.root_id = 54
    return module


def with_program(module: hlo_pb2.HloModuleProto) -> Proto:
    """One table with a user-defined optimizer."""
    proto = with_optimizer("user_defined_program {}")
    proto.table_descriptor[0].optimization_parameters.user_defined_program.program.CopyFrom(module)
    return proto
