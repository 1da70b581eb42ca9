"""Which tables of a checkpoint go into which of a model, and what does not fit."""

from __future__ import annotations

import base64
from collections.abc import Collection as AbstractCollection
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpuemb_torch.checkpoint.errors import CheckpointError
from tpuemb_torch.checkpoint.planners import WantedRows
from tpuemb_torch.checkpoint.tables import Collection, key
from tpuemb_torch.checkpoint.vocabulary import Rule
from tpuemb_torch.config import Config, Table, load_config
from tpuemb_torch.kernels import StoredPart
from tpuemb_torch.sharding.parameters import slot_names


@dataclass(frozen=True, eq=False)
class Match:
    """A table to load.

    Attributes:
        saved_prefix: that of the checkpoint's collection.
        table: the model's.
        saved: the checkpoint's.
        slots: those to load, "parameters" first.
        rule: where the rows come from.
    """

    saved_prefix: str
    table: Table
    saved: Table
    slots: tuple[str, ...]
    rule: Rule


def saved_configs(description: Mapping[str, Any]) -> dict[str, Config]:
    """The configs of a checkpoint, by prefix."""
    return {prefix: load_config(base64.b64decode(text)) for prefix, text in description["configs"].items()}


def match_collections(
    data: Path, saved: Mapping[str, Config], found: Mapping[str, Collection], subset: bool
) -> dict[str, str]:
    """The checkpoint's prefix for each of the model's: the same, or the only one.

    Raises:
        CheckpointError: if the checkpoint has other collections.
    """
    if len(saved) == len(found) == 1:
        return dict(zip(found, saved, strict=True))
    if set(saved) != set(found) and not (subset and set(saved) & set(found)):
        raise CheckpointError(f"checkpoint {data} has embeddings {sorted(saved)}, the model {sorted(found)}")
    return {prefix: prefix for prefix in found if prefix in saved}


def match_tables(
    data: Path,
    saved_prefix: str,
    saved: Config,
    own: Config,
    tables: AbstractCollection[str] | None,
    rules: Mapping[str, Rule],
) -> list[Match]:
    """The tables of one collection to load.

    Raises:
        CheckpointError: naming the first table that the checkpoint does not fit, and what both sides have.
    """
    before, now = {table.name: table for table in saved.tables}, {table.name: table for table in own.tables}
    names = before.keys() | now.keys() if tables is None else now.keys() & set(tables)
    matches = []
    for name in sorted(names):
        if name not in before or name not in now:
            raise CheckpointError(
                f"checkpoint {data}, table {name!r}: saved with (rows, dimension, optimizer) "
                f"{_described(before.get(name))}, the model has {_described(now.get(name))}; "
                "name the tables to load (tables=[...]) to load some of them"
            )
        slots = _slots(data, before[name], now[name], own.mode == "inference")
        matches.append(Match(saved_prefix, now[name], before[name], slots, _rule(data, before[name], now[name], rules)))
    return matches


def wanted_rows(match: Match, stored: Sequence[StoredPart]) -> Iterator[WantedRows]:
    """What this rank takes of a table, for the parts of it that are among those stored here."""
    for part, tensors in ((s.part, s.tensors) for s in stored if s.part.table.name == match.table.name):
        saved = match.rule.saved_rows(part.rows)
        for slot in match.slots:
            yield WantedRows(key(match.saved_prefix, part.table.name, slot), part.columns, saved, tensors[slot])


def _described(table: Table | None) -> tuple[int, int, str] | None:
    return None if table is None else (table.vocabulary_size, table.dimension, table.optimizer.algorithm)


def _slots(data: Path, saved: Table, own: Table, inference: bool) -> tuple[str, ...]:
    """Slots to load: all, or the weights alone where another optimizer's state would not be used anyway."""
    same = saved.optimizer.algorithm == own.optimizer.algorithm and slot_names(saved) == slot_names(own)
    if saved.dimension != own.dimension or not (same or inference):
        slots = (
            ""
            if saved.optimizer.algorithm != own.optimizer.algorithm or same
            else (f", with the slots {list(slot_names(saved))} and {list(slot_names(own))}")
        )
        raise CheckpointError(
            f"checkpoint {data}, table {own.name!r}: saved with (rows, dimension, optimizer) {_described(saved)}, "
            f"the model has {_described(own)}{slots}"
        )
    return slot_names(own) if same else ("parameters",)


def _rule(data: Path, saved: Table, own: Table, rules: Mapping[str, Rule]) -> Rule:
    before, now = saved.vocabulary_size, own.vocabulary_size
    rule = rules.get(own.name)
    if rule is None:
        if before != now:
            raise CheckpointError(
                f"checkpoint {data}, table {own.name!r}: saved with {before} rows, the model has {now} "
                f"((rows, dimension, optimizer) {_described(saved)} and {_described(own)}); "
                "say in a rule file (rules=...) whether to grow, shrink or map it"
            )
        return Rule("same", before, now)
    if (rule.saved, rule.rows) != (before, now):
        raise CheckpointError(
            f"checkpoint {data}, table {own.name!r}: the rule is to {rule.kind} it from {rule.saved} to {rule.rows} "
            f"rows, but it was saved with {before} and the model has {now}"
        )
    return rule
