"""YAML as this package reads and writes it: the JSON mapping of the proto, with proto field names."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml

from tpuemb_torch.config.errors import ConfigError

_MAX_NODES = 5_000_000  # a few lines of aliases can stand for more nodes than memory holds


_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_SafeDumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _Loader(_SafeLoader):
    """A safe loader that rejects a key given twice instead of using the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key is not None and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return mapping


def load(text: str, name: str) -> Any:
    """Returns the value of a YAML document.

    Raises:
        ConfigError: if it is not YAML, or its aliases are circular or expand without measure.
    """
    try:
        value = yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}: line {mark.line + 1}, column {mark.column + 1}" if mark else name
        raise ConfigError(where, f"is not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(name, f"is not valid YAML: {error}") from None
    if _size(value, {}) > _MAX_NODES:
        raise ConfigError(name, f"the YAML aliases expand to more than {_MAX_NODES:,} values")
    return value


def dump(value: Any) -> str:
    """Returns the YAML of a value, in the order of its keys."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text


class _Dumper(_SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _size(value: Any, known: dict[int, int]) -> int:
    """Number of values, with every alias counted each time; a circular alias counts as infinitely many."""
    if not isinstance(value, (dict, list)):
        return 1
    if id(value) not in known:
        known[id(value)] = _MAX_NODES + 1  # what a circular alias finds
        known[id(value)] = 1 + sum(_size(v, known) for v in (value.values() if isinstance(value, dict) else value))
    return known[id(value)]
