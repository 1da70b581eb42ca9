"""The process-wide embedding layer that the ops work on: configure it, install it, ask for it."""

from __future__ import annotations

from typing import Any

from tpuemb_torch.config import Config, ConfigError, load_config
from tpuemb_torch.embedding import TPUEmbedding

Serialized = bytes | Config

_installed: TPUEmbedding | None = None


def configure_tpu_embedding(config: Serialized, **options: Any) -> TPUEmbedding:
    """Builds the process-wide embedding layer.

    Args:
        config: the serialized TPUEmbeddingConfiguration.
        options: keyword arguments of `TPUEmbedding` (combiners, device, ...).

    Returns:
        The layer, its parameters initialised; an earlier one is replaced.

    Raises:
        ConfigError: for a config that cannot be used.
    """
    if not isinstance(config, Config) and not config:
        raise ValueError("config is empty: give the serialized TPUEmbeddingConfiguration")
    return use(TPUEmbedding(config if isinstance(config, Config) else load_config(config), **options))


def use(embedding: TPUEmbedding) -> TPUEmbedding:
    """Installs an embedding layer (a sharded one, for instance) for the ops, and returns it."""
    if not isinstance(embedding, TPUEmbedding):
        raise TypeError(f"use() takes a TPUEmbedding, got {type(embedding).__name__}")
    global _installed
    _installed = embedding
    return embedding


def is_tpu_embedding_initialized(config: Serialized = b"") -> bool:
    """Whether there is a layer; with a config, whether it has that config."""
    if _installed is None:
        return False
    return not config or _same(config, _installed.config)


def current() -> TPUEmbedding:
    """The installed layer.

    Raises:
        RuntimeError: if there is none.
    """
    if _installed is None:
        raise RuntimeError("no TPU embedding in this process: call configure_tpu_embedding(config) or use(embedding)")
    return _installed


def check_config(config: Serialized) -> None:
    """Raises ValueError unless the config is the installed one."""
    installed = current().config
    if not isinstance(config, Config) and not config:
        raise ValueError("config is empty: give the serialized TPUEmbeddingConfiguration that was configured")
    if not _same(config, installed):
        raise ValueError(
            "config differs from the one that was configured: every op must be given the config of "
            "configure_tpu_embedding"
        )


def _same(config: Serialized, installed: Config) -> bool:
    serialized = config.serialize() if isinstance(config, Config) else config
    if serialized == installed.serialize():
        return True
    try:
        other = config if isinstance(config, Config) else load_config(config)
    except ConfigError:
        return False
    # The same message may be written in another field order.
    return other.to_proto().SerializeToString(deterministic=True) == installed.to_proto().SerializeToString(
        deterministic=True
    )
