"""The TPU embedding layers in the object graph of a TF2 checkpoint.

A layer (`TPUEmbedding`, `TPUEmbeddingForServing`, SparseCore's `TPUEmbeddingV2`) keeps its variables in the attribute
`_variables`, a dict of dicts: table (or stack of tables), then "parameters" or the slot.  The object graph has that
structure and each variable's key in the checkpoint, so that names are never taken apart.
Source: tensorflow/python/tpu/tpu_embedding_base.py, tensorflow/core/protobuf/trackable_object_graph.proto.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from tpuemb_torch.checkpoint.errors import CheckpointError
from tpuemb_torch.checkpoint.tensorflow.bundle import TensorBundle
from tpuemb_torch.protos import tensorflow_checkpoint_pb2 as pb

OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
LAYOUTS = "_sparse_core_table_layouts"
VARIABLE_VALUE = "VARIABLE_VALUE"
#: An attribute of layers that train on SparseCore.
_STACKS = "_stacked_table_to_tables"


@dataclass(frozen=True)
class Layer:
    """A TPU embedding layer: where it is in the object graph, and the checkpoint keys of its variables."""

    path: str
    #: Key by table (or stack) and slot.
    variables: dict[str, dict[str, str]]
    #: Key of the serialized SparseCoreTableLayouts, where the layer has them.
    layouts: str | None
    #: Names in `variables` whose tensors are those that the layer was trained with, hence stacked where they have
    #: layouts.  A `TPUEmbeddingForServing` that has read a stacked checkpoint writes its tables unstacked, and keeps
    #: the layouts, and an empty object in place of each stack.
    trained: frozenset[str]
    #: Whether the layer trains on SparseCore, where every table is in a stack.
    stacks: bool


def embedding_layers(bundle: TensorBundle) -> list[Layer]:
    """The embedding layers of an object-based checkpoint, each once, in the order of the object graph.

    Raises:
        CheckpointError: if the object graph cannot be understood.
    """
    try:
        graph = pb.TrackableObjectGraph.FromString(b"".join(bundle.strings(OBJECT_GRAPH)))
        return list(_layers(bundle, graph))
    except (DecodeError, IndexError) as problem:
        raise CheckpointError(f"checkpoint {bundle.prefix}: its object graph makes no sense: {problem}") from problem


def _layers(bundle: TensorBundle, graph: pb.TrackableObjectGraph) -> Iterator[Layer]:
    children = [{child.local_name: child.node_id for child in node.children} for node in graph.nodes]
    keys = [
        next((value.checkpoint_key for value in node.attributes if value.name == VARIABLE_VALUE), None)
        for node in graph.nodes
    ]
    paths = _paths(children)
    for number, own in enumerate(children):
        if "_variables" not in own:
            continue
        nodes = {table: children[node] for table, node in children[own["_variables"]].items()}
        if not nodes or not all("parameters" in slots for slots in nodes.values()):
            continue  # an optimizer's list of variables, for one
        variables: dict[str, dict[str, str]] = {}
        for table, slots in nodes.items():
            variables[table] = {}
            for slot, node in slots.items():
                key = keys[node]
                if key is None:
                    raise CheckpointError(
                        f"checkpoint {bundle.prefix}: {paths[number]}: table {table!r}, {slot}: no value was saved"
                    )
                variables[table][slot] = key
        trained = frozenset(table for table, slots in nodes.items() if own.get(table) == slots["parameters"])
        layouts = keys[own[LAYOUTS]] if LAYOUTS in own else None
        yield Layer(paths[number], variables, layouts, trained, stacks=_STACKS in own)


def _paths(children: list[dict[str, int]]) -> list[str]:
    """A shortest path to each node, for people."""
    paths: dict[int, str] = {0: "(root)"}
    queue = [0]
    for node in queue:
        for name, child in children[node].items():
            if child not in paths:
                paths[child] = name if node == 0 else f"{paths[node]}/{name}"
                queue.append(child)
    return [paths.get(node, f"node {node}") for node in range(len(children))]
