"""Plan files: YAML or JSON by their ending, made to be read and edited, and checked field by field when read."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from tpuemb_torch.config import ConfigError
from tpuemb_torch.config.write import write_atomically
from tpuemb_torch.planning.errors import PlanError
from tpuemb_torch.planning.plan import EXCHANGES, SHARDINGS, Plan, PlannedTable, TablePlan
from tpuemb_torch.planning.rules import is_count, refusal
from tpuemb_torch.planning.sizes import parse_bytes

_FORMAT = 1
_TOO_MANY_RANKS = 1 << 24
_TABLE_FIELDS = (
    "sharding",
    "rank",
    "ranks",
    "node",
    "rows",
    "dimension",
    "slots",
    "bags",
    "pooling_factor",
    "distinct_ids",
    "sweeps_all_rows",
    "exchange",
)
_YAML, _JSON = (".yaml", ".yml"), (".json",)


def is_plan_file(name: object) -> bool:
    """Whether a name has the ending of a plan file."""
    return str(name).lower().endswith((*_YAML, *_JSON))


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Writes a plan to a file, as YAML (.yaml .yml) or JSON (.json); it appears whole or not at all.

    Raises:
        PlanError: for another ending.
        OSError: if the file cannot be written.
    """
    _check_ending(path)
    mapping = to_mapping(plan)
    if str(path).lower().endswith(_JSON):
        text = json.dumps(mapping, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    else:
        from tpuemb_torch.config.yaml_format import dump

        text = dump(mapping)
    write_atomically(Path(path), text.encode())


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """Reads a plan that `save_plan` wrote, or that was written by hand.

    Raises:
        PlanError: names the file, the field, what is wrong, and what may be there.
    """
    _check_ending(path)
    name = str(path)
    try:
        text = Path(path).read_bytes().decode()
    except FileNotFoundError:
        raise PlanError(name, "no such file: `tpuemb plan --out` writes one") from None
    except OSError as error:
        raise PlanError(name, f"cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise PlanError(name, f"is not UTF-8 text: {error.reason} at byte {error.start}") from error
    try:
        content = json.loads(text) if name.lower().endswith(_JSON) else _yaml(text, name)
    except ConfigError as error:
        raise PlanError(error.field, error.problem) from None
    except (ValueError, RecursionError) as error:
        raise PlanError(name, f"is not valid JSON: {error}") from None
    return _Reader(f"{name}: ").plan(content)


def to_mapping(plan: Plan) -> dict[str, Any]:
    """The content of a plan's file."""
    return {
        "tpuemb_plan": _FORMAT,
        "world_size": plan.world_size,
        "local_world_size": plan.local_world_size,
        "memory_per_rank": plan.memory_per_rank,
        "tables": {planned.table.name: _table(planned, plan.local_world_size) for planned in plan.tables},
    }


def _table(planned: TablePlan, local_world_size: int) -> dict[str, Any]:
    where: dict[str, Any] = {}
    if planned.sharding == "table_wise":
        where["rank"] = planned.ranks[0]
    elif planned.sharding == "column_wise":
        where["ranks"] = list(planned.ranks)
    elif planned.sharding == "table_row_wise":
        where["node"] = planned.ranks[0] // local_world_size
    table = planned.table
    sizes = {"rows": table.vocabulary_size, "dimension": table.dimension, "slots": table.num_slots}
    batch: dict[str, Any] = {"bags": table.bags, "pooling_factor": table.pooling_factor}
    if table.distinct_ids is not None:
        batch["distinct_ids"] = table.distinct_ids
    if table.sweeps_all_rows:
        batch["sweeps_all_rows"] = True
    return {"sharding": planned.sharding, "exchange": planned.exchange, **where, **sizes, **batch}


def _yaml(text: str, name: str) -> Any:
    from tpuemb_torch.config.yaml_format import load

    return load(text, name)


def _check_ending(path: str | os.PathLike[str]) -> None:
    if not is_plan_file(path):
        raise PlanError(str(path), f"a plan file ends with one of {', '.join((*_YAML, *_JSON))}")


class _Reader:
    """Turns the values of a file into a plan; every error names the file and the field."""

    def __init__(self, file: str) -> None:
        self._file = file

    def fail(self, field: str, problem: str) -> NoReturn:
        raise PlanError(self._file + field, problem)

    def plan(self, content: Any) -> Plan:
        """The whole file."""
        if not isinstance(content, dict):
            raise PlanError(self._file.removesuffix(": "), "is not a mapping of fields: `tpuemb plan --out` writes one")
        self.only(content, "", ("tpuemb_plan", "world_size", "local_world_size", "memory_per_rank", "tables"))
        version = content.get("tpuemb_plan")
        if version != _FORMAT or isinstance(version, bool):
            self.fail("tpuemb_plan", f"{version!r}: this version reads format {_FORMAT}")
        world = self.count(content, "", "world_size", least=1, stop=_TOO_MANY_RANKS)
        local = self.count(content, "", "local_world_size", least=1, stop=_TOO_MANY_RANKS)
        if world % local:
            self.fail("local_world_size", f"{local} does not divide world_size {world}: nodes have equally many ranks")
        memory = content.get("memory_per_rank")
        if memory is not None:
            try:
                memory = parse_bytes(memory)
            except ValueError as error:
                self.fail("memory_per_rank", str(error))
        tables = content.get("tables")
        if not isinstance(tables, dict):
            self.fail("tables", f"{tables!r} is not a mapping from table names")
        for name in tables:
            if not isinstance(name, str):
                self.fail("tables", f"the name {name!r} is not text: put it in quotes")
        return Plan(
            tuple(self.table(name, entry, world, local) for name, entry in tables.items()), world, local, memory
        )

    def table(self, name: str, entry: Any, world: int, local: int) -> TablePlan:
        """One table, and a check that it can be built."""
        place = f"tables.{name}."
        if not isinstance(entry, dict):
            self.fail(place.removesuffix("."), f"{entry!r} is not a mapping of fields")
        self.only(entry, place, _TABLE_FIELDS)
        sharding = entry.get("sharding")
        if sharding not in SHARDINGS:
            self.fail(f"{place}sharding", f"{sharding!r} is not one of {', '.join(SHARDINGS)}")
        used = {"table_wise": "rank", "column_wise": "ranks", "table_row_wise": "node"}.get(sharding)
        for field in ("rank", "ranks", "node"):
            if field in entry and field != used:
                self.fail(f"{place}{field}", f"has no meaning for {sharding}: remove it")
        exchange = entry.get("exchange", "pooled")
        if exchange not in EXCHANGES:
            self.fail(f"{place}exchange", f"{exchange!r} is not one of {', '.join(EXCHANGES)}")
        for field in ("pooling_factor", "distinct_ids"):
            if field in entry and not is_count(entry[field]):
                self.fail(f"{place}{field}", f"{entry[field]!r} is not a finite number of at least 0")
        sweeps = entry.get("sweeps_all_rows", False)
        if not isinstance(sweeps, bool):
            self.fail(f"{place}sweeps_all_rows", f"{sweeps!r} is neither true nor false")
        table = PlannedTable(
            name,
            self.count(entry, place, "rows", least=1),
            self.count(entry, place, "dimension", least=1),
            self.count(entry, place, "slots"),
            self.count(entry, place, "bags") if "bags" in entry else 0,
            float(entry.get("pooling_factor", 1.0)),
            sweeps,
            float(entry["distinct_ids"]) if "distinct_ids" in entry else None,
        )
        planned = TablePlan(table, sharding, self.ranks(entry, place, sharding, world, local), exchange)
        problem = refusal(planned, world, local)
        if problem is not None:
            self.fail(place.removesuffix("."), problem)
        return planned

    def ranks(self, entry: dict[str, Any], place: str, sharding: str, world: int, local: int) -> Sequence[int]:
        if sharding == "row_wise":
            return range(world)
        if sharding == "table_wise":
            rank = self.count(entry, place, "rank", stop=world)
            return range(rank, rank + 1)
        if sharding == "table_row_wise":
            first = local * self.count(entry, place, "node", stop=world // local)
            return range(first, first + local)
        ranks = entry.get("ranks")
        if not isinstance(ranks, list) or not ranks:
            self.fail(f"{place}ranks", f"{ranks!r} is not a list of ranks")
        return tuple(self.count({"ranks": rank}, place, "ranks", stop=world) for rank in ranks)

    def only(self, content: dict[str, Any], place: str, fields: Sequence[str]) -> None:
        for field in content:
            if field not in fields:
                self.fail(f"{place}{field}", f"is not a field of a plan; there are {', '.join(fields)}")

    def count(self, content: dict[str, Any], place: str, field: str, least: int = 0, stop: int | None = None) -> int:
        if field not in content:
            self.fail(place + field, "is missing")
        value = content[field]
        if isinstance(value, bool) or not isinstance(value, int):
            self.fail(place + field, f"{value!r} is not a whole number")
        if value < least or (stop is not None and value >= stop):
            limits = f"at least {least}" if stop is None or (least and value < least) else f"in [{least}, {stop})"
            self.fail(place + field, f"{value} must be {limits}")
        return value
