"""The enqueue ops: five kinds, and two with the device ordinal as an input."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from tpuemb_torch.config import Config
from tpuemb_torch.ops.system import current
from tpuemb_torch.preprocessing import Ragged, Sparse
from tpuemb_torch.preprocessing.op_inputs import arbitrary, check_counts, per_feature, per_table, weights_or_none


def enqueue_tpu_embedding_integer_batch(
    batch: Sequence[Tensor], mode_override: str = "unspecified", device_ordinal: int = -1
) -> None:
    """Enqueues one id for every output row of every table.

    Args:
        batch: per table, int32/int64 `[batch * num_features]`.
        mode_override: "unspecified" | "train" | "training" | "inference" | "backward_pass_only".
        device_ordinal: -1, or this process's local rank.
    """
    with current().rejecting():
        config = _config(device_ordinal)
        check_counts(len(config.tables), "tables", batch=batch)
        features = per_table(config, batch)
    _enqueue(features, mode_override, ())


def enqueue_tpu_embedding_sparse_batch(
    sample_indices: Sequence[Tensor],
    embedding_indices: Sequence[Tensor],
    aggregation_weights: Sequence[Tensor],
    mode_override: str = "unspecified",
    device_ordinal: int = -1,
    combiners: Sequence[str] = (),
) -> None:
    """Enqueues bags over every table's output rows.

    Args:
        sample_indices: per table, rank 1, the output row `b * num_features + f` of each id, never decreasing.
        embedding_indices: per table, rank 1, the ids.
        aggregation_weights: per table, rank 1, or empty for 1.0 each.
        mode_override: as for the integer batch.
        device_ordinal: as for the integer batch.
        combiners: one per table; empty: those the layer was built with ("sum" by default).
    """
    with current().rejecting():
        config = _config(device_ordinal)
        check_counts(
            len(config.tables),
            "tables",
            sample_indices=sample_indices,
            embedding_indices=embedding_indices,
            aggregation_weights=aggregation_weights,
        )
        rows = [
            Sparse(place, ids, weights_or_none(weight))
            for place, ids, weight in zip(sample_indices, embedding_indices, aggregation_weights, strict=True)
        ]
        features = per_table(config, rows)
    _enqueue(features, mode_override, combiners)


def enqueue_tpu_embedding_sparse_tensor_batch(
    sample_indices: Sequence[Tensor],
    embedding_indices: Sequence[Tensor],
    aggregation_weights: Sequence[Tensor],
    mode_override: str,
    table_ids: Sequence[int],
    device_ordinal: int = -1,
    combiners: Sequence[str] = (),
    max_sequence_lengths: Sequence[int] = (),
    num_features: Sequence[int] = (),
) -> None:
    """Enqueues sparse features.

    Args:
        sample_indices: per feature, `[n, 2]`: sample, and step of a sequence; with no rows every id is a sample.
        embedding_indices: per feature, rank 1.
        aggregation_weights: per feature, rank 1, or empty.
        mode_override: as for the integer batch.
        table_ids: table of each feature; features of a table take its feature slots in their order.
        device_ordinal: as for the integer batch.
        combiners: one per table, or empty.
        max_sequence_lengths: per feature, 0 for bags; empty is all 0.
        num_features: per feature, how many feature slots of the table it fills; empty is 1 each.
    """
    with current().rejecting():
        config = _config(device_ordinal)
        count = len(table_ids)
        check_counts(count, "table_ids", sample_indices=sample_indices, embedding_indices=embedding_indices)
        check_counts(count, "table_ids", aggregation_weights=aggregation_weights)
        entries = [
            _sparse_entry(place, ids, weight)
            for place, ids, weight in zip(sample_indices, embedding_indices, aggregation_weights, strict=True)
        ]
        features = per_feature(config, entries, table_ids, max_sequence_lengths, num_features)
    _enqueue(features, mode_override, combiners)


def enqueue_tpu_embedding_ragged_tensor_batch(
    sample_splits: Sequence[Tensor],
    embedding_indices: Sequence[Tensor],
    aggregation_weights: Sequence[Tensor],
    mode_override: str,
    table_ids: Sequence[int],
    device_ordinal: int = -1,
    combiners: Sequence[str] = (),
    max_sequence_lengths: Sequence[int] = (),
    num_features: Sequence[int] = (),
) -> None:
    """Enqueues ragged features; as the sparse tensor batch, with row splits (from 0 to the number of ids)."""
    with current().rejecting():
        config = _config(device_ordinal)
        count = len(table_ids)
        check_counts(count, "table_ids", sample_splits=sample_splits, embedding_indices=embedding_indices)
        check_counts(count, "table_ids", aggregation_weights=aggregation_weights)
        entries = [
            Ragged(splits, ids, weights_or_none(weight))
            for splits, ids, weight in zip(sample_splits, embedding_indices, aggregation_weights, strict=True)
        ]
        features = per_feature(config, entries, table_ids, max_sequence_lengths, num_features)
    _enqueue(features, mode_override, combiners)


def enqueue_tpu_embedding_arbitrary_tensor_batch(
    sample_indices_or_row_splits: Sequence[Tensor],
    embedding_indices: Sequence[Tensor],
    aggregation_weights: Sequence[Tensor],
    mode_override: str = "unspecified",
    device_ordinal: int = -1,
    combiners: Sequence[str] = (),
) -> None:
    """Enqueues features of any kind, in the config's order.

    Args:
        sample_indices_or_row_splits: per feature: rank-2 indices (sparse), rank-1 row splits (ragged), or empty
            (dense: every id is its own sample).
        embedding_indices: per feature.
        aggregation_weights: per feature, or empty.
        mode_override: as for the integer batch.
        device_ordinal: as for the integer batch.
        combiners: one per table, or empty.
    """
    with current().rejecting():
        config = _config(device_ordinal)
        check_counts(
            len(config.features),
            "features",
            sample_indices_or_row_splits=sample_indices_or_row_splits,
            embedding_indices=embedding_indices,
            aggregation_weights=aggregation_weights,
        )
        features = arbitrary(config, sample_indices_or_row_splits, embedding_indices, aggregation_weights)
    _enqueue(features, mode_override, combiners)


def dynamic_enqueue_tpu_embedding_ragged_tensor_batch(
    sample_splits: Sequence[Tensor],
    embedding_indices: Sequence[Tensor],
    aggregation_weights: Sequence[Tensor],
    mode_override: str,
    device_ordinal: int | Tensor,
    table_ids: Sequence[int],
    combiners: Sequence[str] = (),
    max_sequence_lengths: Sequence[int] = (),
    num_features: Sequence[int] = (),
) -> None:
    """The ragged tensor batch with the device ordinal as an input."""
    enqueue_tpu_embedding_ragged_tensor_batch(
        sample_splits,
        embedding_indices,
        aggregation_weights,
        mode_override,
        table_ids,
        int(device_ordinal),
        combiners,
        max_sequence_lengths,
        num_features,
    )


def dynamic_enqueue_tpu_embedding_arbitrary_tensor_batch(
    sample_indices_or_row_splits: Sequence[Tensor],
    embedding_indices: Sequence[Tensor],
    aggregation_weights: Sequence[Tensor],
    mode_override: str,
    device_ordinal: int | Tensor,
    combiners: Sequence[str] = (),
) -> None:
    """The arbitrary tensor batch with the device ordinal as an input."""
    enqueue_tpu_embedding_arbitrary_tensor_batch(
        sample_indices_or_row_splits,
        embedding_indices,
        aggregation_weights,
        mode_override,
        int(device_ordinal),
        combiners,
    )


def enqueue_tpu_embedding_batch(*_args: object, **_kwargs: object) -> None:
    """Refused: its inputs are opaque strings that only the TPU runtime can read."""
    raise NotImplementedError(
        "EnqueueTPUEmbeddingBatch takes opaque serialized strings; use enqueue_tpu_embedding_sparse_tensor_batch, "
        "_ragged_tensor_batch or _arbitrary_tensor_batch"
    )


def _config(device_ordinal: int) -> Config:
    """The installed config, for a call for this process's core."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if device_ordinal not in (-1, local_rank):
        raise ValueError(
            f"device_ordinal {device_ordinal}: a process drives one core, here {local_rank}; "
            "run one process per core (torchrun) and give -1"
        )
    return current().config


def _enqueue(features: dict[str, object], mode: str, combiners: Sequence[str]) -> None:
    current().enqueue_with_combiners(features, mode, list(combiners) or None)


def _sparse_entry(place: Tensor, ids: Tensor, weight: Tensor) -> Sparse | Ragged:
    place, ids = torch.as_tensor(place), torch.as_tensor(ids)
    if place.numel() == 0 and ids.numel():
        # No indices: every id is its own sample.
        return Ragged(torch.arange(ids.numel() + 1), ids, weights_or_none(weight))
    if place.numel() == 0:
        place = torch.zeros(0, 2, dtype=torch.int64)
    return Sparse(place, ids, weights_or_none(weight))
