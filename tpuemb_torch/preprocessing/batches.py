"""The features of a batch, as users give them -> a `PreparedBatch`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import prod

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tpuemb_torch.config import Config
from tpuemb_torch.preprocessing.bags import FeatureBags
from tpuemb_torch.preprocessing.deduplication import DeduplicationData
from tpuemb_torch.preprocessing.distinct import SortedIds, sort_ids
from tpuemb_torch.preprocessing.inputs import InputError, Ragged
from tpuemb_torch.preprocessing.keyed import Key, KeyedPreparation
from tpuemb_torch.preprocessing.prepared import PreparedBatch, PreparedInput, first_bags
from tpuemb_torch.preprocessing.slots import SlotLayout


class BatchPreparation:
    """Checks the features of batches and lays them out for the lookup; it needs no tables.

    `TPUEmbedding.preparation` is the one to use: it can be pickled, and called in data-loading workers.

    Args:
        config: the config.
        keys: the collection's keys, in its order; those of a table are neighbours.
        id_policy: what happens to ids outside a table: "error" | "drop" | "clamp".
    """

    def __init__(self, config: Config, keys: Sequence[Key], id_policy: str) -> None:
        self.config = config
        self._layout = SlotLayout(config)
        position = {feature.name: index for index, feature in enumerate(config.features)}
        features = {key.feature: key for key in keys}
        #: Place in the config of each feature, in the order in which the collection looks them up.
        self.order = [position[name] for name in features]
        self.slots = [self._layout.slots[index] for index in self.order]
        self._one_axis = all(len(feature.input_shape) == 1 for feature in config.features)
        self._prepare = KeyedPreparation(
            [Key(name, name, key.table, key.vocabulary_size, key.combiner) for name, key in features.items()],
            id_policy,
            by_feature=True,
        )
        # The tables' rows back to back, as the collection orders them: one sort finds the distinct rows of all.
        tables = list(dict.fromkeys(key.table for key in keys))
        number = {table.name: index for index, table in enumerate(config.tables)}
        first_rows = [0, *accumulate(config.tables[number[name]].vocabulary_size for name in tables)]
        self._rows = first_rows[-1]
        self._table_starts = torch.tensor(first_rows[:-1], dtype=torch.int64)
        self._table_numbers = torch.tensor([number[name] for name in tables], dtype=torch.int64)
        start_of = dict(zip(tables, first_rows, strict=False))
        self._feature_starts = torch.tensor([start_of[key.table] for key in features.values()], dtype=torch.int64)
        self.origin = self._origin(self._prepare.combiners)

    def __call__(
        self, features: object, *, deduplicate: bool = False, combiners: Mapping[str, str] | None = None
    ) -> PreparedBatch:
        """Prepares a batch.

        Args:
            features: as for `TPUEmbedding.forward`; a batch that is prepared already is checked to be of this layer.
            deduplicate: whether to sort the ids as well, which an unsharded step then need not do.
            combiners: combiners by table for this batch, instead of the layer's.

        Raises:
            InputError: for a malformed batch.
        """
        if isinstance(features, PreparedBatch):
            self._check_origin(features)
            return self.deduplicated(features) if deduplicate else features
        origin = self.origin if combiners is None else self._origin(combiners)
        flat = self._flat(features)
        if flat is None:
            bags = self._layout.bags(features)
            shapes = tuple(feature_bags.shape for feature_bags in bags)
            prepared = self._prepare(*_concatenated([bags[index] for index in self.order]), combiners)
        else:
            ids, lengths, weights, size = flat
            shapes = ((size,),) * len(self.order)
            prepared = self._prepare(ids, lengths, weights, [size] * len(self.order), combiners)
        batch = PreparedBatch(prepared, shapes, origin)
        return self.deduplicated(batch) if deduplicate else batch

    def masks(self, batch: PreparedBatch) -> dict[str, Tensor]:
        """Which samples have an id: bool of each feature's sample shape (`[batch, steps]` for a sequence), by name."""
        present = (batch.input.lengths > 0).split(batch.input.bags)
        found = {index: mask.view(batch.shapes[index]) for index, mask in zip(self.order, present, strict=True)}
        return {feature.name: found[index] for index, feature in enumerate(self.config.features)}

    def deduplicated(self, batch: PreparedBatch) -> PreparedBatch:
        """The batch with its ids sorted."""
        prepared = batch.input
        if prepared.ordered is not None:
            return batch
        starts = self._feature_starts.to(prepared.ids.device)
        shift = torch.repeat_interleave(starts, prepared.ids_per_key(), output_size=prepared.ids.numel())
        ordered = sort_ids(prepared.ids + shift, self._rows)
        bags, by_feature = prepared.bags, prepared.by_feature
        prepared = PreparedInput(prepared.ids, prepared.offsets, prepared.gains, bags, by_feature, ordered)
        return PreparedBatch(prepared, batch.shapes, batch.origin)

    def deduplication_data(self, batch: PreparedBatch, number: int) -> DeduplicationData:
        """Deduplication data of a batch whose ids are sorted; one process drives one core."""
        prepared, ordered = batch.input, batch.input.ordered
        assert ordered is not None
        gains = (
            torch.ones(prepared.ids.numel(), dtype=torch.float32, device=prepared.ids.device)
            if prepared.gains is None
            else prepared.gains
        )
        ids_of = dict(zip(self.order, prepared.ids_per_key().tolist(), strict=True))
        bags_of = dict(zip(self.order, prepared.bags, strict=True))
        # The collection's order -> the config's.
        first_ids = dict(zip(self.order, [0, *accumulate(ids_of[index] for index in self.order)], strict=False))
        first = dict(zip(self.order, first_bags(prepared.bags).tolist(), strict=False))
        config_order = range(len(self.order))

        def in_config_order(values: Tensor, begin: Mapping[int, int], size: Mapping[int, int]) -> Tensor:
            if self.order == list(config_order):
                return values
            return torch.cat([values[begin[index] : begin[index] + size[index]] for index in config_order])

        # torch can do little with uint32 tensors: the same bits as int32 until the end.
        indices = in_config_order(ordered.inverse().int(), first_ids, ids_of)
        return DeduplicationData(
            number,
            ((indices.view(torch.uint32), in_config_order(gains, first_ids, ids_of)),),
            (self._table_and_id(ordered),),
            (in_config_order(prepared.lengths, first, bags_of),),
        )

    def _check_origin(self, batch: PreparedBatch) -> None:
        """Raises InputError for a batch that was prepared for another config or other combiners."""
        if batch.origin != self.origin:
            raise InputError(
                "the batch was prepared for another config or other combiners: prepare it with this layer's preparation"
            )

    def _table_and_id(self, ordered: SortedIds) -> Tensor:
        starts = self._table_starts.to(ordered.rows.device)
        table = torch.searchsorted(starts, ordered.rows, right=True) - 1
        return torch.stack([self._table_numbers.to(table.device)[table], ordered.rows - starts[table]], dim=1)

    def _flat(self, features: object) -> tuple[Tensor, Tensor, Tensor | None, int] | None:
        """Ids, lengths, weights and size of a batch that needs no look at each feature, else None."""
        if not self._one_axis:
            return None
        if isinstance(features, KeyedJaggedTensor):
            given = list(features.keys())
            if len(given) != len(self.order) or set(given) != set(self._prepare.names):
                return None
            return self._prepare.checked(features)
        if isinstance(features, Mapping):
            if len(features) != len(self.order) or any(name not in features for name in self._prepare.names):
                return None
            values = [features[name] for name in self._prepare.names]
        elif isinstance(features, list | tuple) and len(features) == len(self.order):
            values = [features[index] for index in self.order]
        else:
            return None
        return _all_ragged(values) if isinstance(values[0], Ragged) else _one_id_each(values)

    def _origin(self, combiners: Mapping[str, str]) -> str:
        described = repr([combiners[table.name] for table in self.config.tables]).encode()
        return hashlib.sha256(self.config.serialize() + described).hexdigest()[:16]


