"""Features of TorchRec that these tables do not have: refused by name, where they would be ignored otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import ParameterSharding, QuantizedCommCodecs, ShardingEnv, ShardingEnv2D
from torchrec.modules.embedding_configs import DataType

#: Fields of a table's sharding: what they may be beside None, as it is so anyway, and what to say of other values.
_FIELDS: Mapping[str, tuple[Any, str]] = {
    "compute_kernel": (EmbeddingComputeKernel.FUSED.value, "use 'fused'"),
    "cache_params": (None, "tables are whole in the memory of their ranks, without a cache: leave it out"),
    "enforce_hbm": (True, "weights and slots are in the memory of the ranks' device: leave it out"),
    "stochastic_rounding": (False, "weights are float32, rounded to nearest: leave it out"),
    "bounds_check_mode": (None, "the layer's id_policy says what happens to ids outside a table: leave it out"),
    "output_dtype": (DataType.FP32, "activations are float32: leave it out"),
    "key_value_params": (None, "tables are in the memory of their ranks: leave it out"),
}


def refusal(
    tables: Iterable[str],
    plan: Mapping[str, ParameterSharding],
    env: ShardingEnv,
    fused_params: Mapping[str, Any] | None,
    qcomm_codecs_registry: Mapping[str, QuantizedCommCodecs] | None,
    module_order: list[str] | None,
) -> ValueError | None:
    """The error that names what cannot be had of a plan, an environment and a sharder's arguments, if there is any.

    Args:
        tables: module names of the tables.
        plan: shardings by module name.
        env: where the tables are to be sharded.
        fused_params: see `EmbeddingBagCollectionSharder`, as the others.
        qcomm_codecs_registry: codecs of quantized communication.
        module_order: `sharded_module_order_overwrite`.
    """
    asked = _asked_for(env, fused_params, qcomm_codecs_registry, module_order)
    problems = [*asked, *_in_plan(tables, plan)]
    return ValueError("; ".join(problems)) if problems else None


def _asked_for(
    env: ShardingEnv,
    fused_params: Mapping[str, Any] | None,
    qcomm_codecs_registry: Mapping[str, QuantizedCommCodecs] | None,
    module_order: list[str] | None,
) -> Iterator[str]:
    if env.process_group is None:
        yield "the ShardingEnv has no process group: use ShardingEnv.from_process_group"
    if isinstance(env, ShardingEnv2D):
        yield (
            "2D parallelism (DMPCollection, ShardingEnv2D) is not supported: it averages the tables and slots of "
            "replicas, which is no step of their optimizers; use DistributedModelParallel over all ranks"
        )
    if qcomm_codecs_registry:
        yield (
            f"quantized communication (qcomm_codecs_registry for {', '.join(sorted(qcomm_codecs_registry))}) is not "
            "supported: activations and gradients travel as float32; give TPUEmbeddingSharder no registry"
        )
    if fused_params:
        yield (
            f"fused_params {sorted(fused_params)} would be ignored: optimizers, rates and precision are those of the "
            "configuration; give fused_params to the sharders of TorchRec's own collections alone"
        )
    if module_order:
        yield f"sharded_module_order_overwrite {module_order} is not supported: leave it out"


def _in_plan(tables: Iterable[str], plan: Mapping[str, ParameterSharding]) -> Iterator[str]:
    for table in tables:
        if table not in plan:
            yield f"table {table!r} is not in the plan: plan all tables of the module"
    for table, sharding in plan.items():
        for field, (allowed, advice) in _FIELDS.items():
            value = getattr(sharding, field)
            if value is not None and value != allowed:
                yield f"table {table!r}: {field} {value} in the plan is not supported: {advice}"
