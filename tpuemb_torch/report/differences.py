"""What differs between two configurations, field by field."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tpuemb_torch.config import Config
from tpuemb_torch.config.write import to_mapping

_PROGRAM = "user_defined_program"


@dataclass(frozen=True)
class Difference:
    """A field that differs: its path, and its values in JSON's terms; None where it is not set."""

    field: str
    a: Any
    b: Any


def differences(a: Config, b: Config) -> list[Difference]:
    """Returns the fields in which two configurations differ, as they were written, in the order of the proto.

    Tables and features are matched by name (features without one by place), so that one more table is one difference;
    a feature's table is compared by name, and another order of tables or features is a difference of its own.
    """
    return list(_fields("", _named(a), _named(b)))


def mean_the_same(a: Config, b: Config) -> bool:
    """Whether two configurations are equal in every value that is used, whether it is written or a default."""
    return replace(a, _proto=b"") == replace(b, _proto=b"")


def _named(config: Config) -> dict[str, Any]:
    """A configuration's fields, with tables and features by name."""
    mapping = to_mapping(config.to_proto())
    for place, table in enumerate(mapping.get("table_descriptor", [])):
        program = config.tables[place].optimizer.program
        if program is not None:
            table["optimization_parameters"][_PROGRAM] = _program(program)
    for feature in mapping.get("feature_descriptor", []):
        feature["table"] = config.tables[feature.pop("table_id", 0)].name
    named: dict[str, Any] = {}
    for key, value in mapping.items():
        if key in ("table_descriptor", "feature_descriptor"):
            entries = {entry.get("name") or place: entry for place, entry in enumerate(value)}
            named[f"order of {key}"] = list(entries)
            named[key] = _Entries(entries)
        else:
            named[key] = value
    return named


class _Entries(dict[Any, Any]):
    """Tables or features by name."""


def _program(program: bytes) -> list[str]:
    """A program as its formula; as its size and digest where that is not all of it, or torch is missing."""
    from hashlib import sha256

    digest = f"{len(program):,} bytes, sha256 {sha256(program).hexdigest()[:16]}"
    try:
        from tpuemb_torch.report.program import program_formula

        return [*program_formula(program), digest]
    except (ValueError, ImportError):
        return [digest]


def _fields(path: str, a: Any, b: Any) -> Iterator[Difference]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in [*a, *(key for key in b if key not in a)]:
            if isinstance(a, _Entries):
                where = f"{path}[{key!r}]"
            else:
                where = f"{path}.{key}" if path else str(key)
            if str(key).startswith("order of "):
                yield from _order(str(key), a.get(key, []), b.get(key, []))
            else:
                yield from _fields(where, a.get(key), b.get(key))
    elif isinstance(a, _Entries) or isinstance(b, _Entries):
        yield from _fields(path, _Entries() if a is None else a, _Entries() if b is None else b)
    elif a != b:
        yield Difference(path, a, b)


def _order(field: str, a: list[Any], b: list[Any]) -> Iterator[Difference]:
    """Of the names that both have."""
    common = set(a) & set(b)
    first, second = ([name for name in names if name in common] for names in (a, b))
    if first != second:
        yield Difference(field, first, second)
