"""The configuration as frozen dataclasses: what the rest of the package reads.

Nothing here imports torch.  Every float is the float32 value of the proto, held as a Python float.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from tpuemb_torch.protos import tpu_embedding_configuration_pb2 as configuration_pb2

Layout = Literal["feature", "table"]
Mode = Literal["inference", "training", "backward_pass_only"]
ShardingStrategy = Literal["div", "mod"]
Accumulation = Literal["unspecified", "enabled", "disabled"]


@dataclass(frozen=True)
class LearningRate:
    """A constant rate, or the tag of a dynamic one (exactly one of the two is set)."""

    constant: float | None = None
    tag: int | None = None


@dataclass(frozen=True)
class Limits:
    """An element-wise clipping range; an absent bound is infinite."""

    lower: float = float("-inf")
    upper: float = float("inf")

    @property
    def active(self) -> bool:
        """Whether the range can change a value."""
        return self.lower != float("-inf") or self.upper != float("inf")


@dataclass(frozen=True)
class Quantization:
    """Simulated quantization of looked-up rows: `num_buckets` values, evenly spaced in [lower, upper]."""

    lower: float
    upper: float
    num_buckets: int


@dataclass(frozen=True)
class Optimizer:
    """One table's `OptimizationParameters`, resolved: every field has the value that will be used."""

    #: Name of the `parameters` oneof case, e.g. "adagrad".
    algorithm: str
    #: Every scalar field of that case by proto name; proto3 defaults (0, False) filled in.
    hyperparameters: Mapping[str, float | bool]
    learning_rate: LearningRate
    clipping_limits: Limits = Limits()
    gradient_clipping_limits: Limits = Limits()
    weight_decay_factor: float = 0.0
    multiply_weight_decay_factor_by_learning_rate: bool = False
    quantization: Quantization | None = None
    accumulation: Accumulation = "unspecified"
    low_dimensional_packing: str = "unspecified"
    hot_id_replication: str = "unspecified"
    #: frequency_aware_adagrad only: the tag of its step counter.
    step_counter_tag: int | None = None
    #: user_defined_program only: the serialized `xla.HloModuleProto`.
    program: bytes | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "hyperparameters", MappingProxyType(dict(self.hyperparameters)))

    def __hash__(self) -> int:
        return hash((self.algorithm, tuple(self.hyperparameters.items()), self.learning_rate))

    def __reduce__(self) -> tuple[object, ...]:  # a MappingProxyType does not pickle
        values = [getattr(self, name) for name in self.__dataclass_fields__]
        values[1] = dict(self.hyperparameters)
        return (Optimizer, tuple(values))

    @property
    def accumulates(self) -> bool:
        """Whether gradients are summed over all cores before a step; else each core's are a step of their own."""
        return self.accumulation != "disabled"

    @property
    def tags(self) -> tuple[int, ...]:
        """The dynamic-input tags this table uses (SendTPUEmbeddingGradients' `learning_rates` indices)."""
        own = (self.learning_rate.tag, self.step_counter_tag)
        return tuple(tag for tag in own if tag is not None)


@dataclass(frozen=True)
class Table:
    """One `TableDescriptor`."""

    name: str
    vocabulary_size: int
    dimension: int
    #: Output rows per sample; normalised, so it is also filled where the proto lists features.
    num_features: int
    optimizer: Optimizer


@dataclass(frozen=True)
class Feature:
    """One `FeatureDescriptor`; in the table layout, one stands for each table."""

    name: str
    table_id: int
    table: Table
    #: Per-core shape without the reduced axis.
    input_shape: tuple[int, ...]


@dataclass(frozen=True)
class Config:
    """A `TPUEmbeddingConfiguration`, validated and normalised.

    `to_proto()` returns a copy of exactly what was loaded, unknown fields included.
    """

    tables: tuple[Table, ...]
    features: tuple[Feature, ...]
    mode: Mode
    num_hosts: int
    num_tensor_cores: int
    #: Normalised: in the feature layout, the greatest common divisor of the features' sizes.
    batch_size_per_tensor_core: int
    sharding_strategy: ShardingStrategy
    pipeline_execution_with_tensor_core: bool
    profile_data_directory: str
    layout: Layout
    _proto: bytes = field(repr=False)

    @cached_property
    def num_learning_rates(self) -> int:
        """Number of dynamic tags, step-counter tags included."""
        return len({tag for table in self.tables for tag in table.optimizer.tags})

    @cached_property
    def output_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Per-core shapes of RecvTPUEmbeddingActivations' outputs, in order."""
        return tuple((*f.input_shape, f.table.dimension) for f in self.features)

    def to_proto(self) -> configuration_pb2.TPUEmbeddingConfiguration:
        """Returns the loaded message (a new copy)."""
        from tpuemb_torch.protos import tpu_embedding_configuration_pb2 as configuration_pb2

        return configuration_pb2.TPUEmbeddingConfiguration.FromString(self._proto)

    def serialize(self) -> bytes:
        """Returns the serialized message."""
        return self._proto

    def to_text(self) -> str:
        """Returns the message in protobuf text format."""
        from tpuemb_torch.config.write import to_text

        return to_text(self.to_proto())
