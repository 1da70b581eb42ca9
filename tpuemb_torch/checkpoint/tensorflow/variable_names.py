"""Tables of a name-based checkpoint (v1 Saver, TPUEstimator): variables, host parts, slots, and padding by their names.

A partitioned variable is one tensor in slices, or `user/part_0`, `user/part_1`, ...; the TF2 layer's per-host variables
are `user_0`, `user_1`, ... and `user/accumulators_0`, ...  Tables with fewer rows than hosts have `dummy_{i}_user` of
one row for each host without.  A table's own name may look like any of these: where the names alone do not decide,
nothing is read.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection

from tpuemb_torch.checkpoint.errors import CheckpointError
from tpuemb_torch.checkpoint.tensorflow.bundle import TensorBundle
from tpuemb_torch.checkpoint.tensorflow.slot_names import DENSE_NAMES, V2_NAMES, ends_of, v1_slots, v2_slots
from tpuemb_torch.checkpoint.tensorflow.sources import Concatenated, Stored

Variable = Stored | Concatenated


class Variables:
    """The rank-2 tensors of a checkpoint by variable name, partitions put together."""

    def __init__(self, bundle: TensorBundle) -> None:
        self.bundle = bundle
        self.by_name: dict[str, Variable] = {}
        parts: dict[str, dict[int, Stored]] = defaultdict(dict)
        for name, entry in bundle.entries.items():
            if len(entry.shape) != 2 or entry.dtype is None:
                continue
            match = re.fullmatch(r"(.+)/part_(0|[1-9]\d*)", name)
            if match is None:
                self.by_name[name] = Stored(bundle, name)
            else:
                parts[match[1]][int(match[2])] = Stored(bundle, name)
        for name, found in parts.items():
            if name in self.by_name:
                raise CheckpointError(
                    f"checkpoint {bundle.prefix} has {name!r} and {name + '/part_0'!r}; name the right one in a mapping"
                )
            self.by_name[name] = _joined(bundle, name, found, "/part_")
        self._parts_of_hosts = _host_parts(self.by_name)

    def get(self, name: str, others: Collection[str] = ()) -> Variable | None:
        """The variable of that name, also from one tensor a host (`name_0`, `name_1`, ...).

        Args:
            name: the variable.
            others: names that are those of other tables, hence of neither.
        """
        if name in self.by_name:
            return None if name in others else self.by_name[name]
        return self.host_parts(name, others)

    def host_parts(self, name: str, others: Collection[str] = ()) -> Concatenated | None:
        """The variable from one tensor a host, or None if there are none."""
        found = self._parts_of_hosts.get(name)
        if found is None or any(f"{name}_{number}" in others for number in found):
            return None
        parts = {number: self.by_name[f"{name}_{number}"] for number in found}
        plain = {number: part for number, part in parts.items() if isinstance(part, Stored)}
        return _joined(self.bundle, name, plain, "_") if len(plain) == len(parts) else None

    def slot(self, table: str, slot: str, algorithm: str | None, others: Collection[str] = ()) -> Variable | None:
        """A slot of the variable `table`; arguments as for `get`, and the table's algorithm if it is known.

        Raises:
            CheckpointError: if there are several.
        """
        found = {e: v for e in ends_of(algorithm, slot) if (v := self.get(f"{table}/{e}", others)) is not None}
        if len(found) > 1:
            raise CheckpointError(
                f"checkpoint {self.bundle.prefix}: {slot} of {table!r} may be any of "
                f"{', '.join(repr(f'{table}/{end}') for end in found)}; name the right one in a mapping"
            )
        return next(iter(found.values()), None)

    def tables(self) -> dict[str, dict[str, Variable]]:
        """All tables with their slots, by the variables' names alone.

        Raises:
            CheckpointError: if the names can be read in more than one way.
        """
        names = self._without_host_parts()
        slots = {name: found for name in names if (found := self._slots_of(name, names))}
        owners = {slot_name: owner for owner, found in slots.items() for slot_name in found}
        for name, owner in owners.items():
            if name in slots:
                raise self._ambiguous(name, f"a slot of {owner!r} or a table with slots of its own")
        tables: dict[str, dict[str, Variable]] = {}
        for name, variable in names.items():
            dense = [f"{name}/{end}" for end in DENSE_NAMES]
            foreign = any(end in names for end in dense) or name.endswith(tuple(f"/{end}" for end in DENSE_NAMES))
            if name in owners or foreign or self.is_padding(name):
                continue
            tables[name] = {"parameters": variable}
            for slot_name, slot in slots.get(name, {}).items():
                if slot in tables[name]:
                    raise self._ambiguous(slot_name, f"{slot} of {name!r}, which another variable is as well")
                tables[name][slot] = names[slot_name]
        return tables

    def is_padding(self, name: str) -> bool:
        """Whether a variable is the row of a host that has none of a small table's rows."""
        match = re.fullmatch(r"(.*/)?dummy_(\d+)_(.+)", name)
        if match is None or self.by_name[name].shape[0] != 1:
            return False
        scope, host, padded = match.groups()
        table = self.get(f"{scope or ''}{padded}")
        return table is not None and table.shape[0] <= int(host) and table.shape[1] == self.by_name[name].shape[1]

    def _without_host_parts(self) -> dict[str, Variable]:
        """The variables, with per-host tensors put together where it is certain that they are that."""
        names = dict(self.by_name)
        for name, numbers in self._parts_of_hosts.items():
            parts = [f"{name}_{number}" for number in numbers]
            if name in self.by_name or len(parts) < 2 or not _look_like_parts([self.by_name[part] for part in parts]):
                continue
            if any(f"{part}/{end}" in self.by_name for part in parts for end in (v1_slots() | v2_slots())):
                continue  # they have slots of their own: tables
            base, _, end = name.rpartition("/")
            is_slot = end in v2_slots() and f"{base}_0" in self.by_name
            has_slots = any(f"{name}/{end}" in self._parts_of_hosts for end in v2_slots())
            if not is_slot and not has_slots:
                raise self._ambiguous(parts[0], f"a table or the first host's rows of {name!r}")
            joined = self.host_parts(name)
            assert joined is not None
            for part in parts:
                del names[part]
            names[name] = joined
        return names

    def _slots_of(self, owner: str, names: dict[str, Variable]) -> dict[str, str]:
        """Slot by variable name, of those that are named as slots of the variable `owner`.

        The TF2 names are ordinary words; they count where they are the slots of an algorithm, of the table's shape.
        """
        v1 = {f"{owner}/{end}": slot for end, slot in v1_slots().items() if f"{owner}/{end}" in names}
        if v1:
            return v1
        v2 = {name: slot for slot in v2_slots() if (name := f"{owner}/{slot}") in names}
        v2 = {name: slot for name, slot in v2.items() if names[name].shape == names[owner].shape}
        algorithms = [set(slots) for slots in V2_NAMES.values()]
        if set(v2.values()) in algorithms:
            return v2
        if any(slots < set(v2.values()) for slots in algorithms):
            raise self._ambiguous(sorted(v2)[0], f"a slot of {owner!r} or a table, as may be {sorted(v2)[1:]}")
        return {}

    def _ambiguous(self, name: str, readings: str) -> CheckpointError:
        return CheckpointError(
            f"checkpoint {self.bundle.prefix}: variable {name!r} may be {readings}; "
            "give a config that names the tables, or a mapping"
        )


