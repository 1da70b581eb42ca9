"""The features of a batch -> bags, feature after feature; and over the keys of a KeyedJaggedTensor.

A KeyedJaggedTensor has the same number of samples (its stride) under every key.  A feature of shape `[B, 3]` has
three times as many samples as one of shape `[B]`: there it takes three keys, its *slots*, and sample number
`b * 3 + f` is entry b of slot f.  Slots of a feature are neighbours, so its activations are one run of columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from tpuemb_torch.config import Config, Feature
from tpuemb_torch.preprocessing.bags import FeatureBags, leading_size, to_bags
from tpuemb_torch.preprocessing.inputs import InputError, Ragged, Sparse, fail
from tpuemb_torch.preprocessing.keyed import check_kjt_lengths, check_one_stride
from tpuemb_torch.preprocessing.prepared import PreparedInput


class SlotLayout:
    """Which keys a config's features take, and how a batch is laid out over them.

    Attributes:
        slots: number of keys of each feature, in feature order.
        keys: keys of each feature, in feature order: its name, or `name#0`, `name#1`, ... for several slots.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.features = config.features
        if config.layout == "table":
            stride = config.batch_size_per_tensor_core
        else:
            stride = max(feature.input_shape[0] for feature in self.features)
        self.slots = [-(-prod(feature.input_shape) // stride) for feature in self.features]
        self.keys = [
            [f.name] if count == 1 else [f"{f.name}#{slot}" for slot in range(count)]
            for f, count in zip(self.features, self.slots, strict=True)
        ]
        self._by_name = {feature.name: feature for feature in self.features}

    def bags(self, features: object) -> list[FeatureBags]:
        """One `FeatureBags` per feature, in feature order.

        Args:
            features: a mapping by feature name, a sequence in feature order, or a KeyedJaggedTensor.

        Raises:
            InputError: for missing, unknown or malformed features.
        """
        values = self._named(features)
        leading = self._leading(values)
        if isinstance(features, KeyedJaggedTensor):
            # Its stride is the batch, unless a feature of several axes comes with as many bags as it has samples.
            stride = features.stride()
            for f in self.features:
                if stride != prod(f.input_shape):
                    leading.setdefault(f.input_shape[0], stride)
        bags = [to_bags(f, values[f.name], leading.get(f.input_shape[0])) for f in self.features]
        if self.config.layout == "table":
            self._check_output_rows(bags)
        return bags

    def _check_output_rows(self, bags: Sequence[FeatureBags]) -> None:
        """Every table has num_features output rows for each of the same number of samples."""
        first: tuple[str, int] | None = None
        for feature, own in zip(self.features, bags, strict=True):
            rows, slots = own.lengths.numel(), feature.table.num_features
            if rows % slots:
                fail(feature.name, f"{rows} output rows, which num_features {slots} does not divide")
            first = first or (feature.name, rows // slots)
            if rows // slots != first[1]:
                fail(
                    feature.name,
                    f"{rows} output rows with num_features {slots} are {rows // slots} samples, but table "
                    f"{first[0]!r} has {first[1]}",
                )

    def _named(self, features: object) -> dict[str, object]:
        if isinstance(features, KeyedJaggedTensor):
            features = _split(features)
        if isinstance(features, Mapping):
            given = dict(features)
        elif isinstance(features, Sequence) and not isinstance(features, str | bytes):
            if len(features) != len(self.features):
                raise InputError(
                    f"{len(features)} inputs for {len(self.features)} features: "
                    f"give one each, in this order: {', '.join(self._by_name)}"
                )
            given = dict(zip(self._by_name, features, strict=True))
        else:
            raise InputError(
                "features must be a mapping by feature name, a sequence in the config's order or a "
                f"KeyedJaggedTensor, got {type(features).__name__}"
            )
        unknown = [str(name) for name in given if name not in self._by_name]
        missing = [name for name in self._by_name if name not in given]
        if unknown:
            raise InputError(f"unknown features {unknown}: the config has {list(self._by_name)}")
        if missing:
            raise InputError(f"missing features {missing}: every feature of the config takes part in every batch")
        return {name: self._normal(self._by_name[name], value) for name, value in given.items()}

    def _normal(self, feature: Feature, value: object) -> object:
        """JaggedTensor -> Ragged; one input per feature slot (table layout) -> one over the table's rows."""
        if isinstance(value, JaggedTensor):
            return Ragged(value.offsets(), value.values(), value.weights_or_none())
        if not isinstance(value, list | tuple):
            return value
        wanted = feature.table.num_features
        if not any(isinstance(part, Tensor | Sparse | Ragged | JaggedTensor | np.ndarray) for part in value):
            if self.config.layout == "table" and wanted > 1 and any(isinstance(part, list | tuple) for part in value):
                fail(feature.name, "nested lists may be bags or one input per feature slot: give tensors or arrays")
            return value
        if self.config.layout != "table":
            fail(feature.name, "a list of inputs (one per feature slot) is for configs without feature_descriptor")
        if len(value) != wanted:
            fail(feature.name, f"{len(value)} inputs, but the table has num_features {wanted}")
        return self._interleave(feature, [self._normal(feature, part) for part in value])

    def _interleave(self, feature: Feature, parts: list[object]) -> Ragged:
        """Joins the inputs of a table's feature slots: output row `b * num_features + f`."""
        batch = self.config.batch_size_per_tensor_core
        slot = Feature(feature.name, feature.table_id, feature.table, (batch,))
        sizes = {size for part in parts if (size := leading_size(slot, part)) is not None}
        sizes |= {part.row_splits.numel() - 1 for part in parts if isinstance(part, Ragged)}
        if len(sizes) > 1:
            fail(feature.name, f"feature slots have different batch sizes: {sorted(sizes)}")
        bags = [to_bags(slot, part, next(iter(sizes), None)) for part in parts]
        weighted = any(b.weights is not None for b in bags)
        joined = FeatureBags(
            torch.cat([b.ids for b in bags]),
            torch.cat([b.lengths for b in bags]),
            torch.cat([b.full_weights() for b in bags]) if weighted else None,
            (),
        )
        # Slot-major to sample-major is the same transposition as over KeyedJaggedTensor keys, the other way round.
        rows = _transpose(joined, len(bags), bags[0].lengths.numel())
        return Ragged(torch.cat([rows.lengths.new_zeros(1), rows.lengths.cumsum(0)]), rows.ids, rows.weights)

    def _leading(self, values: Mapping[str, object]) -> dict[int, int]:
        """Sizes of leading axes by the config's size, from the inputs that tell one.

        Dense inputs state it.  Without any, the rows of a ragged feature of one axis are the batch.
        """
        found: dict[int, tuple[int, str]] = {}
        for feature in self.features:
            size = leading_size(feature, values[feature.name])
            if size is None:
                continue
            nominal = feature.input_shape[0]
            other, name = found.setdefault(nominal, (size, feature.name))
            if other != size:
                fail(feature.name, f"has {size} samples, but feature {name!r} has {other}: one batch has one size")
        stated = {nominal: size for nominal, (size, _) in found.items()}
        rows: dict[int, tuple[int, str]] = {}
        for feature in self.features:
            value, nominal = values[feature.name], feature.input_shape[0]
            if isinstance(value, Ragged) and len(feature.input_shape) == 1 and nominal not in stated:
                count = max(len(value.row_splits) - 1, 0)
                other, name = rows.setdefault(nominal, (count, feature.name))
                if count != other and nominal not in (count, other):
                    fail(feature.name, f"has {count} rows, but feature {name!r} has {other}: one batch has one size")
                if count > other:  # the whole batch of the config; the other may be sequences
                    rows[nominal] = (count, feature.name)
        return {**{nominal: count for nominal, (count, _) in rows.items()}, **stated}


def _split(kjt: KeyedJaggedTensor) -> dict[str, object]:
    """A KeyedJaggedTensor by key."""
    check_one_stride(kjt)
    keys, stride = list(kjt.keys()), kjt.stride()
    repeated = sorted({key for key in keys if keys.count(key) > 1}) if len(set(keys)) < len(keys) else []
    if repeated:
        raise InputError(f"features {repeated} occur twice in the KeyedJaggedTensor")
    values, lengths, weights = kjt.values(), kjt.lengths().long(), kjt.weights_or_none()
    check_kjt_lengths(kjt)
    if values.dim() != 1 or int(lengths.sum()) != values.numel():
        raise InputError(
            f"KeyedJaggedTensor lengths sum to {int(lengths.sum())}, but it has values of shape {list(values.shape)}"
        )
    if weights is not None and weights.shape != values.shape:
        raise InputError(f"KeyedJaggedTensor has weights of shape {list(weights.shape)} for {values.numel()} values")
    by_key = lengths.view(len(keys), stride)
    sizes = by_key.sum(1).tolist()
    splits = torch.nn.functional.pad(by_key.cumsum(1), (1, 0))
    own_weights = [None] * len(keys) if weights is None else weights.split(sizes)
    return {
        key: Ragged(split, ids, weight)
        for key, split, ids, weight in zip(keys, splits, values.split(sizes), own_weights, strict=True)
    }


def over_slots(prepared: PreparedInput, slots: Sequence[int], stride: int) -> PreparedInput:
    """Lays the bags of features out over their keys; missing samples are empty bags.

    Args:
        prepared: bags by feature.
        slots: number of keys of each feature.
        stride: number of samples that every key gets.

    Returns:
        The same bags by key, `stride` for each; ids sorted ahead are left behind.
    """
    count = prepared.bags[0] if prepared.bags else 0
    lengths = prepared.lengths
    if all(number == 1 for number in slots) and all(number == count for number in prepared.bags):
        padded = functional.pad(
            lengths.view(len(slots), -1) if count else lengths.new_zeros(len(slots), 0), (0, stride - count)
        )
        ids, gains, lengths = prepared.ids, prepared.gains, padded.reshape(-1)
    else:
        sizes = prepared.ids_per_key().tolist()
        values = prepared.ids.split(sizes)
        weights = [None] * len(sizes) if prepared.gains is None else prepared.gains.split(sizes)
        parts = [
            _over_slots(FeatureBags(v, n, w, ()), number, stride)
            for v, n, w, number in zip(values, lengths.split(prepared.bags), weights, slots, strict=True)
        ]
        ids, lengths = torch.cat([part.ids for part in parts]), torch.cat([part.lengths for part in parts])
        gains = None if prepared.gains is None else torch.cat([part.full_weights() for part in parts])
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return PreparedInput(ids, offsets, gains, (stride,) * sum(slots), by_feature=False)


def _over_slots(bags: FeatureBags, slots: int, stride: int) -> FeatureBags:
    """Pads samples to `stride * slots` and orders them slot-major."""
    padding = stride * slots - bags.lengths.numel()
    lengths = functional.pad(bags.lengths, (0, padding)) if padding else bags.lengths
    padded = FeatureBags(bags.ids, lengths, bags.weights, (stride, slots))
    return _transpose(padded, stride, slots) if slots > 1 else padded


def _transpose(bags: FeatureBags, rows: int, columns: int) -> FeatureBags:
    """Bags numbered `row * columns + column` -> numbered `column * rows + row`."""
    count = bags.ids.numel()
    lengths = bags.lengths.view(rows, columns).t().reshape(-1)
    old_starts = (bags.lengths.cumsum(0) - bags.lengths).view(rows, columns).t().reshape(-1)
    new_starts = lengths.cumsum(0) - lengths
    # Where each id of the new order comes from: its bag's old start, plus its place in the bag.
    shift = torch.repeat_interleave(old_starts - new_starts, lengths, output_size=count)
    source = shift + torch.arange(count, device=shift.device)
    weights = None if bags.weights is None else bags.weights[source]
    return FeatureBags(bags.ids[source], lengths, weights, (columns, rows))
