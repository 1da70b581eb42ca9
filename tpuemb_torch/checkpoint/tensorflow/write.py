"""`write_tensorflow`: tables as a checkpoint that TensorFlow restores."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from tpuemb_torch.checkpoint.errors import CheckpointError
from tpuemb_torch.checkpoint.tensorflow.bundle_writer import BundleWriter
from tpuemb_torch.checkpoint.tensorflow.entries import DTYPES
from tpuemb_torch.checkpoint.tensorflow.object_graph import OBJECT_GRAPH, VARIABLE_VALUE
from tpuemb_torch.checkpoint.tensorflow.slot_names import v1_ends
from tpuemb_torch.config import Config
from tpuemb_torch.protos import tensorflow_checkpoint_pb2 as pb
from tpuemb_torch.sharding.progress import bytes_bar

Form = Literal["object", "name"]
#: A tensor, or a function that makes it when its turn to be written comes.
Value = Tensor | Callable[[], Tensor]
_ROOT = "embedding"
#: The number of saves, which tf.train.Checkpoint.restore asks for.
_SAVE_COUNTER = f"save_counter/.ATTRIBUTES/{VARIABLE_VALUE}"


def write_tensorflow(
    prefix: str | os.PathLike[str],
    tables: Mapping[str, Mapping[str, Value]],
    form: Form = "object",
    *,
    config: Config | None = None,
    num_hosts: int = 1,
    sharding_strategy: Literal["div", "mod"] = "div",
    progress: Callable[[int], object] | None = None,
) -> list[Path]:
    """Writes a checkpoint that TensorFlow restores, without TensorFlow.  In a job of several ranks, call it on one.

    The object form restores into `tf.train.Checkpoint(embedding=layer)` with a `TPUEmbedding` or
    `TPUEmbeddingForServing` of the same table names, under any number of hosts.  The name form has the variables of the
    v1 layer (`user`, `user/Adagrad`), for the v1 Saver and TPUEstimator.

    Args:
        prefix: the checkpoint, as TensorFlow names it; a checkpoint of that prefix is replaced, whole.
        tables: by table, then "parameters" and the slots by the names of the Load and Retrieve ops: tensors
            `[rows, dimension]` of one shape a table, or functions that return them, called one at a time.
        form: "object" or "name".
        config: for the name form, the config with the tables' optimizers, by which slots are named.  Without it, slots
            {accumulators} are Adagrad's and {momenta} Momentum's.
        num_hosts: for the name form under MOD sharding, the number of hosts that will restore it.
        sharding_strategy: for the name form; a checkpoint for MOD sharding has the rows in the order of the hosts, in
            one slice a host.
        progress: called with numbers of bytes as they are written, instead of the progress bar on terminals.

    Returns:
        The files.

    Raises:
        CheckpointError: if the tables are none that TensorFlow could hold, or cannot be written.  What was there before
            stays as it was.
    """
    if form not in ("object", "name"):
        raise CheckpointError(f"form must be 'object' or 'name', got {form!r}")
    if sharding_strategy not in ("div", "mod") or num_hosts < 1:
        raise CheckpointError(f"sharding_strategy {sharding_strategy!r} over {num_hosts} hosts is neither DIV nor MOD")
    _check_tables(tables)
    given = [value for slots in tables.values() for value in slots.values()]
    total = sum(value.nbytes for value in given if isinstance(value, Tensor))
    with bytes_bar(f"writing {prefix}", total) as bar, BundleWriter(prefix, progress or bar.update) as writer:
        if form == "object":
            keys = _object_keys(tables)
            writer.add_string(OBJECT_GRAPH, _object_graph(tables, keys).SerializeToString())
            writer.add(_SAVE_COUNTER, torch.tensor(1))
        else:
            keys = _variable_names(tables, config)
        hosts = num_hosts if form == "name" and sharding_strategy == "mod" else 1
        for table, slots in tables.items():
            shape: torch.Size | None = None
            for slot in slots:
                value = _value(table, slot, slots[slot], shape)
                shape = value.shape
                n = min(hosts, shape[0])
                parts = [len(range(host, shape[0], n)) for host in range(n)] if n > 1 else []
                if parts:
                    value = torch.cat([value[host::n] for host in range(n)])
                writer.add(keys[table][slot], value, parts)
                del value  # before the next one takes memory
    return writer.files


def _check_tables(tables: Mapping[str, Mapping[str, Value]]) -> None:
    if not tables:
        raise CheckpointError("there are no tables to write")
    for name, slots in tables.items():
        if "parameters" not in slots:
            raise CheckpointError(f"table {name!r} has no parameters, only {', '.join(slots) or 'nothing'}")


def _value(table: str, slot: str, given: Value, shape: torch.Size | None) -> Tensor:
    value = given() if callable(given) else torch.as_tensor(given)
    if value.dim() != 2 or value.dtype not in DTYPES.values():
        raise CheckpointError(
            f"table {table!r}, {slot}: must be [rows, dimension] of floats, got {list(value.shape)} {value.dtype}"
        )
    if shape is not None and value.shape != shape:
        raise CheckpointError(f"table {table!r}, {slot}: has shape {list(value.shape)}, expected {list(shape)}")
    return value


def _variable_names(tables: Mapping[str, Mapping[str, Value]], config: Config | None) -> dict[str, dict[str, str]]:
    algorithms = {} if config is None else {table.name: table.optimizer.algorithm for table in config.tables}
    names: dict[str, dict[str, str]] = {}
    for table, slots in tables.items():
        ends = v1_ends([slot for slot in slots if slot != "parameters"], algorithms.get(table))
        names[table] = {slot: table if slot == "parameters" else f"{table}/{ends[slot]}" for slot in slots}
    _check_distinct(names)
    return names


def _object_keys(tables: Mapping[str, Mapping[str, Value]]) -> dict[str, dict[str, str]]:
    """Checkpoint keys: the path in the object graph, escaped (tensorflow/python/checkpoint/util.py)."""
    names = {table: {slot: _local_name(table, slot) for slot in slots} for table, slots in tables.items()}
    _check_distinct(names)
    return {
        table: {
            slot: f"{_ROOT}/{name.replace('.', '..').replace('/', '.S')}/.ATTRIBUTES/{VARIABLE_VALUE}"
            for slot, name in slots.items()
        }
        for table, slots in names.items()
    }


def _local_name(table: str, slot: str) -> str:
    return table if slot == "parameters" else f"{table}/{slot}"


def _check_distinct(names: Mapping[str, Mapping[str, str]]) -> None:
    owners: dict[str, str] = {"_variables": "the dict of all tables"}
    for table, slots in names.items():
        for slot, name in slots.items():
            if name in owners:
                raise CheckpointError(
                    f"table {table!r}, {slot}: its variable would be named {name!r}, as that of {owners[name]} is; "
                    "rename the table"
                )
            owners[name] = f"table {table!r} ({slot})"


def _object_graph(
    tables: Mapping[str, Mapping[str, Value]], keys: Mapping[str, Mapping[str, str]]
) -> pb.TrackableObjectGraph:
    """The graph of `tf.train.Checkpoint(embedding=TPUEmbedding(...))`."""
    graph = pb.TrackableObjectGraph()

    def add(parent: int | None, name: str) -> int:
        graph.nodes.add().has_checkpoint_values.value = True
        number = len(graph.nodes) - 1
        if parent is not None:
            graph.nodes[parent].children.add(node_id=number, local_name=name)
        return number

    root = add(None, "")
    layer = add(root, _ROOT)
    # On restoring, TensorFlow then loads the variables onto the TPU.
    graph.nodes[layer].registered_saver.name = "tf.TPUEmbeddingCallback"
    graph.nodes[layer].registered_saver.object_name = _ROOT
    counter = add(root, "save_counter")
    graph.nodes[counter].attributes.add(name=VARIABLE_VALUE, full_name="save_counter", checkpoint_key=_SAVE_COUNTER)
    variables = add(layer, "_variables")
    for table, slots in tables.items():
        by_slot = add(variables, table)
        for slot in slots:
            node = add(layer, _local_name(table, slot))
            graph.nodes[node].attributes.add(
                name=VARIABLE_VALUE, full_name=_local_name(table, slot), checkpoint_key=keys[table][slot]
            )
            graph.nodes[by_slot].children.add(node_id=node, local_name=slot)
    return graph
