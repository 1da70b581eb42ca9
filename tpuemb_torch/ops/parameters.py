"""The Load and Retrieve ops, one pair for each algorithm that has them in TensorFlow."""

from __future__ import annotations

import inspect
import re
from collections import namedtuple
from collections.abc import Callable
from typing import Any

from torch import Tensor

from tpuemb_torch.config import Config, Table
from tpuemb_torch.ops.system import check_config, current
from tpuemb_torch.optimizers import UpdateRule, rules
from tpuemb_torch.sharding.parameters import slot_names

_ADDRESS = [
    inspect.Parameter("num_shards", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=int),
    inspect.Parameter("shard_id", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=int),
    inspect.Parameter("table_id", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=-1, annotation=int),
    inspect.Parameter("table_name", inspect.Parameter.POSITIONAL_OR_KEYWORD, default="", annotation=str),
    inspect.Parameter("config", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=b"", annotation=bytes),
]


def snake_case(op_name: str) -> str:
    """The part of an op's name in snake_case: ADAM -> adam, ProximalYogi -> proximal_yogi, RMSProp -> rms_prop."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", op_name).lower()


def _addressed_table(rule: type[UpdateRule], table_id: int, table_name: str, config: bytes | Config) -> Table:
    """The table of a call: by number or name, with the op's algorithm."""
    if config:
        check_config(config)
    tables = current().config.tables
    if (table_id >= 0) == bool(table_name):
        raise ValueError(f"give either table_id or table_name, got table_id={table_id} and table_name={table_name!r}")
    if table_name:
        found = [table for table in tables if table.name == table_name]
        if not found:
            raise ValueError(f"table_name {table_name!r}: the config has {', '.join(table.name for table in tables)}")
        table = found[0]
    elif table_id < len(tables):
        table = tables[table_id]
    else:
        raise ValueError(f"table_id {table_id}: the config has {len(tables)} tables")
    if table.optimizer.algorithm != rule.algorithm:
        raise ValueError(
            f"table {table.name!r} has the optimizer {table.optimizer.algorithm}, not {rule.algorithm}: "
            "use its own load and retrieve ops"
        )
    return table


def _state_names(rule: type[UpdateRule]) -> list[str]:
    return ["parameters", *(slot.name for slot in rule.slots)]


def _load_op(rule: type[UpdateRule]) -> Callable[..., None]:
    names = _state_names(rule)
    inputs = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Tensor) for n in names]
    signature = inspect.Signature([*inputs, *_ADDRESS], return_annotation=None)

    def load(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        table = _addressed_table(rule, given["table_id"], given["table_name"], given["config"])
        state = {name: given[name] for name in slot_names(table)}
        current().load_parameters({table.name: state}, given["num_shards"], given["shard_id"])

    load.__doc__ = f"""Loads one shard of a table with the {rule.algorithm} optimizer.

    Args:
        {", ".join(names)}: float32 `[rows of the shard, dim]` each.
        num_shards, shard_id: the DIV or MOD shard (TensorFlow: number of hosts, and this one).
        table_id, table_name: the table; exactly one of the two.
        config: the serialized config, or empty.
    """
    return _named(load, f"load_tpu_embedding_{snake_case(str(rule.op_name))}_parameters", signature)


def _retrieve_op(rule: type[UpdateRule]) -> Callable[..., Any]:
    names = _state_names(rule)
    result = namedtuple(f"Retrieve{rule.op_name}Parameters", names)  # type: ignore[misc]
    returns: Any = Tensor if len(names) == 1 else result
    signature = inspect.Signature(_ADDRESS, return_annotation=returns)

    def retrieve(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        table = _addressed_table(rule, given["table_id"], given["table_name"], given["config"])
        state = current().retrieve_parameters([table.name], given["num_shards"], given["shard_id"])[table.name]
        return state["parameters"] if len(names) == 1 else result(**state)

    retrieve.__doc__ = f"""Retrieves one shard of a table with the {rule.algorithm} optimizer.

    Args:
        num_shards, shard_id: the DIV or MOD shard (TensorFlow: number of hosts, and this one).
        table_id, table_name: the table; exactly one of the two.
        config: the serialized config, or empty.

    Returns:
        {", ".join(names)}: float32 `[rows of the shard, dim]` each, as a named tuple if several.
    """
    return _named(retrieve, f"retrieve_tpu_embedding_{snake_case(str(rule.op_name))}_parameters", signature)


def _named(function: Callable[..., Any], name: str, signature: inspect.Signature) -> Callable[..., Any]:
    function.__name__ = function.__qualname__ = name
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


_OPS = {
    op.__name__: op
    for rule in rules().values()
    if rule.op_name is not None
    for op in (_load_op(rule), _retrieve_op(rule))
}
globals().update(_OPS)
__all__ = sorted(_OPS)
