"""The arguments of the enqueue ops -> inputs by feature, as the module takes them.

TensorFlow's ops come in two families: per table (IntegerBatch, SparseBatch), where a sample is an output row
`b * num_features + f` of the table, and per feature (SparseTensorBatch, RaggedTensorBatch, ArbitraryTensorBatch).
Sources: the op documentation in tensorflow/core/ops/tpu_embedding_ops.cc and its api_def files.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from tpuemb_torch.config import Config, Feature
from tpuemb_torch.preprocessing.bags import FeatureBags, sequence_bags, to_bags
from tpuemb_torch.preprocessing.inputs import InputError, Ragged, Sparse, fail, integers


def check_counts(expected: int, what: str, **lists: Sequence[object]) -> None:
    """Every list has one entry per table or feature."""
    for name, values in lists.items():
        if len(values) != expected:
            raise InputError(f"{name} has {len(values)} entries; give one for each of the config's {expected} {what}")


def weights_or_none(weights: Tensor | None) -> Tensor | None:
    """The ops' way to say "all 1.0" is an empty tensor."""
    return None if weights is None or (torch.as_tensor(weights).numel() == 0) else weights


def per_table(config: Config, rows: Sequence[object]) -> dict[str, object]:
    """Inputs over each table's output rows -> inputs by feature.

    Args:
        config: the config.
        rows: per table, a dense tensor of one id an output row, or `Sparse` with one column of row numbers.
    """
    features: dict[str, object] = {}
    for table_id, (table, value) in enumerate(zip(config.tables, rows, strict=True)):
        batch = config.batch_size_per_tensor_core
        whole = Feature(table.name, table_id, table, (batch * table.num_features,))
        members = [f for f in config.features if f.table_id == table_id]
        if isinstance(value, Sparse):
            # One column of row numbers: a second, constant one makes it a bag of each row.
            indices = integers(table.name, "sample_indices", value.indices, rank=1)
            places = torch.stack([indices, torch.zeros_like(indices)], dim=1)
            bags = to_bags(whole, Sparse(places, value.ids, value.weights), None)
        else:
            bags = to_bags(whole, value, None)
            if bags.lengths.numel() != whole.input_shape[0]:
                fail(table.name, f"{bags.lengths.numel()} ids for the table's {whole.input_shape[0]} output rows")
        features.update(_split_rows(config, bags, members, table.num_features))
    return features


def _split_rows(config: Config, bags: FeatureBags, members: Sequence[Feature], num_features: int) -> dict[str, object]:
    """Output rows `b * num_features + f` of a table -> its features, each over its own run of f."""
    if len(members) == 1:
        return {members[0].name: _as_ragged(bags)}
    batch = config.batch_size_per_tensor_core
    starts = (bags.lengths.cumsum(0) - bags.lengths).view(batch, num_features)
    lengths = bags.lengths.view(batch, num_features)
    found: dict[str, object] = {}
    first = 0
    for feature in members:
        count = prod(feature.input_shape) // batch
        own = lengths[:, first : first + count].reshape(-1)
        begin = starts[:, first : first + count].reshape(-1)
        splits = torch.cat([own.new_zeros(1), own.cumsum(0)])
        source = torch.repeat_interleave(begin - splits[:-1], own) + torch.arange(int(splits[-1]))
        weights = None if bags.weights is None else bags.weights[source]
        found[feature.name] = Ragged(splits, bags.ids[source], weights)
        first += count
    return found


def _as_ragged(bags: FeatureBags) -> Ragged:
    return Ragged(torch.cat([bags.lengths.new_zeros(1), bags.lengths.cumsum(0)]), bags.ids, bags.weights)


def per_feature(
    config: Config,
    entries: Sequence[object],
    table_ids: Sequence[int],
    max_sequence_lengths: Sequence[int],
    num_features: Sequence[int],
) -> dict[str, object]:
    """Entries of SparseTensorBatch or RaggedTensorBatch -> inputs by feature.

    Args:
        config: the config.
        entries: `Sparse` (column 0 the sample; for a sequence column 1 the step) or `Ragged`, one per feature.
        table_ids: table of each entry; entries of a table take consecutive feature slots in their order.
        max_sequence_lengths: steps of each entry, 0 for bags; empty is all 0.
        num_features: feature slots that a bag entry fills, empty is 1 each.
    """
    count = len(entries)
    check_counts(count, "entries", table_ids=table_ids)
    steps, slots = list(max_sequence_lengths) or [0] * count, list(num_features) or [1] * count
    check_counts(count, "entries", max_sequence_lengths=steps, num_features=slots)
    for name, values, least in (("max_sequence_lengths", steps, 0), ("num_features", slots, 1)):
        for index, value in enumerate(values):
            if value < least:
                raise InputError(f"{name}[{index}] is {value}: it must be at least {least}")
    for index, table_id in enumerate(table_ids):
        if not 0 <= table_id < len(config.tables):
            raise InputError(f"table_ids[{index}] is {table_id}: the config has {len(config.tables)} tables")
    if config.layout == "feature":
        return _features_by_table(config, entries, table_ids, steps)
    features: dict[str, object] = {}
    for table_id, feature in enumerate(config.features):
        mine = [index for index, t in enumerate(table_ids) if t == table_id]
        bags = [_slot_bags(config, feature, entries[i], steps[i], slots[i]) for i in mine]
        widths = [b.shape[1] for b in bags]
        if sum(widths) != feature.table.num_features:
            fail(
                feature.name,
                f"entries fill {sum(widths)} feature slots; the table has num_features {feature.table.num_features}",
            )
        features[feature.name] = _as_ragged(_side_by_side(bags))
    return features