def _all_ragged(values: Sequence[object]) -> tuple[Tensor, Tensor, Tensor | None, int] | None:
    """Ragged features with the same number of rows, else None; so is what is malformed, for the other path to name."""
    if not all(
        isinstance(value, Ragged)
        and value.batch_size is None
        and isinstance(value.row_splits, Tensor)
        and isinstance(value.ids, Tensor)
        and value.ids.dim() == 1
        for value in values
    ):
        return None
    ragged: list[Ragged] = list(values)  # type: ignore[arg-type]
    first = ragged[0]
    kinds = {(r.row_splits.shape, r.row_splits.dtype, r.ids.dtype, r.ids.device, r.weights is None) for r in ragged}
    integers = (torch.int32, torch.int64)
    if len(kinds) > 1 or first.row_splits.dim() != 1 or first.row_splits.numel() == 0:
        return None
    if first.row_splits.dtype not in integers or first.ids.dtype not in integers or first.ids.is_meta:
        return None
    splits = torch.stack([r.row_splits for r in ragged])
    counts = [r.ids.numel() for r in ragged]
    lengths = splits.diff(dim=1)
    if bool((splits[:, 0] != 0).any() | (lengths < 0).any()) or splits[:, -1].tolist() != counts:
        return None
    weights = None
    if first.weights is not None:
        given = [r.weights for r in ragged]
        if not all(
            isinstance(w, Tensor) and w.dtype is torch.float32 and w.shape == r.ids.shape
            for w, r in zip(given, ragged, strict=True)
        ):
            return None
        weights = torch.cat(given).detach()  # type: ignore[arg-type]
        if not bool(torch.isfinite(weights).all()):
            return None
    ids = torch.cat([r.ids for r in ragged]).long()
    return ids, lengths.reshape(-1).long(), weights, first.row_splits.numel() - 1


def _one_id_each(values: Sequence[object]) -> tuple[Tensor, Tensor, None, int] | None:
    """Dense features of one id a sample, else None."""
    first = values[0]
    if not isinstance(first, Tensor) or first.dtype not in (torch.int32, torch.int64):
        return None
    if first.is_meta or first.is_nested:
        return None
    shape, dtype, device = first.shape, first.dtype, first.device
    if len(shape) != 1 or not all(
        isinstance(value, Tensor)
        and value.shape == shape
        and value.dtype == dtype
        and value.layout is torch.strided
        and value.device == device
        for value in values
    ):
        return None
    ids = torch.cat(list(values)).long()  # type: ignore[arg-type]
    return ids, torch.ones_like(ids), None, shape[0]


def _concatenated(bags: Sequence[FeatureBags]) -> tuple[Tensor, Tensor, Tensor | None, list[int]]:
    weighted = any(b.weights is not None for b in bags)
    return (
        torch.cat([b.ids for b in bags]),
        torch.cat([b.lengths for b in bags]),
        torch.cat([b.full_weights() for b in bags]) if weighted else None,
        [prod(b.shape) for b in bags],
    )
