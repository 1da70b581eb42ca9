"""Fields that the protos do not know, as (path of the message, bytes): how text formats carry them.

Binary protos keep unknown fields by themselves.  Text, JSON and YAML have no place for them, so the writer puts them
beside the message, and the reader puts them back.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from tpuemb_torch.config.errors import ConfigError
from tpuemb_torch.config.wire import is_repeated

_STEP = re.compile(r"(\w+)(?:\[(-?\d+)\])?")


def unknown_fields(message: Message) -> Iterator[tuple[str, bytes]]:
    """Yields the path ("" for the message itself) and the encoded unknown fields of each message that has some."""
    for path, part in _messages(message, ""):
        encoded = _encode(_fields(part))
        if encoded:
            yield path, encoded


def unknown_numbers(message: Message) -> set[int]:
    """Returns the numbers of the unknown fields of a message, without those of the messages in it."""
    return {field.field_number for field in _fields(message)}


def mistyped_fields(message: Message) -> Iterator[str]:
    """Yields the path of each field that only became unknown because its wire type is not the declared one."""
    for path, part in _messages(message, ""):
        known = part.DESCRIPTOR.fields_by_number
        for number in sorted(unknown_numbers(part).intersection(known.keys())):
            yield f"{path}.{known[number].name}" if path else known[number].name


def _fields(message: Message) -> Iterable[Any]:
    fields: Any = UnknownFieldSet(message)  # the type stubs know no iteration
    return fields


def _messages(message: Message, path: str) -> Iterator[tuple[str, Message]]:
    """Yields a message and all messages in it, each with its path."""
    yield path, message
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        name = f"{path}.{field.name}" if path else field.name
        if not is_repeated(field):
            yield from _messages(value, name)
        elif not field.message_type.GetOptions().map_entry:
            for index, element in enumerate(value):
                yield from _messages(element, f"{name}[{index}]")
        elif field.message_type.fields_by_name["value"].message_type is not None:
            for key in sorted(value):
                yield from _messages(value[key], f"{name}[{key}]")


def restore(message: Message, path: str, encoded: bytes) -> None:
    """Puts back the unknown fields that `unknown_fields` gave.

    Raises:
        ConfigError: if the message has no such path.
    """
    target: Any = message
    for step in path.split(".") if path else ():
        target = _descend(target, step, path)
    target.MergeFromString(encoded)


def _descend(message: Message, step: str, path: str) -> Any:
    match = _STEP.fullmatch(step)
    field = message.DESCRIPTOR.fields_by_name.get(match[1]) if match else None
    if match is None or field is None or field.message_type is None or is_repeated(field) != bool(match[2]):
        raise ConfigError(path, "a record of unknown fields names this message, but there is no such path")
    value = getattr(message, field.name)
    if not is_repeated(field):
        return value
    key = int(match[2])
    if key not in (value if isinstance(value, Mapping) else range(len(value))):
        raise ConfigError(path, "a record of unknown fields names this message, but it is missing; remove the record")
    return value[key]


def _encode(fields: Iterable[Any]) -> bytes:
    parts = []
    for field in fields:
        number, wire_type, data = field.field_number, field.wire_type, field.data
        parts.append(_varint(number << 3 | wire_type))
        if wire_type == 0:
            parts.append(_varint(data))
        elif wire_type == 1:
            parts.append(struct.pack("<Q", data))
        elif wire_type == 2:
            parts.append(_varint(len(data)) + data)
        elif wire_type == 3:
            parts.append(_encode(data) + _varint(number << 3 | 4))
        elif wire_type == 5:
            parts.append(struct.pack("<I", data))
    return b"".join(parts)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    value &= (1 << 64) - 1
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