def _host_parts(names: dict[str, Variable]) -> dict[str, list[int]]:
    """Numbers i of the variables `name_i`, from 0 on without gaps, by `name`."""
    numbers: dict[str, set[int]] = defaultdict(set)
    for name in names:
        match = re.fullmatch(r"(.+)_(0|[1-9]\d*)", name)
        if match is not None:
            numbers[match[1]].add(int(match[2]))
    return {name: sorted(found) for name, found in numbers.items() if found == set(range(len(found)))}


def _look_like_parts(parts: list[Variable]) -> bool:
    """Whether the shapes are those of one table's rows on each host: V div n, and one more on the first V mod n."""
    rows = [part.shape[0] for part in parts]
    total, hosts = sum(rows), len(rows)
    expected = [total // hosts + (host < total % hosts) for host in range(hosts)]
    return rows == expected and len({part.shape[1] for part in parts}) == 1


def _joined(bundle: TensorBundle, name: str, parts: dict[int, Stored], separator: str) -> Concatenated:
    missing = sorted(set(range(max(parts) + 1)) - set(parts))
    if missing:
        raise CheckpointError(
            f"checkpoint {bundle.prefix}: variable {name!r} has parts {sorted(parts)}, "
            f"but no {name + separator + str(missing[0])!r}"
        )
    found = [parts[number] for number in sorted(parts)]
    if len({(part.shape[1], part.dtype) for part in found}) > 1:
        raise CheckpointError(f"checkpoint {bundle.prefix}: the parts of {name!r} have different dimensions or types")
    return Concatenated(found)
