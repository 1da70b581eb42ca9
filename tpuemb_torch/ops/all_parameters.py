"""LoadAll and RetrieveAll: all tables at once, whatever their optimizers; for some these are the only ops."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tpuemb_torch.config import Config, Table
from tpuemb_torch.ops.system import check_config, current
from tpuemb_torch.sharding.exchange import raise_together
from tpuemb_torch.sharding.parameters import slot_names
from tpuemb_torch.sharding.placement import shard_rows

Serialized = bytes | Config

#: The inputs of LoadAll and the outputs of RetrieveAll: a list with one tensor per table each.
_NAMES = ("parameters", *(f"auxiliary{i}" for i in range(1, 8)))
RetrieveAllParameters = namedtuple("RetrieveAllParameters", _NAMES)  # type: ignore[misc]

#: The slot in which a TPU sums the gradients of a step, last in the state of a table that accumulates.
_ACCUMULATORS = "gradient_accumulators"


def load_all_tpu_embedding_parameters(
    parameters: Sequence[Tensor],
    auxiliary1: Sequence[Tensor],
    auxiliary2: Sequence[Tensor],
    auxiliary3: Sequence[Tensor],
    auxiliary4: Sequence[Tensor],
    auxiliary5: Sequence[Tensor],
    auxiliary6: Sequence[Tensor],
    auxiliary7: Sequence[Tensor],
    config: Serialized,
    num_shards: int,
    shard_id: int,
) -> None:
    """Loads one shard of all tables.

    Args:
        parameters: per table, float32 `[rows of the shard, dim]`.
        auxiliary1: per table, its first slot variable, of the same shape; without elements (`[0, 0]`) for a table that
            has none.  The slots are those of the optimizer in their order, then, unless gradient accumulation is
            DISABLED, `gradient_accumulators`.  The values of the latter are not used: nothing is pending between steps.
        auxiliary2: the second, and so on.
        auxiliary3: see above.
        auxiliary4: see above.
        auxiliary5: see above.
        auxiliary6: see above.
        auxiliary7: see above.
        config: the serialized config, equal to the installed one.
        num_shards: into how many DIV or MOD shards the tables are cut (TensorFlow: number of hosts).
        shard_id: which of them this is.

    Raises:
        ValueError, TypeError: naming table, slot and shapes; no table changes then.
    """
    check_config(config)
    given = (parameters, auxiliary1, auxiliary2, auxiliary3, auxiliary4, auxiliary5, auxiliary6, auxiliary7)
    embedding = current()
    state: dict[str, dict[str, Tensor]] = {}
    error: Exception | None = None
    try:
        state = _checked(embedding.config, given, num_shards, shard_id)
    except (ValueError, TypeError) as problem:
        error = problem
    raise_together(error, embedding.collection.process_group)
    embedding.load_parameters(state, num_shards, shard_id)


def retrieve_all_tpu_embedding_parameters(
    NumTables: int,  # noqa: N803 (TensorFlow's name)
    config: Serialized,
    num_shards: int,
    shard_id: int,
) -> Any:
    """Retrieves one shard of all tables.

    Args:
        NumTables: number of tables of the config.
        config: the serialized config, equal to the installed one.
        num_shards: into how many DIV or MOD shards the tables are cut (TensorFlow: number of hosts).
        shard_id: which of them to return.

    Returns:
        A named tuple (parameters, auxiliary1, ..., auxiliary7) of lists with a tensor per table: float32
        `[rows of the shard, dim]` for slots that the table has, `[0, 0]` for others.  Every element of
        `gradient_accumulators` is the float32 with the bits 1: nothing is pending (TensorFlow's
        tensorflow/core/tpu/tpu_embedding_optimization_parameters_utils.h).

    Raises:
        ValueError: for a wrong number of tables, or a shard that there is not.
    """
    check_config(config)
    embedding = current()
    tables = embedding.config.tables
    if NumTables != len(tables):
        raise ValueError(f"NumTables is {NumTables}, but the config has {len(tables)} tables")
    retrieved = embedding.retrieve_parameters(None, num_shards, shard_id)
    outputs: list[list[Tensor]] = [[] for _ in _NAMES]
    for table in tables:
        state = retrieved[table.name]
        # Through int32: as a float32 it would be a subnormal number, which a processor may flush to 0.
        pending = torch.ones_like(state["parameters"], dtype=torch.int32).view(torch.float32)
        values = [pending if name == _ACCUMULATORS else state[name] for name in _state_names(table)]
        unused = [torch.empty(0, 0) for _ in range(len(_NAMES) - len(values))]
        for output, value in zip(outputs, values + unused, strict=True):
            output.append(value)
    return RetrieveAllParameters(*outputs)


def _state_names(table: Table) -> list[str]:
    """The slots of the Load and Retrieve ops, in order; at most eight, which the config's validation sees to."""
    hidden = [_ACCUMULATORS] if table.optimizer.accumulates else []
    return [*slot_names(table), *hidden]


def _checked(
    config: Config, given: Sequence[Sequence[Tensor]], num_shards: int, shard_id: int
) -> dict[str, dict[str, Tensor]]:
    """The given tensors by table and slot."""
    for name, tensors in zip(_NAMES, given, strict=True):
        if isinstance(tensors, Tensor) or len(tensors) != len(config.tables):
            count = "a tensor" if isinstance(tensors, Tensor) else f"{len(tensors)} tensors"
            raise ValueError(
                f"{name}: {count} given, but the config has {len(config.tables)} tables: give a list with one each"
            )
    state: dict[str, dict[str, Tensor]] = {}
    for index, table in enumerate(config.tables):
        names = _state_names(table)
        rows = len(shard_rows(table.vocabulary_size, num_shards, shard_id, config.sharding_strategy))
        state[table.name] = {}
        for number, (argument, tensors) in enumerate(zip(_NAMES, given, strict=True)):
            value = torch.as_tensor(tensors[index])
            if number >= len(names):
                _check_unused(value, argument, table, names)
                continue
            _check_used(value, argument, names[number], table, rows)
            if names[number] != _ACCUMULATORS:
                state[table.name][names[number]] = value
    return state


def _check_used(value: Tensor, argument: str, slot: str, table: Table, rows: int) -> None:
    where = f"{argument}, table {table.name!r} ({table.optimizer.algorithm})"
    if value.dtype != torch.float32:
        raise TypeError(f"{where}: {slot} must be float32, got {value.dtype}")
    if tuple(value.shape) != (rows, table.dimension):
        raise ValueError(
            f"{where}: {slot} has shape {list(value.shape)}, but the shard has [{rows}, {table.dimension}]"
        )


def _check_unused(value: Tensor, argument: str, table: Table, names: Sequence[str]) -> None:
    if value.numel() != 0:
        raise ValueError(
            f"{argument}, table {table.name!r} ({table.optimizer.algorithm}): the optimizer has no such slot (it has "
            f"{', '.join(names)}), but the tensor has shape {list(value.shape)}: give one without elements, [0, 0]"
        )
