"""The rules that a `TPUEmbeddingConfiguration` must keep.

Sources: TensorFlow's tensorflow/core/tpu/tpu_embedding_configuration_proto_rewrite.cc (layout),
tpu_embedding_configuration_utils.cc (tags) and tpu_embedding_optimization_parameters_utils.cc (accumulation, slots);
where they are silent, docs/config.md says what is decided here.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd, prod

from tpuemb_torch.config.errors import ConfigError
from tpuemb_torch.config.parse import Proto
from tpuemb_torch.config.unknown import mistyped_fields
from tpuemb_torch.config.validate_optimizer import enum_problem, optimizer_problems, optimizer_tags

_INT32_MAX = 2**31 - 1


def problems(proto: Proto) -> Iterator[ConfigError]:
    """Yields every broken rule, the first one first."""
    for path in mistyped_fields(proto):
        yield ConfigError(path, "has the wrong wire type: the bytes are damaged, or are of another message")
    yield from _job(proto)
    if not proto.table_descriptor:
        yield ConfigError("table_descriptor", "is empty; a configuration needs at least one table")
        return
    yield from _tables(proto)
    if proto.feature_descriptor:
        yield from _feature_layout(proto)
    else:
        yield from _table_layout(proto)
    yield from _tags(proto)


def feature_names(proto: Proto) -> list[str]:
    """Returns the names of the features; one without a name is called by its position, `feature_3`."""
    return [feature.name or f"feature_{i}" for i, feature in enumerate(proto.feature_descriptor)]


def batch_and_rows_per_sample(proto: Proto) -> tuple[int, list[int]]:
    """Returns the batch size per TensorCore, and each table's output rows per sample.

    In the feature layout the batch is the greatest common divisor of the features' sizes, as TensorFlow normalises it.
    """
    if not proto.feature_descriptor:
        return proto.batch_size_per_tensor_core, [table.num_features for table in proto.table_descriptor]
    sizes = [prod(feature.input_shape) for feature in proto.feature_descriptor]
    rows = [0] * len(proto.table_descriptor)
    for feature, size in zip(proto.feature_descriptor, sizes, strict=True):
        rows[feature.table_id] += size
    batch = gcd(*sizes)
    return batch, [count // batch for count in rows]


def _job(proto: Proto) -> Iterator[ConfigError]:
    if proto.mode == Proto.UNSPECIFIED:
        yield ConfigError("mode", "is UNSPECIFIED; set it to INFERENCE, TRAINING or BACKWARD_PASS_ONLY")
    yield from enum_problem("mode", proto.mode, Proto.Mode.DESCRIPTOR)
    yield from enum_problem("sharding_strategy", proto.sharding_strategy, Proto.ShardingStrategy.DESCRIPTOR)
    for name in ("num_hosts", "num_tensor_cores"):
        value = getattr(proto, name)
        if value <= 0:
            yield ConfigError(name, f"{value} must be at least 1; set it to the number in the whole job")


def _tables(proto: Proto) -> Iterator[ConfigError]:
    first: dict[str, int] = {}
    for i, table in enumerate(proto.table_descriptor):
        path = f"table_descriptor[{i}]"
        if not table.name:
            yield ConfigError(f"{path}.name", "is empty; every table needs a name of its own")
        elif table.name in first:
            yield ConfigError(
                f"{path}.name", f"{table.name!r} is the name of table {first[table.name]}, too; rename one of them"
            )
        first.setdefault(table.name, i)
        for size, limit in (("vocabulary_size", 2**63 - 1), ("dimension", _INT32_MAX)):
            value = getattr(table, size)
            if value <= 0:
                yield ConfigError(
                    f"{path}.{size}", f"{value} (table {table.name!r}) is outside [1, {limit}]; set the table's size"
                )
        yield from optimizer_problems(table, path)


def _table_layout(proto: Proto) -> Iterator[ConfigError]:
    batch = proto.batch_size_per_tensor_core
    if batch <= 0:
        yield ConfigError(
            "batch_size_per_tensor_core",
            f"{batch} must be at least 1 where no feature_descriptor is given: list the features, or set the number of "
            "samples per TensorCore (the global batch divided by num_tensor_cores) and each table's num_features",
        )
    for i, table in enumerate(proto.table_descriptor):
        path = f"table_descriptor[{i}].num_features"
        if table.num_features <= 0:
            yield ConfigError(
                path,
                f"{table.num_features} (table {table.name!r}) must be at least 1 where no feature_descriptor is given; "
                "set the number of features that look this table up",
            )
        elif batch * table.num_features > _INT32_MAX:
            yield ConfigError(
                path,
                f"{table.num_features} (table {table.name!r}) times batch_size_per_tensor_core {batch} is more than "
                f"{_INT32_MAX} output rows; reduce one of them",
            )


def _feature_layout(proto: Proto) -> Iterator[ConfigError]:
    if proto.batch_size_per_tensor_core != 0:
        yield ConfigError(
            "batch_size_per_tensor_core",
            f"{proto.batch_size_per_tensor_core} must be 0 where feature_descriptor is given: the batch per TensorCore "
            "is part of each input_shape; remove one of the two",
        )
    for i, table in enumerate(proto.table_descriptor):
        if table.num_features != 0:
            yield ConfigError(
                f"table_descriptor[{i}].num_features",
                f"{table.num_features} (table {table.name!r}) must be 0 where feature_descriptor is given; remove it",
            )
    yield from _features(proto)
    used = {feature.table_id for feature in proto.feature_descriptor}
    for i, table in enumerate(proto.table_descriptor):
        if i not in used:
            yield ConfigError(
                f"table_descriptor[{i}]",
                f"no feature looks table {table.name!r} up; add a feature_descriptor with table_id: {i}, or remove the "
                "table",
            )


def _features(proto: Proto) -> Iterator[ConfigError]:
    num_tables = len(proto.table_descriptor)
    names = feature_names(proto)
    first: dict[str, int] = {}
    sizes: list[int] = []
    in_range = True
    for i, feature in enumerate(proto.feature_descriptor):
        path = f"feature_descriptor[{i}]"
        label = f"feature {names[i]!r}"
        if names[i] in first:
            other = first[names[i]]
            unnamed = "" if feature.name and proto.feature_descriptor[other].name else " (a feature without a name)"
            yield ConfigError(
                f"{path}.name", f"{names[i]!r} is the name of feature {other}, too{unnamed}; rename one of them"
            )
        first.setdefault(names[i], i)
        if not 0 <= feature.table_id < num_tables:
            in_range = False
            yield ConfigError(
                f"{path}.table_id",
                f"{feature.table_id} ({label}) is outside [0, {num_tables - 1}]; use the position of a table",
            )
        if not feature.input_shape:
            yield ConfigError(
                f"{path}.input_shape",
                f"is empty ({label}); list the sizes per TensorCore, batch first, without the axis that is combined",
            )
        for axis, size in enumerate(feature.input_shape):
            if size <= 0:
                yield ConfigError(f"{path}.input_shape[{axis}]", f"{size} ({label}) must be at least 1")
        rows = prod(feature.input_shape)
        if rows > _INT32_MAX:
            yield ConfigError(
                f"{path}.input_shape",
                f"{list(feature.input_shape)} ({label}) has {rows} output rows, more than {_INT32_MAX}; reduce it",
            )
        sizes.append(rows)
    if in_range and all(0 < size <= _INT32_MAX for size in sizes):
        yield from _rows_per_sample(proto)


def _rows_per_sample(proto: Proto) -> Iterator[ConfigError]:
    _, rows_per_sample = batch_and_rows_per_sample(proto)
    for i, (table, rows) in enumerate(zip(proto.table_descriptor, rows_per_sample, strict=True)):
        if rows > _INT32_MAX:
            yield ConfigError(
                f"table_descriptor[{i}]",
                f"its features (table {table.name!r}) have {rows} output rows per sample together, more than "
                f"{_INT32_MAX}; reduce their input_shape",
            )


def _tags(proto: Proto) -> Iterator[ConfigError]:
    where: dict[int, str] = {}
    for i, table in enumerate(proto.table_descriptor):
        for field, tag in optimizer_tags(table.optimization_parameters):
            where.setdefault(tag, f"table_descriptor[{i}].optimization_parameters.{field}")
    for expected, tag in enumerate(sorted(where)):
        if tag != expected:
            yield ConfigError(
                where[tag],
                f"{tag} is found where tag {expected} is missing: the {len(where)} different tags of a configuration, "
                f"step counters included, must be 0 to {len(where) - 1}; renumber them",
            )
            return
