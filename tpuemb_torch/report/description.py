"""What a configuration says, as plain values."""

from __future__ import annotations

from math import isinf
from typing import Any

from tpuemb_torch.config import Config, Limits, Optimizer, Table
from tpuemb_torch.config.ranges import float32_text
from tpuemb_torch.report.program import program_formula

_FLOAT32_BYTES = 4


def describe(config: Config) -> dict[str, Any]:
    """Returns a description of a configuration that JSON can hold.

    Every hyper-parameter has the value that is used, also where the proto leaves it unset.  Numbers are the shortest
    decimals of their float32 values, sizes are in bytes, an open limit is None.
    """
    features: list[list[str]] = [[] for _ in config.tables]
    for feature in config.features:
        features[feature.table_id].append(feature.name)
    tables = [_table(table, names) for table, names in zip(config.tables, features, strict=True)]
    return {
        "mode": config.mode,
        "layout": config.layout,
        "num_hosts": config.num_hosts,
        "num_tensor_cores": config.num_tensor_cores,
        "batch_size_per_tensor_core": config.batch_size_per_tensor_core,
        "sharding_strategy": config.sharding_strategy,
        "pipeline_execution_with_tensor_core": config.pipeline_execution_with_tensor_core,
        "profile_data_directory": config.profile_data_directory,
        "num_learning_rates": config.num_learning_rates,
        "weight_bytes": sum(table["weight_bytes"] for table in tables),
        "slot_bytes": sum(table["slot_bytes"] for table in tables),
        "tables": tables,
        "features": [
            {
                "name": feature.name,
                "table": feature.table.name,
                "input_shape": list(feature.input_shape),
                "output_shape": list(shape),
            }
            for feature, shape in zip(config.features, config.output_shapes, strict=True)
        ],
        "notes": _notes(config),
    }


def slot_names(optimizer: Optimizer) -> list[str]:
    """Returns the names of a table's slot variables."""
    from tpuemb_torch.optimizers import slots_of  # imports torch

    return [slot.name for slot in slots_of(optimizer)]


def untrainable_reason(algorithm: str) -> str | None:
    """Returns why tables with an algorithm train only on request, None for one that can be relied on."""
    from tpuemb_torch.optimizers import rule_class  # imports torch

    return rule_class(algorithm).untrainable_reason


def _table(table: Table, features: list[str]) -> dict[str, Any]:
    optimizer = table.optimizer
    weight_bytes = table.vocabulary_size * table.dimension * _FLOAT32_BYTES
    slots = slot_names(optimizer)
    description: dict[str, Any] = {
        "name": table.name,
        "vocabulary_size": table.vocabulary_size,
        "dimension": table.dimension,
        "num_features": table.num_features,
        "features": features,
        "algorithm": optimizer.algorithm,
        "hyperparameters": {name: _number(value) for name, value in optimizer.hyperparameters.items()},
        "learning_rate": None
        if optimizer.learning_rate.constant is None
        else _number(optimizer.learning_rate.constant),
        "learning_rate_tag": optimizer.learning_rate.tag,
        "step_counter_tag": optimizer.step_counter_tag,
        "clipping_limits": _limits(optimizer.clipping_limits),
        "gradient_clipping_limits": _limits(optimizer.gradient_clipping_limits),
        "weight_decay_factor": _number(optimizer.weight_decay_factor),
        "multiply_weight_decay_factor_by_learning_rate": optimizer.multiply_weight_decay_factor_by_learning_rate,
        "gradient_accumulation": optimizer.accumulates,
        "quantization": None,
        "low_dimensional_packing": optimizer.low_dimensional_packing,
        "hot_id_replication": optimizer.hot_id_replication,
        "slots": slots,
        "weight_bytes": weight_bytes,
        "slot_bytes": len(slots) * weight_bytes,
    }
    if optimizer.quantization is not None:
        quantization = optimizer.quantization
        description["quantization"] = {
            "lower": _number(quantization.lower),
            "upper": _number(quantization.upper),
            "num_buckets": quantization.num_buckets,
        }
    if optimizer.program is not None:
        description["program"] = program_formula(optimizer.program)
    return description


def _notes(config: Config) -> list[str]:
    notes = []
    packed = [t.name for t in config.tables if t.optimizer.low_dimensional_packing == "enabled"]
    replicated = [t.name for t in config.tables if t.optimizer.hot_id_replication in ("enabled", "migration_only")]
    for option, names in (("low-dimensional packing", packed), ("hot-id replication", replicated)):
        if names:
            notes.append(
                f"{option} is a matter of memory layout on a TPU; accepted, without effect here: {_list(names)}"
            )
    for algorithm in sorted({table.optimizer.algorithm for table in config.tables}):
        reason = untrainable_reason(algorithm)
        if reason is not None:
            names = [t.name for t in config.tables if t.optimizer.algorithm == algorithm]
            notes.append(
                f'{algorithm} does not train without experimental={{"{algorithm}"}}: {reason}; all else works: '
                f"{_list(names)}"
            )
    if config.profile_data_directory:
        notes.append(
            "profile_data_directory switches statistics of the input on; the layer's write_stats() writes them there"
        )
    if config.to_proto().HasField("spmd_sharding"):
        notes.append("spmd_sharding concerns the TPU program; accepted, without effect on the embedding")
    return notes


def _list(names: list[str], limit: int = 8) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def _number(value: float | bool) -> float | bool:
    return value if isinstance(value, bool) else float(float32_text(value))


def _limits(limits: Limits) -> list[float | None] | None:
    if not limits.active:
        return None
    return [None if isinf(bound) else _number(bound) for bound in (limits.lower, limits.upper)]
