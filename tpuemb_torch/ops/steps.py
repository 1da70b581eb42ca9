"""Recv and send, with and without deduplication data."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tpuemb_torch.config import Config
from tpuemb_torch.ops.deduplication import DeduplicationTuple, identified
from tpuemb_torch.ops.system import check_config, current
from tpuemb_torch.preprocessing import DeduplicationData, InputError

Serialized = bytes | Config


def recv_tpu_embedding_activations(num_outputs: int, config: Serialized) -> list[Tensor]:
    """Receives the activations of the next enqueued batch.

    Args:
        num_outputs: one per feature (per table, in a config without feature_descriptor).
        config: the serialized config, equal to the installed one.

    Returns:
        float32 tensors of the config's output shapes.
    """
    check_config(config)
    _check_outputs("num_outputs", num_outputs)
    return current().recv_activations()


def send_tpu_embedding_gradients(
    inputs: Sequence[Tensor | None], learning_rates: Sequence[float | Tensor], config: Serialized
) -> None:
    """Applies the optimizers of the oldest received training batch.

    Args:
        inputs: one float32 gradient per activation, of its shape; None is zeros, and is applied.
        learning_rates: one float32 scalar per dynamic tag.
        config: the serialized config, equal to the installed one.

    Raises:
        ValueError, TypeError, RuntimeError: saying what was expected; no table changes then.
    """
    check_config(config)
    current().send_gradients(inputs, learning_rates)


def xla_recv_tpu_embedding_deduplication_data(config: Serialized) -> DeduplicationData:
    """Deduplication data of the batch that the next recv returns."""
    check_config(config)
    return current().recv_deduplication_data()


def xla_recv_tpu_embedding_activations(
    deduplication_data: DeduplicationData | DeduplicationTuple, num_tables: int, config: Serialized
) -> list[Tensor]:
    """`recv_tpu_embedding_activations`, with the deduplication data of the batch; another batch's is refused."""
    check_config(config)
    _check_outputs("num_tables", num_tables)
    return current().recv_activations(identified(deduplication_data))


def xla_send_tpu_embedding_gradients(
    gradients: Sequence[Tensor | None],
    learning_rates: Sequence[float | Tensor],
    deduplication_data: DeduplicationData | DeduplicationTuple,
    config: Serialized,
) -> None:
    """`send_tpu_embedding_gradients`, with the deduplication data of the batch; another batch's is refused."""
    check_config(config)
    current().send_gradients(gradients, learning_rates, identified(deduplication_data))


def xla_recv_tpu_embedding_deduplication_data_v2(
    config: Serialized, embedding_partitions: object = b"", hbm_buffers_config: object = b"", tpu_topology: object = b""
) -> DeduplicationData:
    """The first version; partitions, buffers and topology describe TPU hardware and are not used."""
    return xla_recv_tpu_embedding_deduplication_data(config)


def xla_recv_tpu_embedding_activations_v2(
    deduplication_data: DeduplicationData | DeduplicationTuple,
    num_tables: int,
    config: Serialized,
    embedding_partitions: object = b"",
    hbm_buffers_config: object = b"",
    tpu_topology: object = b"",
) -> list[Tensor]:
    """The first version; partitions, buffers and topology describe TPU hardware and are not used."""
    return xla_recv_tpu_embedding_activations(deduplication_data, num_tables, config)


def xla_send_tpu_embedding_gradients_v2(
    gradients: Sequence[Tensor | None],
    learning_rates: Sequence[float | Tensor],
    deduplication_data: DeduplicationData | DeduplicationTuple,
    config: Serialized,
    embedding_partitions: object = b"",
    hbm_buffers_config: object = b"",
    tpu_topology: object = b"",
) -> None:
    """The first version; partitions, buffers and topology describe TPU hardware and are not used."""
    xla_send_tpu_embedding_gradients(gradients, learning_rates, deduplication_data, config)


def _check_outputs(name: str, count: int) -> None:
    expected = len(current().config.features)
    if count != expected:
        raise InputError(f"{name} is {count}, but the config gives {expected} activations")
