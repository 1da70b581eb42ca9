"""Which tensors of a checkpoint are which tables and slots: by its object graph, its variables' names, or a mapping."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tpuemb_torch.checkpoint.errors import CheckpointError
from tpuemb_torch.checkpoint.tensorflow.bundle import TensorBundle
from tpuemb_torch.checkpoint.tensorflow.object_graph import OBJECT_GRAPH, embedding_layers
from tpuemb_torch.checkpoint.tensorflow.sources import Concatenated, Interleaved, Source, Stored
from tpuemb_torch.checkpoint.tensorflow.sparse_core import stack_members, unstack
from tpuemb_torch.checkpoint.tensorflow.variable_names import Variables
from tpuemb_torch.config import Config, Table
from tpuemb_torch.sharding.parameters import slot_names

#: For each table its name in the checkpoint, or the checkpoint's tensor for "parameters" and each slot.
Mapped = Mapping[str, str | Mapping[str, str]]


@dataclass(frozen=True)
class Contents:
    """The tables of a checkpoint."""

    bundle: TensorBundle
    #: How tables were found, for people.
    found_by: str
    #: By table and slot ("parameters" first).
    tables: dict[str, dict[str, Source]]
    #: Slots that the config's optimizers have and the checkpoint has not, by table.
    missing: dict[str, list[str]]
    #: Tensors that are part of no table.
    unused: list[str]
    #: Rows that hosts without rows of a small table had to have.
    padding: list[str]


def find_tables(bundle: TensorBundle, config: Config | None = None, mapping: Mapped | None = None) -> Contents:
    """Finds the tables of a checkpoint.

    Args:
        bundle: the checkpoint.
        config: which tables, of what shape, with which slots; without it, all that the checkpoint has.
        mapping: tables whose names in the checkpoint are others; without a config, these are all that is read.

    Raises:
        CheckpointError: if a table is not there, has another shape, or cannot be told from others, or a data file is
            missing, cut off or damaged as far as `TensorBundle.check_files` sees.
    """
    mapping = mapping or {}
    bundle.check_files()
    if config is not None:
        unknown = sorted(set(mapping) - {table.name for table in config.tables})
        if unknown:
            raise CheckpointError(
                f"the mapping has table {unknown[0]!r}; the config has {_listed(t.name for t in config.tables)}"
            )
    finder = _ObjectGraph(bundle) if OBJECT_GRAPH in bundle.entries else _Names(bundle, config)
    if config is not None:
        wanted: dict[str, Table | None] = {table.name: table for table in config.tables}
    else:
        wanted = dict.fromkeys(mapping or finder.names())
    tables: dict[str, dict[str, Source]] = {}
    missing: dict[str, list[str]] = {}
    for name, table in wanted.items():
        mapped = mapping.get(name, name)
        if isinstance(mapped, str):
            tables[name] = finder.table(mapped, table)
        else:
            tables[name] = _by_tensor(finder, name, mapped)
        if table is not None:
            slots = slot_names(table)
            tables[name] = {slot: tables[name][slot] for slot in slots if slot in tables[name]}
            if len(tables[name]) < len(slots):
                missing[name] = [slot for slot in slots if slot not in tables[name]]
        _check_shapes(bundle, name, tables[name], table, 1 if config is None else config.num_hosts)
    used = {tensor for slots in tables.values() for source in slots.values() for tensor in source.tensors}
    padding = finder.padding() - used
    unused = set(bundle.entries) - used - finder.structure() - padding
    return Contents(bundle, finder.description, tables, missing, sorted(unused), sorted(padding))


class _ObjectGraph:
    """A TF2 checkpoint: tables by the dicts of the embedding layers in its object graph."""

    def __init__(self, bundle: TensorBundle) -> None:
        self._bundle = bundle
        self._layers = embedding_layers(bundle)
        self._tables: dict[str, tuple[str, dict[str, Source]]] = {}
        self._twice: dict[str, list[str]] = {}
        stacked = False
        for layer in self._layers:
            stacks = {} if layer.layouts is None else stack_members(bundle, layer.layouts)
            for name, keys in layer.variables.items():
                members = stacks.get(name, []) if name in layer.trained else []
                if layer.stacks and name in layer.trained and not members:
                    raise CheckpointError(
                        f"checkpoint {bundle.prefix}: {layer.path}: the order of the rows of {name!r} is not known: "
                        "the layer stacks tables for SparseCore, and the checkpoint has no layout of this one"
                    )
                stored = {slot: _stored(bundle, key) for slot, key in keys.items()}
                for member in members:
                    stacked = True
                    self._add(member.table_name, layer.path, {s: unstack(t, member) for s, t in stored.items()})
                if not members:
                    self._add(name, layer.path, dict(stored))
        kind = "object graph, SparseCore stacks" if stacked else "object graph"
        self.description = f"{kind}, {_listed(layer.path for layer in self._layers)}"

    def _add(self, name: str, path: str, slots: dict[str, Source]) -> None:
        if name in self._tables:
            self._twice.setdefault(name, [self._tables[name][0]]).append(path)
        self._tables[name] = path, slots

    def names(self) -> list[str]:
        if not self._tables:
            raise CheckpointError(
                f"checkpoint {self._bundle.prefix}: no TPUEmbedding is in its object graph; "
                f"say in a mapping which tensors are tables (it has {_listed(self._bundle.entries)})"
            )
        return list(self._tables)

    def table(self, name: str, table: Table | None) -> dict[str, Source]:
        if name in self._twice:
            raise CheckpointError(
                f"checkpoint {self._bundle.prefix}: table {name!r} is in {_listed(self._twice[name])}; "
                "name the tensors of the right one in a mapping"
            )
        if name not in self._tables:
            raise _no_table(self._bundle, name, self.names())
        return self._tables[name][1]

    def tensor(self, name: str) -> Source:
        return _stored(self._bundle, name)

    def padding(self) -> set[str]:
        return set()

    def structure(self) -> set[str]:
        return {OBJECT_GRAPH} | {layer.layouts for layer in self._layers if layer.layouts is not None}


class _Names:
    """A name-based checkpoint: tables by their variables' names."""

    description = "variable names"

    def __init__(self, bundle: TensorBundle, config: Config | None) -> None:
        self._bundle = bundle
        self._variables = Variables(bundle)
        self._others = set() if config is None else {table.name for table in config.tables}
        self._mod = config is not None and config.sharding_strategy == "mod"

    def names(self) -> list[str]:
        found = self._variables.tables()
        if not found:
            raise CheckpointError(
                f"checkpoint {self._bundle.prefix} has no tables; its tensors are {_listed(self._bundle.entries)}"
            )
        return list(found)

    def table(self, name: str, table: Table | None) -> dict[str, Source]:
        if table is None:
            found = self._variables.tables()
            if name not in found:
                raise _no_table(self._bundle, name, found)
            return {slot: self._in_order(variable) for slot, variable in found[name].items()}
        variable = self._variables.get(name, self._others - {name})
        if variable is None:
            raise _no_table(self._bundle, name, self._variables.by_name)
        slots: dict[str, Source] = {"parameters": self._in_order(variable)}
        for slot in slot_names(table)[1:]:
            found_slot = self._variables.slot(name, slot, table.optimizer.algorithm, self._others)
            if found_slot is not None:
                slots[slot] = self._in_order(found_slot)
        return slots

    def tensor(self, name: str) -> Source:
        variable = self._variables.get(name)
        return _stored(self._bundle, name) if variable is None else self._in_order(variable)

    def padding(self) -> set[str]:
        return {name for name in self._variables.by_name if self._variables.is_padding(name)}

    def structure(self) -> set[str]:
        return set()

    def _in_order(self, variable: Stored | Concatenated) -> Source:
        """The rows in logical order: under MOD, host i's part has the rows i, i + n, i + 2n, ..."""
        sizes = tuple(variable.parts())
        # Variables of one host each (user_0, user_1, ...) are the TF2 layer's, which has DIV only.
        partitioned = isinstance(variable, Stored) or variable.tensors[0].endswith("/part_0")
        if not self._mod or not partitioned or len(sizes) == 1:
            return variable
        rows, hosts = variable.shape[0], len(sizes)
        if sizes != tuple(len(range(host, rows, hosts)) for host in range(hosts)):
            raise CheckpointError(
                f"checkpoint {self._bundle.prefix}: the config shards rows MOD, but the parts of "
                f"{variable.tensors[0]!r} have {list(sizes)} rows"
            )
        return Interleaved(variable, sizes)


