"""Reading a checkpoint: everything is checked before anything changes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from tpuemb_torch.checkpoint.contents import dense_state, rank_in
from tpuemb_torch.checkpoint.errors import CheckpointError
from tpuemb_torch.checkpoint.files import check_files
from tpuemb_torch.checkpoint.folder import FORMATS, CheckpointFolder, read_description
from tpuemb_torch.checkpoint.matching import Match, match_collections, match_tables, saved_configs, wanted_rows
from tpuemb_torch.checkpoint.planners import RowLoadPlanner
from tpuemb_torch.checkpoint.tables import Collection, key
from tpuemb_torch.checkpoint.vocabulary import Rule, read_rules
from tpuemb_torch.kernels.step_inputs import check_rates
from tpuemb_torch.sharding.exchange import raise_together
from tpuemb_torch.sharding.progress import bytes_bar


class Reading:
    """One `load`.

    Args:
        folder: where the checkpoints are.
        found: the model's collections.
        group: the ranks that load together.
    """

    def __init__(
        self, folder: CheckpointFolder, found: Mapping[str, Collection], group: dist.ProcessGroup | None
    ) -> None:
        self._folder = folder
        self._found = found
        self._group = group

    def into(
        self,
        model: nn.Module,
        step: int | None,
        tables: Sequence[str] | None,
        rules: str | os.PathLike[str] | None,
    ) -> Any:
        """Loads (collective); see `load`."""
        error: Exception | None = None
        data = self._folder.path
        try:
            data = self._folder.find(step)
            description = read_description(data)
            matches = self._matches(data, description, tables, {} if rules is None else read_rules(rules))
            rank, world = rank_in(self._group), 1 if self._group is None else dist.get_world_size(self._group)
            files = description["files"]
            check_files(data, files, FORMATS[description["format"]], sorted(files)[rank::world], rank)
        except CheckpointError as problem:
            error = problem
        except OSError as problem:
            error = CheckpointError(f"checkpoint {data} cannot be read: {problem}")
        except Exception as problem:  # whatever it is, the other ranks wait to hear of it
            error = CheckpointError(f"checkpoint {data} is damaged: checkpoint.json cannot be understood ({problem})")
        raise_together(error, self._group, CheckpointError)
        reader = dcp.FileSystemReader(data)
        live = dense_state(model) if tables is None else {}
        dense: dict[str, Tensor] = {}
        try:
            extra = torch.load(data / "extra.pt", map_location="cpu", weights_only=True)
            metadata = reader.read_metadata()
            reader.set_up_storage_reader(metadata, is_coordinator=False)
            _check_keys(data, metadata, matches)
            dense = _read_dense(reader, metadata, live)
        except Exception as problem:  # unpickling may raise anything
            error = CheckpointError(f"checkpoint {data} cannot be read into this model: {problem}")
        raise_together(error, self._group, CheckpointError)
        self._read_tables(data, reader, metadata, matches)
        with torch.no_grad():
            for name, value in live.items():
                value.copy_(dense[name])
        if tables is None:
            self._set_rates(description, matches)
        return extra

    def _matches(
        self,
        data: Path,
        description: Mapping[str, Any],
        tables: Sequence[str] | None,
        rules: Mapping[str, Rule],
    ) -> dict[str, list[Match]]:
        """What to load into each collection."""
        own = {table.name for collection in self._found.values() for table in collection.config.tables}
        saved = saved_configs(description)
        if isinstance(tables, str):
            raise CheckpointError(f"tables must be a sequence of names, got the string {tables!r}")
        for what, names in (("tables", tables or ()), ("the rule file", rules)):
            unknown = [name for name in names if name not in own]
            if unknown:
                raise CheckpointError(f"{what} names {unknown}, but the model has the tables {sorted(own)}")
        prefixes = match_collections(data, saved, self._found, tables is not None)
        matches = {
            prefix: match_tables(data, before, saved[before], self._found[prefix].config, tables, rules)
            for prefix, before in prefixes.items()
        }
        missing = set(tables or ()) - {match.table.name for found in matches.values() for match in found}
        if missing:
            raise CheckpointError(f"checkpoint {data} has no tables {sorted(missing)} for the model's embeddings")
        return matches

    def _read_tables(
        self, data: Path, reader: dcp.FileSystemReader, metadata: Metadata, matches: Mapping[str, list[Match]]
    ) -> None:
        # All ranks bring steps that were held back to an end before rows change.
        stored = {prefix: collection.stored() for prefix, collection in self._found.items()}
        error: Exception | None = None
        try:
            wanted = [
                rows
                for prefix, found in matches.items()
                for match in found
                for rows in wanted_rows(match, stored[prefix])
            ]
            planner = RowLoadPlanner(wanted, metadata)
            with bytes_bar("loading checkpoint", planner.bytes_to_read, rank_in(self._group)) as planner.bar:
                reader.read_data(planner.plan, planner).wait()
        except Exception as problem:
            error = CheckpointError(
                f"checkpoint {data} could not be read to its end; tables of the model are changed in part: {problem}"
            )
        raise_together(error, self._group, CheckpointError)

    def _set_rates(self, description: Mapping[str, Any], matches: Mapping[str, list[Match]]) -> None:
        """The rates of the dynamic tags that were last set, where they are of this config's tags."""
        saved = description.get("learning_rates", {})
        for prefix, collection in self._found.items():
            rates = saved.get(matches[prefix][0].saved_prefix) if matches.get(prefix) else None
            if rates is not None and len(rates) == collection.config.num_learning_rates:
                # Where the rates follow a schedule, they go on to.
                collection.steps.rates = check_rates(rates, len(rates))


def _check_keys(data: Path, metadata: Metadata, matches: Mapping[str, list[Match]]) -> None:
    for match in (match for found in matches.values() for match in found):
        expected = [match.saved.vocabulary_size, match.saved.dimension]
        for slot in match.slots:
            name = key(match.saved_prefix, match.saved.name, slot)
            found = metadata.state_dict_metadata.get(name)
            if not isinstance(found, TensorStorageMetadata) or list(found.size) != expected:
                size = list(found.size) if isinstance(found, TensorStorageMetadata) else None
                raise CheckpointError(f"{name} should be {expected}, checkpoint {data} has {size}")


def _read_dense(reader: dcp.FileSystemReader, metadata: Metadata, live: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of the dense state."""
    state: dict[str, Any] = {name: torch.empty_like(value, device="cpu") for name, value in live.items()}
    planner = dcp.DefaultLoadPlanner()
    planner.set_up_planner(state, metadata, is_coordinator=False)
    reader.read_data(planner.create_local_plan(), planner).wait()
    return state
