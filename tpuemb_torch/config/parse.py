"""Reads a `TPUEmbeddingConfiguration` from a file, bytes, text or another message."""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

from google.protobuf import json_format, text_format
from google.protobuf.message import DecodeError, Message

from tpuemb_torch.config import unknown, wire
from tpuemb_torch.config.errors import ConfigError
from tpuemb_torch.protos import tpu_embedding_configuration_pb2 as configuration_pb2

Format = Literal["binary", "text", "json", "yaml"]
Proto = configuration_pb2.TPUEmbeddingConfiguration
Source = str | bytes | bytearray | memoryview | os.PathLike[str] | Message

#: Format of a file by its ending.
ENDINGS: Mapping[str, Format] = {
    ".pb": "binary",
    ".binpb": "binary",
    ".pbtxt": "text",
    ".textproto": "text",
    ".txtpb": "text",
    ".json": "json",
    ".yaml": "yaml",
    ".yml": "yaml",
}

#: How text, JSON and YAML carry fields that the proto does not know; see `tpuemb_torch.config.unknown`.
UNKNOWN_KEY = "@unknown_fields"
_UNKNOWN_COMMENT = re.compile(rf"^# {UNKNOWN_KEY} *(\S*): (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Parsed:
    """A message and the exact bytes that it came from, or would be written to."""

    proto: Proto
    data: bytes


def parse(source: Source, format: Format | None = None) -> Parsed:
    """Returns the message of any source that `load_config` takes.

    Raises:
        ConfigError: if there is no such file, or the contents are not the message.
        TypeError: if the source is of none of these types.
        ValueError: if the format has no such name.
    """
    if format is not None and format not in get_args(Format):
        raise ValueError(f"format={format!r} is unknown; use one of {', '.join(get_args(Format))}")
    if isinstance(source, Message):
        return _from_message(source)
    if isinstance(source, (bytes, bytearray, memoryview)):
        return _from_content(bytes(source), format or "binary", "bytes")
    if isinstance(source, str) and not _is_path(source, named_format=format is not None):
        return _from_content(source.encode("utf-8", "surrogatepass"), format or _format_of_text(source), "text")
    if isinstance(source, (str, os.PathLike)):
        path = os.fspath(source)
        return _from_content(_read(path), format or format_of_path(path), path)
    raise TypeError(f"cannot load a configuration from {type(source).__name__}; pass a path, bytes, str or a message")


def format_of_path(path: str | os.PathLike[str]) -> Format:
    """Returns the format that a file's ending stands for.

    Raises:
        ConfigError: if it stands for none.
    """
    ending = Path(path).suffix.lower()
    if ending not in ENDINGS:
        known = " ".join(ENDINGS)
        raise ConfigError(os.fspath(path), f"unknown file ending {ending!r}; use one of {known}, or pass format=")
    return ENDINGS[ending]


def _is_path(source: str, *, named_format: bool) -> bool:
    """Whether a str names a file; if not, it is the configuration itself."""
    if "\n" in source or "\0" in source:
        return False
    if os.path.exists(source) or Path(source).suffix.lower() in ENDINGS:
        return True
    # No text proto with contents is without a colon or a brace.
    return bool(source.strip()) and not (":" in source or "{" in source) and not (named_format and source[:1] in "[{")


def _format_of_text(text: str) -> Format:
    return "json" if text.lstrip()[:1] == "{" else "text"  # a text proto cannot begin with a brace


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        raise ConfigError(path, "no such file (and, if it was meant as a text proto, not one)") from None
    except (OSError, ValueError) as error:
        raise ConfigError(path, f"cannot be read: {error}") from error


def _from_message(message: Message) -> Parsed:
    name = message.DESCRIPTOR.full_name
    if name.rpartition(".")[2] != "TPUEmbeddingConfiguration":
        raise ConfigError(
            name, "is the wrong message; pass a TPUEmbeddingConfiguration (TensorFlow's or this package's)"
        )
    return _from_binary(message.SerializeToString(deterministic=True), name)


def _from_content(data: bytes, format: Format, name: str) -> Parsed:
    if not data.strip():
        raise ConfigError(name, "is empty; a configuration has at least one table")
    if format == "binary":
        return _from_binary(data, name)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: byte {error.start}", "is not UTF-8 text") from None
    try:
        proto = _from_text(text, name) if format == "text" else _from_mapping(_load(text, format, name), name)
        return Parsed(proto, proto.SerializeToString(deterministic=True))
    except RecursionError:
        raise ConfigError(name, "is nested too deeply") from None
    except ConfigError:
        raise
    except Exception as error:  # protobuf's EncodeError, for one: nested deeper than a message may be
        raise ConfigError(name, f"cannot be converted to a proto: {error}") from error


def _from_binary(data: bytes, name: str) -> Parsed:
    try:
        return Parsed(Proto.FromString(data), data)
    except DecodeError as error:
        damage = wire.find_damage(data, Proto.DESCRIPTOR)
        if damage is None:
            raise ConfigError(name, f"is not a serialized TPUEmbeddingConfiguration: {error}") from None
        hint = ""
        if all(byte in b"\t\n\r" or 32 <= byte < 127 for byte in data[:64]):
            hint = "; the contents look like text: pass a str, or format= 'text', 'json' or 'yaml'"
        raise ConfigError(
            damage.path or name,
            f"{name + ' ' if damage.path else ''}is not a serialized TPUEmbeddingConfiguration, or is damaged or cut "
            f"off: at byte {damage.offset} of {len(data)}, {damage.reason}{hint}",
        ) from None


def _from_text(text: str, name: str) -> Proto:
    proto = Proto()
    try:
        text_format.Parse(text, proto)
    except text_format.ParseError as error:
        line, column = error.GetLine(), error.GetColumn()
        message = str(error).removeprefix(f"{line}:{column} : ")
        raise ConfigError(f"{name}: line {line}, column {column}", f"is not a valid text proto: {message}") from None
    for path, encoded in _UNKNOWN_COMMENT.findall(text):
        _restore(proto, path, encoded)
    return proto


def _load(text: str, format: Format, name: str) -> Any:
    if format == "yaml":
        from tpuemb_torch.config.yaml_format import load

        return load(text, name)
    try:
        return json.loads(text, object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{name}: line {error.lineno}, column {error.colno}", f"is not JSON: {error.msg}") from None
    except KeyError as error:
        raise ConfigError(name, f"has the key {error.args[0]!r} twice in one object") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        raise KeyError(next(key for key in keys if keys.count(key) > 1))
    return result


def _from_mapping(value: Any, name: str) -> Proto:
    if not isinstance(value, dict):
        raise ConfigError(name, f"holds a {type(value).__name__}; expected a mapping such as mode: TRAINING")
    records = value.get(UNKNOWN_KEY, {})
    value = {key: item for key, item in value.items() if key != UNKNOWN_KEY}
    proto = Proto()
    try:
        json_format.ParseDict(value, proto)
    except (json_format.ParseError, TypeError, AttributeError, ValueError) as error:
        _raise_deepest(value, Proto.DESCRIPTOR, "", _short(error), name)
    if not isinstance(records, dict):
        raise ConfigError(UNKNOWN_KEY, "must be a mapping of message paths to base64 strings")
    for path, encoded in records.items():
        _restore(proto, str(path), encoded)
    return proto


def _raise_deepest(value: Any, descriptor: Any, path: str, message: str, name: str) -> NoReturn:
    """Raises for the smallest part of `value` that does not parse: protobuf names it only in part of its messages."""
    if isinstance(value, dict):
        from google.protobuf.message_factory import GetMessageClass

        fields = {alias: f for f in descriptor.fields for alias in (f.name, f.json_name)}
        for key, item in value.items():
            try:
                json_format.ParseDict({key: item}, GetMessageClass(descriptor)())
            except (json_format.ParseError, TypeError, AttributeError, ValueError) as error:
                message = _short(error)
            else:
                continue
            field = fields.get(key) if isinstance(key, str) else None
            where = f"{path}.{key}" if path else str(key)
            if field is None:
                known = ", ".join(sorted(f.name for f in descriptor.fields))
                raise ConfigError(where, f"no such field in {name}; the fields here are {known}")
            if field.message_type is None or field.message_type.GetOptions().map_entry:
                raise ConfigError(where, f"{item!r} is not valid in {name}: {message}")
            if not wire.is_repeated(field):
                _raise_deepest(item, field.message_type, where, message, name)
            if isinstance(item, list):
                for index, element in enumerate(item):
                    try:
                        json_format.ParseDict({key: [element]}, GetMessageClass(descriptor)())
                    except (json_format.ParseError, TypeError, AttributeError, ValueError) as error:
                        _raise_deepest(element, field.message_type, f"{where}[{index}]", _short(error), name)
            raise ConfigError(where, f"is not valid in {name}: {message}")
    raise ConfigError(path or name, f"is not valid in {name}: {message}")


def _short(error: Exception) -> str:
    """The innermost of protobuf's nested messages, without the part that repeats the path."""
    message = str(error).partition("\n")[0].rpartition(" field: ")[2]
    return re.sub(r'( at "?TPUEmbeddingConfiguration[^ ]*)?\.*$', "", message)


def _restore(proto: Proto, path: str, encoded: Any) -> None:
    try:
        data = base64.b64decode(encoded, validate=True)
        unknown.restore(proto, path, data)
    except (binascii.Error, ValueError, TypeError, DecodeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(path or UNKNOWN_KEY, f"the record of unknown fields is damaged: {error}") from None
