"""Finds the place where bytes stop being a protocol buffer; protobuf itself says only that they do.

Source of the encoding: https://protobuf.dev/programming-guides/encoding/.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

_VARINT, _FIXED64, _LENGTH, _START_GROUP, _END_GROUP, _FIXED32 = range(6)
_FIXED_SIZES = {
    FieldDescriptor.TYPE_FLOAT: 4,
    FieldDescriptor.TYPE_FIXED32: 4,
    FieldDescriptor.TYPE_SFIXED32: 4,
    FieldDescriptor.TYPE_DOUBLE: 8,
    FieldDescriptor.TYPE_FIXED64: 8,
    FieldDescriptor.TYPE_SFIXED64: 8,
}
_MAX_DEPTH = 100  # protobuf's own limit


def is_repeated(field: Any) -> bool:
    """Whether a field is repeated or a map; protobuf 7 dropped `label`, protobuf 5 does not have `is_repeated`."""
    repeated: bool | None = getattr(field, "is_repeated", None)
    return bool(field.label == 3) if repeated is None else repeated


@dataclass(frozen=True)
class Damage:
    """Where and why decoding stops."""

    path: str
    offset: int
    reason: str


class _Stop(Exception):  # noqa: N818 (a signal, not an error)
    def __init__(self, path: str, offset: int, reason: str) -> None:
        self.damage = Damage(path, offset, reason)


def find_damage(data: bytes, descriptor: Any) -> Damage | None:
    """Returns the first place in `data` that cannot be decoded as a message, None if there is none."""
    try:
        _message(data, 0, len(data), descriptor, "", 0)
    except _Stop as stop:
        return stop.damage
    return None


def _message(data: bytes, position: int, end: int, descriptor: Any, path: str, depth: int) -> None:
    if depth > _MAX_DEPTH:
        shortened = ".".join(path.split(".")[:8]) + "..."
        raise _Stop(shortened, position, f"messages are nested more than {_MAX_DEPTH} deep")
    seen: Counter[int] = Counter()
    groups: list[int] = []
    while position < end:
        start = position
        tag, position = _varint(data, position, end, path)
        number, wire_type = tag >> 3, tag & 7
        field = descriptor.fields_by_number.get(number) if descriptor is not None and not groups else None
        where = path if field is None else _join(path, field, seen[number])
        seen[number] += 1
        if not 0 < number < 1 << 29:
            raise _Stop(path, start, f"field number {number} is impossible")
        if wire_type == _VARINT:
            _, position = _varint(data, position, end, where)
        elif wire_type in (_FIXED32, _FIXED64):
            position += 4 if wire_type == _FIXED32 else 8
            if position > end:
                raise _Stop(where, start, f"the bytes end inside field {number}")
        elif wire_type == _LENGTH:
            length, position = _varint(data, position, end, where)
            if position + length > end:
                raise _Stop(where, start, f"field {number} has {length} bytes, but only {end - position} are left")
            _contents(data, position, position + length, field, where, depth)
            position += length
        elif wire_type == _START_GROUP:
            groups.append(number)
        elif wire_type == _END_GROUP:
            if not groups or groups.pop() != number:
                raise _Stop(path, start, f"the end of a group (field {number}) that never began")
        else:
            raise _Stop(path, start, f"wire type {wire_type} does not exist")
    if groups:
        raise _Stop(path, end, f"the bytes end inside a group (field {groups[-1]})")


def _contents(data: bytes, start: int, end: int, field: Any, path: str, depth: int) -> None:
    if field is None:
        return
    if field.message_type is not None:
        _message(data, start, end, field.message_type, path, depth + 1)
    elif field.type == FieldDescriptor.TYPE_STRING:
        try:
            data[start:end].decode()
        except UnicodeDecodeError as error:
            raise _Stop(path, start + error.start, "the string is not UTF-8") from None
    elif is_repeated(field) and field.type in _FIXED_SIZES:
        if (end - start) % _FIXED_SIZES[field.type]:
            raise _Stop(path, start, f"{end - start} bytes are no whole number of values")
    elif is_repeated(field) and field.type != FieldDescriptor.TYPE_BYTES:  # packed numbers
        while start < end:
            _, start = _varint(data, start, end, path)


def _varint(data: bytes, position: int, end: int, path: str) -> tuple[int, int]:
    value, start = 0, position
    for shift in range(0, 70, 7):
        if position >= end:
            raise _Stop(path, start, "the bytes end inside a number")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise _Stop(path, start, "a number is longer than 10 bytes")


def _join(path: str, field: Any, index: int) -> str:
    name = f"{field.name}[{index}]" if is_repeated(field) else field.name
    return f"{path}.{name}" if path else name