def _features_by_table(
    config: Config, entries: Sequence[object], table_ids: Sequence[int], steps: Sequence[int]
) -> dict[str, object]:
    check_counts(len(config.features), "features", entries=entries)
    waiting = {t: [f for f in config.features if f.table_id == t] for t in range(len(config.tables))}
    found: dict[str, object] = {}
    for index, (entry, table_id) in enumerate(zip(entries, table_ids, strict=True)):
        if not waiting[table_id]:
            raise InputError(f"table_ids[{index}]: more entries than features for table {table_id}")
        feature = waiting[table_id].pop(0)
        if steps[index] and feature.input_shape[-1:] != (steps[index],):
            fail(
                feature.name,
                f"max_sequence_length is {steps[index]}, but input_shape is {list(feature.input_shape)}",
            )
        samples = prod(feature.input_shape)
        if steps[index] and isinstance(entry, Ragged):
            bags = sequence_bags(feature.name, entry, samples // steps[index], steps[index])
            found[feature.name] = _as_ragged(bags)
        elif isinstance(entry, Sparse):
            found[feature.name] = Sparse(entry.indices, entry.ids, entry.weights, feature.input_shape[0])
        else:
            found[feature.name] = _checked_rows(feature, entry, samples)
    return found


def _checked_rows(feature: Feature, entry: object, samples: int) -> object:
    """A bag entry has one row of ids for each sample (each id is one, if there are no indices)."""
    assert isinstance(entry, Ragged)
    rows = torch.as_tensor(entry.row_splits).numel() - 1
    if rows != samples:
        fail(feature.name, f"{rows} rows for {samples} samples: row splits have one entry more than there are samples")
    return entry


def _slot_bags(config: Config, feature: Feature, entry: object, steps: int, slots: int) -> FeatureBags:
    """One entry of a table as bags of shape `(batch, feature slots)`."""
    batch = config.batch_size_per_tensor_core
    if steps and isinstance(entry, Ragged):
        return sequence_bags(feature.name, entry, batch, steps)
    shape: tuple[int, ...] = (batch, steps) if steps else (batch * slots,)
    if isinstance(entry, Ragged):
        _checked_rows(feature, entry, batch * slots)
    bags = to_bags(Feature(feature.name, feature.table_id, feature.table, shape), entry, shape[0])
    return FeatureBags(bags.ids, bags.lengths, bags.weights, (batch, prod(shape) // batch))


def _side_by_side(bags: Sequence[FeatureBags]) -> FeatureBags:
    """Joins bags of shapes `(batch, k_i)` to `(batch, sum of k_i)`."""
    batch, width = bags[0].shape[0], sum(b.shape[1] for b in bags)
    lengths = torch.cat([b.lengths.view(batch, -1) for b in bags], dim=1)
    # Ids stand entry by entry: each bag's start there, then row by row of the joined layout.
    starts, offset = [], 0
    for b in bags:
        starts.append((b.lengths.cumsum(0) - b.lengths + offset).view(batch, -1))
        offset += b.ids.numel()
    begin, flat = torch.cat(starts, dim=1).reshape(-1), lengths.reshape(-1)
    source = torch.repeat_interleave(begin - (flat.cumsum(0) - flat), flat) + torch.arange(offset)
    ids = torch.cat([b.ids for b in bags])[source]
    if all(b.weights is None for b in bags):
        return FeatureBags(ids, flat, None, (batch, width))
    weights = torch.cat([b.full_weights() for b in bags])
    return FeatureBags(ids, flat, weights[source], (batch, width))


def arbitrary(
    config: Config, places: Sequence[Tensor], ids: Sequence[Tensor], weights: Sequence[Tensor]
) -> dict[str, object]:
    """Arguments of ArbitraryTensorBatch -> inputs by feature.

    Args:
        config: the config.
        places: per feature, in the config's order: rank-2 indices, rank-1 row splits, or empty where every id is
            its own sample.
        ids: per feature.
        weights: per feature; empty is 1.0 each.
    """
    check_counts(len(config.features), "features", sample_indices_or_row_splits=places)
    found: dict[str, object] = {}
    for feature, place, id_values, weight in zip(config.features, places, ids, weights, strict=True):
        name = feature.name
        place_tensor = torch.as_tensor(place)
        weight_tensor = weights_or_none(weight)
        id_tensor = integers(name, "embedding_indices", id_values)
        if place_tensor.numel() == 0 and id_tensor.numel():
            found[name] = _every_id_a_sample(feature, id_tensor, weight_tensor)
        elif place_tensor.dim() == 1 and place_tensor.numel():
            # Its batch is the config's: rows are bags, or sequences where there are so many times fewer.
            found[name] = Ragged(place_tensor, id_tensor, weight_tensor, feature.input_shape[0])
        elif place_tensor.dim() == 2 or place_tensor.numel() == 0:
            indices = place_tensor if place_tensor.dim() == 2 else torch.zeros(0, 2, dtype=torch.int64)
            found[name] = Sparse(indices.long() if indices.numel() == 0 else indices, id_tensor, weight_tensor)
        else:
            fail(name, f"sample_indices_or_row_splits must have rank 1 or 2, got shape {list(place_tensor.shape)}")
    return found


def _every_id_a_sample(feature: Feature, ids: Tensor, weights: Tensor | None) -> Ragged:
    samples = prod(feature.input_shape)
    if ids.numel() != samples:
        fail(
            feature.name,
            f"{ids.numel()} ids without sample indices for {samples} samples (input_shape "
            f"{list(feature.input_shape)}): each id is its own sample",
        )
    return Ragged(torch.arange(samples + 1), ids.reshape(-1), weights)