def _stored(bundle: TensorBundle, name: str) -> Stored:
    entry = bundle.entry(name)
    if len(entry.shape) != 2 or entry.dtype is None:
        raise CheckpointError(
            f"checkpoint {bundle.prefix}: tensor {name!r} of shape {list(entry.shape)} is no table's: "
            "it must have two axes and numbers"
        )
    return Stored(bundle, name)


def _by_tensor(finder: _ObjectGraph | _Names, name: str, tensors: Mapping[str, str]) -> dict[str, Source]:
    if "parameters" not in tensors:
        raise CheckpointError(f"the mapping of table {name!r} has no parameters, only {_listed(tensors)}")
    names = ["parameters", *(slot for slot in tensors if slot != "parameters")]
    return {slot: finder.tensor(tensors[slot]) for slot in names}


def _check_shapes(
    bundle: TensorBundle, name: str, slots: Mapping[str, Source], table: Table | None, num_hosts: int
) -> None:
    rows, dimension = slots["parameters"].shape
    for slot, source in slots.items():
        if source.shape != (rows, dimension):
            raise CheckpointError(
                f"checkpoint {bundle.prefix}: table {name!r} has shape {[rows, dimension]}, its {slot} "
                f"({_listed(source.tensors)}) {list(source.shape)}"
            )
    if table is None:
        return
    # TensorFlow gives a table at least one row a host; checkpoints have those that the user asked for.
    padded = rows < table.vocabulary_size == num_hosts
    if dimension != table.dimension or not (rows == table.vocabulary_size or padded):
        raise CheckpointError(
            f"checkpoint {bundle.prefix}: table {name!r} ({_listed(slots['parameters'].tensors)}) has shape "
            f"{[rows, dimension]}, the config {[table.vocabulary_size, table.dimension]}"
        )


def _no_table(bundle: TensorBundle, name: str, found: object) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {bundle.prefix} has no table {name!r}; it has {_listed(found)}. "
        "If it is there under another name, say so in a mapping"
    )


def _listed(names: object, most: int = 12) -> str:
    shown = [repr(name) for name in names]  # type: ignore[attr-defined]
    more = f" and {len(shown) - most} more" if len(shown) > most else ""
    return ", ".join(shown[:most]) + more or "none"
