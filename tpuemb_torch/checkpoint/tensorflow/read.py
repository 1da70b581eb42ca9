"""`read_tensorflow`: a checkpoint's tables as tensors."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable

from torch import Tensor

from tpuemb_torch.checkpoint.errors import CheckpointError
from tpuemb_torch.checkpoint.tensorflow.bundle import TensorBundle
from tpuemb_torch.checkpoint.tensorflow.matching import Contents, Mapped, find_tables
from tpuemb_torch.checkpoint.tensorflow.sources import read_all
from tpuemb_torch.config import Config, load_config
from tpuemb_torch.config.parse import Source as ConfigSource
from tpuemb_torch.sharding.progress import bytes_bar


class CheckpointWarning(UserWarning):
    """A checkpoint holds more than is read from it."""


def read_tensorflow(
    prefix: str | os.PathLike[str],
    config: Config | ConfigSource | None = None,
    *,
    mapping: Mapped | None = None,
    progress: Callable[[int], object] | None = None,
) -> dict[str, dict[str, Tensor]]:
    """Reads the embedding tables of a TensorFlow checkpoint, without TensorFlow.

    Object-based checkpoints (`TPUEmbedding`, `TPUEmbeddingForServing`, SparseCore's `TPUEmbeddingV2` with its stacks,
    alone or inside a model) are read by their object graph, name-based ones (v1 Saver, TPUEstimator) by the names of
    variables and slots.

    Args:
        prefix: the checkpoint, as TensorFlow names it (`.../ckpt-12`); a folder means the latest one in it.
        config: a `Config`, or what `load_config` takes: the tables to read, their shapes, slots and (for name-based
            checkpoints of several hosts) sharding.  Without it, all tables are read with all slots, and the rows of
            host-sharded variables are taken to be in DIV order, the default of TensorFlow.
        mapping: for tables with another name in the checkpoint, that name, or `{"parameters": tensor, slot: tensor,
            ...}`.
        progress: called with numbers of bytes as they are read, instead of the progress bar on terminals.

    Returns:
        By table, then "parameters" and the slots by the names of the Load and Retrieve ops: `[rows, dimension]` on the
        CPU, of the stored type, rows in logical order without padding.

    Warns:
        CheckpointWarning: if tensors of a table's shape are left that the config has no place for.

    Raises:
        CheckpointError: if there is no checkpoint or it is damaged (files and tensors are named), or a table or a slot
            of the config is missing, has another shape, or cannot be told from another.
    """
    if config is not None and not isinstance(config, Config):
        config = load_config(config)
    contents = find_tables(TensorBundle(prefix), config, mapping)
    if contents.missing:
        raise CheckpointError(missing_slots(contents))
    left = unread_of_tables(contents)
    if config is not None and left:
        warnings.warn(
            f"checkpoint {contents.bundle.prefix} has {', '.join(map(repr, left))}, which the config has no place for",
            CheckpointWarning,
            stacklevel=2,
        )
    sources = [source for slots in contents.tables.values() for source in slots.values()]
    total = sum(source.shape[0] * source.shape[1] * source.dtype.itemsize for source in sources)
    with bytes_bar(f"reading {contents.bundle.prefix}", total) as bar:
        contents.bundle.progress = bar.update if progress is None else progress
        return {
            table: {slot: read_all(source) for slot, source in slots.items()}
            for table, slots in contents.tables.items()
        }


def missing_slots(contents: Contents) -> str:
    """What to say about slots that the config has and the checkpoint has not."""
    listed = "; ".join(f"table {table!r}: {', '.join(slots)}" for table, slots in contents.missing.items())
    return (
        f"checkpoint {contents.bundle.prefix} has no tensors for slots of the config's optimizers ({listed}); "
        "name them in a mapping, or use a config with the optimizers that the checkpoint was trained with"
    )


def unread_of_tables(contents: Contents) -> list[str]:
    """Unused tensors with the shape of a table that was read: slots of other optimizers, most likely."""
    shapes = {tuple(slots["parameters"].shape) for slots in contents.tables.values()}
    return [name for name in contents.unused if contents.bundle.entry(name).shape in shapes]
