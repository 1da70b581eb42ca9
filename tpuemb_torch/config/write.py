"""Writes a configuration back, without loss, in each of the formats that can be read."""

from __future__ import annotations

import base64
import json
import os
import tempfile
from math import copysign
from pathlib import Path
from typing import Any

from google.protobuf import json_format, text_format
from google.protobuf.message import Message

from tpuemb_torch.config.errors import ConfigError
from tpuemb_torch.config.parse import UNKNOWN_KEY, Format, Proto, format_of_path, parse
from tpuemb_torch.config.schema import Config
from tpuemb_torch.config.unknown import unknown_fields

_LARGEST_FLOAT32 = 3.4028234663852886e38


def to_text(proto: Message) -> str:
    """Returns protobuf text; TensorFlow reads it, too.

    Fields that the proto does not know follow as comments, which `load_config` reads back.
    """
    text = text_format.MessageToString(proto)
    records = "".join(f"# {UNKNOWN_KEY} {path}: {encoded}\n" for path, encoded in _records(proto).items())
    return _checked(text + records, "text", proto)


def to_json(proto: Message) -> str:
    """Returns protobuf's JSON mapping with proto field names, indented.

    Fields that the proto does not know are under the key "@unknown_fields".
    """
    return _checked(json.dumps(to_mapping(proto), indent=2, ensure_ascii=False) + "\n", "json", proto)


def to_yaml(proto: Message) -> str:
    """Returns the same mapping as YAML."""
    from tpuemb_torch.config.yaml_format import dump

    return _checked(dump(to_mapping(proto)), "yaml", proto)


def save_config(config: Config | Message, path: str | os.PathLike[str], *, format: Format | None = None) -> None:
    """Writes a configuration to a file, in the format of its ending unless `format` is given.

    The file appears whole or not at all: it is written beside its place and then renamed.

    Raises:
        ConfigError: if the ending stands for no format, or the format cannot hold the contents without loss.
        OSError: if the file cannot be written.
    """
    format = format or format_of_path(path)
    if format == "binary":
        data = config.serialize() if isinstance(config, Config) else config.SerializeToString(deterministic=True)
    else:
        proto = config.to_proto() if isinstance(config, Config) else config
        data = {"text": to_text, "json": to_json, "yaml": to_yaml}[format](proto).encode()
    write_atomically(Path(path), data)


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a file beside its place and renames it, so that it appears whole or not at all."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # mkstemp's files are for their owner alone
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def to_mapping(proto: Message) -> dict[str, Any]:
    """Returns protobuf's JSON mapping with proto field names, and unknown fields under the key "@unknown_fields"."""
    mapping = _readable(json_format.MessageToDict(proto, preserving_proto_field_name=True))
    records = _records(proto)
    return {**mapping, UNKNOWN_KEY: records} if records else mapping


def _readable(value: Any) -> Any:
    """Replaces the shortest decimal of the largest float32, which is out of range for protobuf's own JSON parser."""
    if isinstance(value, dict):
        return {key: _readable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_readable(item) for item in value]
    if isinstance(value, float) and abs(value) == 3.4028235e38:
        return copysign(_LARGEST_FLOAT32, value)
    return value


def _records(proto: Message) -> dict[str, str]:
    return {path: base64.b64encode(data).decode() for path, data in unknown_fields(proto)}


def _checked(text: str, format: Format, proto: Message) -> str:
    """Returns `text` if reading it gives `proto` again, bit by bit (a NaN's payload, for one, has no text)."""
    expected = Proto.FromString(proto.SerializeToString()).SerializeToString(deterministic=True)
    if parse(text, format).data != expected:
        raise ConfigError(format, "this format cannot hold the configuration without loss; use a binary proto (.pb)")
    return text
