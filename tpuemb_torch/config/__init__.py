"""A `TPUEmbeddingConfiguration` as frozen dataclasses: reading, rules, defaults, writing back.  Imports no torch."""

from __future__ import annotations

import warnings

from tpuemb_torch.config.build import build, doubts
from tpuemb_torch.config.errors import ConfigError, ConfigWarning
from tpuemb_torch.config.parse import Format, Source, parse
from tpuemb_torch.config.schema import Config, Feature, LearningRate, Limits, Optimizer, Quantization, Table
from tpuemb_torch.config.validate import problems
from tpuemb_torch.config.write import save_config

__all__ = [
    "Config",
    "ConfigError",
    "ConfigWarning",
    "Feature",
    "LearningRate",
    "Limits",
    "Optimizer",
    "Quantization",
    "Table",
    "load_config",
    "save_config",
]


def load_config(source: Source, *, format: Format | None = None) -> Config:
    """Reads and validates a configuration.

    Args:
        source: a path (`.pb .binpb .pbtxt .textproto .txtpb .json .yaml .yml`), the serialized message as bytes, a text
            proto or JSON as str, or a `TPUEmbeddingConfiguration` message of this package or of TensorFlow.
        format: "binary", "text", "json" or "yaml", where the ending of a path or the type of the source does not say.

    Warns:
        ConfigWarning: for what is legal, but probably not meant, such as a table without a learning rate.

    Raises:
        ConfigError: for the first thing that is wrong; its `field` says where.
    """
    parsed = parse(source, format)
    for problem in problems(parsed.proto):
        raise problem
    for doubt in doubts(parsed.proto):
        warnings.warn(doubt, ConfigWarning, stacklevel=2)
    return build(parsed.proto, parsed.data)
