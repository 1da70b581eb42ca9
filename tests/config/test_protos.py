"""The checked-in code is that of the .proto files, and the protos are TensorFlow's under another package name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, wrappers_pb2
from google.protobuf.descriptor import FieldDescriptor

from tests.config import examples
from tpuemb_torch.config import load_config
from tpuemb_torch.config.wire import is_repeated
from tpuemb_torch.protos import (
    hlo_pb2,
    optimization_parameters_pb2,
    tensorflow_checkpoint_pb2,
    tpu_embedding_configuration_pb2,
    xla_data_pb2,
)

MODULES = (
    xla_data_pb2,
    hlo_pb2,
    optimization_parameters_pb2,
    tpu_embedding_configuration_pb2,
    tensorflow_checkpoint_pb2,
)
FOLDER = Path(hlo_pb2.__file__).parent
TYPE_NAMES = {
    number: name.removeprefix("TYPE_").lower()
    for name, number in vars(FieldDescriptor).items()
    if name.startswith("TYPE_")
}


def statements(text: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yields each statement of a .proto file with the names of the blocks around it."""
    text = re.sub(r"//[^\n]*", "", text)
    blocks: list[str] = []
    for part in re.findall(r"[^{};]*[{};]", text):
        body, mark = " ".join(part[:-1].split()), part[-1]
        if mark == "{":
            blocks.append(body)
        elif mark == "}":
            blocks.pop()
        else:
            yield tuple(blocks), body


def declared(text: str) -> set[tuple[str, str]]:
    """Fields and enum values of a .proto file as (path, declaration)."""
    found = set()
    for blocks, body in statements(text):
        if not blocks or body.startswith(("reserved ", "option ")):
            continue
        path = ".".join(block.split()[1] for block in blocks if not block.startswith("oneof"))
        oneof = next((block.split()[1] for block in blocks if block.startswith("oneof")), "")
        body = re.sub(r" \[deprecated = true\]$", "", body)
        kind, name, number = re.fullmatch(r"(?:(.*) )?(\w+) = (-?\d+)", body).groups()  # type: ignore[union-attr]
        kind = (kind or "").replace("optional ", "").replace(", ", ",")
        kind = re.sub(r"[\w.]*\.(\w+)", r"\1", kind)  # the last part of a type's name
        found.add((path, f"{kind} {name} = {number} {oneof}".strip()))
    return found


def compiled(module: ModuleType) -> set[tuple[str, str]]:
    """The same of a generated module."""
    found = set()

    def visit_enum(enum, path: str) -> None:
        found.update((path, f"{value.name} = {value.number}") for value in enum.values)

    def type_name(field) -> str:
        kind = field.message_type or field.enum_type
        return kind.name if kind is not None else TYPE_NAMES[field.type]

    def visit(message, path: str) -> None:
        for field in message.fields:
            if field.message_type is not None and field.message_type.GetOptions().map_entry:
                parts = field.message_type.fields_by_name
                kind = f"map<{type_name(parts['key'])},{type_name(parts['value'])}>"
            else:
                kind = ("repeated " if is_repeated(field) else "") + type_name(field)
            oneof = field.containing_oneof
            name = "" if oneof is None or oneof.name == f"_{field.name}" else oneof.name
            found.add((path, f"{kind} {field.name} = {field.number} {name}".strip()))
        for nested in message.nested_types:
            if not nested.GetOptions().map_entry:
                visit(nested, f"{path}.{nested.name}")
        for enum in message.enum_types:
            visit_enum(enum, f"{path}.{enum.name}")

    for name, message in module.DESCRIPTOR.message_types_by_name.items():
        visit(message, name)
    for name, enum in module.DESCRIPTOR.enum_types_by_name.items():
        visit_enum(enum, name)
    return found


def reserved(text: str) -> set[tuple[str, int]]:
    return {
        (".".join(block.split()[1] for block in blocks), int(number))
        for blocks, body in statements(text)
        if body.startswith("reserved") and '"' not in body
        for number in re.findall(r"\d+", body)
    }


def compiled_reserved(module: ModuleType) -> set[tuple[str, int]]:
    file = descriptor_pb2.FileDescriptorProto()
    module.DESCRIPTOR.CopyToProto(file)
    found = set()

    def visit(message: descriptor_pb2.DescriptorProto, path: str) -> None:
        for span in message.reserved_range:
            found.update((path, number) for number in range(span.start, span.end))
        for nested in message.nested_type:
            visit(nested, f"{path}.{nested.name}")

    for message in file.message_type:
        visit(message, message.name)
    return found


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_generated_code_is_up_to_date(module: ModuleType) -> None:
    text = (FOLDER / Path(module.DESCRIPTOR.name).name).read_text()
    assert declared(text) == compiled(module), "run scripts/generate_protos"
    assert reserved(text) == compiled_reserved(module), "run scripts/generate_protos"
    assert len(declared(text)) > 10


def test_generated_code_runs_on_the_oldest_supported_protobuf() -> None:
    for module in MODULES:
        source = Path(module.__file__).read_text()  # type: ignore[arg-type]
        assert "# Protobuf Python Version: 5.26" in source
        assert "ValidateProtobufRuntimeVersion" not in source


def tensorflow_like_configuration() -> type:
    """A message class with TensorFlow's full names, from descriptors renamed back."""
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(wrappers_pb2.DESCRIPTOR.serialized_pb)

    def rename(name: str) -> str:
        return name.replace("tpuemb_torch.tpu", "tensorflow.tpu").replace("tpuemb_torch.xla", "xla")

    def visit(message: descriptor_pb2.DescriptorProto) -> None:
        for field in message.field:
            if field.type_name:
                field.type_name = rename(field.type_name)
        for nested in message.nested_type:
            visit(nested)

    for module in MODULES:
        file = descriptor_pb2.FileDescriptorProto()
        module.DESCRIPTOR.CopyToProto(file)
        file.package = rename(file.package)
        for message in file.message_type:
            visit(message)
        pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tensorflow.tpu.TPUEmbeddingConfiguration"))


def test_a_message_of_another_package_is_taken() -> None:
    foreign = tensorflow_like_configuration()
    proto = examples.with_program(examples.program(num_slots=2))
    message = foreign.FromString(proto.SerializeToString())  # type: ignore[attr-defined]
    assert message.DESCRIPTOR.full_name == "tensorflow.tpu.TPUEmbeddingConfiguration"
    assert load_config(message) == load_config(proto)


def test_tensorflow_has_the_same_descriptors() -> None:
    name = "tensorflow.core.protobuf.tpu.tpu_embedding_configuration_pb2"
    theirs = pytest.importorskip(name, reason="needs TensorFlow", exc_type=ImportError)
    from tensorflow.core.protobuf.tpu import optimization_parameters_pb2 as their_parameters

    for ours, other in ((tpu_embedding_configuration_pb2, theirs), (optimization_parameters_pb2, their_parameters)):
        # A newer TensorFlow may have more; what both have must agree.
        shared = {path for path, _ in compiled(ours)} & {path for path, _ in compiled(other)}
        assert len(shared) > 5
        assert {d for d in compiled(ours) if d[0] in shared} <= compiled(other)

    proto = examples.by_feature()
    message = theirs.TPUEmbeddingConfiguration.FromString(proto.SerializeToString())
    assert load_config(message) == load_config(proto)
    assert theirs.TPUEmbeddingConfiguration.FromString(load_config(message).serialize()) == message
