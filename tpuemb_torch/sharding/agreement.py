"""Whether all ranks shard the same layer: its configuration, options and plan.

Equal ranks pay for one small all_reduce; only ranks that differ exchange more, to say in what.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields

import torch
import torch.distributed as dist
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.types import ParameterSharding, ShardingType

from tpuemb_torch._version import __version__
from tpuemb_torch.collection import TPUEmbeddingBagCollection
from tpuemb_torch.config import Config, Optimizer
from tpuemb_torch.sharding.exchange import communication_device

#: Differences that a rank names, and ranks that the error names.
MAX_DIFFERENCES = 3
MAX_RANKS = 4

#: In a maximum, a rank that has no say.
NO_SAY = torch.iinfo(torch.int64).min

Description = Mapping[str, str]


def check_same_layer(
    module: TPUEmbeddingBagCollection,
    plan: Mapping[str, ParameterSharding],
    device: torch.device,
    group: dist.ProcessGroup,
) -> None:
    """Raises on all ranks unless all shard the same layer in the same way (collective).

    `kernel` may differ, as machines do: each row is stepped on one rank, and kernels agree up to rounding.  Only
    "fbgemm", which groups tables otherwise, must be that of all or of none.

    Args:
        module: the unsharded collection.
        plan: its plan, by module name.
        device: where this rank's part will be; its type must be that of the others.
        group: the ranks.

    Raises:
        ValueError: naming ranks that differ from the first, and in what.
    """
    check_same(describe(module, plan, device), group)


def check_same(own: Description, group: dist.ProcessGroup) -> None:
    """Raises ValueError on all ranks, naming differences, unless all have the same description (collective)."""
    digest = hashlib.blake2b(json.dumps(list(own.items())).encode(), digest_size=16).digest()
    words = [int.from_bytes(digest[start : start + 8], "little", signed=True) for start in (0, 8)]
    state = torch.tensor(extremes(words), device=communication_device(group))
    dist.all_reduce(state, op=dist.ReduceOp.MAX, group=group)
    if all(low == high for low, high in ranges_of(state.tolist())):
        return
    sent: list[Description | None] = [own if dist.get_rank(group) == 0 else None]
    dist.broadcast_object_list(sent, group_src=0, group=group)
    first, rank = dist.get_global_rank(group, 0), dist.get_rank()
    assert sent[0] is not None
    found = _differences(own, sent[0], first)
    reports: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(reports, f"rank {rank}: {found}" if found else None, group=group)
    different = [report for report in reports if report is not None]
    rest = f"\nand {len(different) - MAX_RANKS} more ranks" if len(different) > MAX_RANKS else ""
    raise ValueError(
        "the ranks shard different layers; give all the same configuration, options and plan:\n"
        + "\n".join(different[:MAX_RANKS])
        + rest
    )


def describe(
    module: TPUEmbeddingBagCollection, plan: Mapping[str, ParameterSharding], device: torch.device
) -> Description:
    """What must be equal on all ranks, by what a message calls it."""
    config = module.config
    combiners = {key.table: key.combiner for key in module.keys}
    described = {
        "the version of tpuemb_torch": __version__,
        "the type of the device": device.type,
        **{name: repr(getattr(module, name)) for name in ("id_policy", "gradient_reduction", "seed")},
        "whether the kernel is fbgemm": str(module.kernel_kind == "fbgemm"),
        "experimental": ", ".join(sorted(module.experimental)) or "none",
        **dict(_config(config)),
    }
    if any(sharding.sharding_type == ShardingType.TABLE_ROW_WISE.value for sharding in plan.values()):
        described["the number of ranks of its node (LOCAL_WORLD_SIZE)"] = str(get_local_size())
    for table in config.tables:
        name = f"table {table.name!r}"
        described |= {
            f"{name}: vocabulary_size": str(table.vocabulary_size),
            f"{name}: dimension": str(table.dimension),
            f"{name}: num_features": str(table.num_features),
            f"{name}: combiner": combiners.get(table.name, "none"),
            **{f"{name}: {key}": value for key, value in _optimizer(table.optimizer)},
            **{f"{name}: {key}": value for key, value in _sharding(plan.get(module.bag_names[table.name]))},
        }
    for feature in config.features:
        described[f"feature {feature.name!r}: table"] = repr(feature.table.name)
        described[f"feature {feature.name!r}: input_shape"] = str(list(feature.input_shape))
    return described


def _config(config: Config) -> Iterator[tuple[str, str]]:
    for name in (
        "mode",
        "num_hosts",
        "num_tensor_cores",
        "batch_size_per_tensor_core",
        "sharding_strategy",
        "pipeline_execution_with_tensor_core",
        "layout",
    ):
        yield name, str(getattr(config, name))
    # Rank 0 writes there: the others may call the directory by another name.
    yield "whether there is a profile_data_directory", str(bool(config.profile_data_directory))
    yield "the number of tables", str(len(config.tables))
    yield "the number of features", str(len(config.features))
    names = {"table": [table.name for table in config.tables], "feature": [f.name for f in config.features]}
    for kind, given in names.items():
        yield from ((f"the name of {kind} {number}", repr(name)) for number, name in enumerate(given))


def _optimizer(optimizer: Optimizer) -> Iterator[tuple[str, str]]:
    for name in (field.name for field in fields(optimizer)):
        value = getattr(optimizer, name)
        if name == "hyperparameters":
            yield from ((key, str(number)) for key, number in value.items())
        elif isinstance(value, bytes):
            yield name, f"one with BLAKE2b {hashlib.blake2b(value, digest_size=8).hexdigest()}"
        else:
            yield name, str(value)


def _sharding(sharding: ParameterSharding | None) -> Iterator[tuple[str, str]]:
    if sharding is None:
        yield "sharding", "not in the plan"
        return
    shards = getattr(sharding.sharding_spec, "shards", None) or []
    yield "sharding", sharding.sharding_type
    yield "compute kernel in the plan", sharding.compute_kernel
    yield "exchange", getattr(sharding, "exchange", "pooled")
    yield "ranks of its shards", _runs(sharding.ranks or [])
    yield "number of its shards", str(len(shards))
    # Shards by rows follow from their number; those of a large job would be long to tell.
    if len(shards) < 64 or "row" not in sharding.sharding_type:
        yield "shards", str([(list(s.shard_offsets), list(s.shard_sizes), str(s.placement)) for s in shards])


def _runs(numbers: Sequence[int]) -> str:
    """Numbers, consecutive ones as "first-last"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _differences(own: Description, first: Description, rank: int) -> str:
    """The first differences from the description of another rank; "" if there is none."""
    names = [name for name in {**first, **own} if own.get(name) != first.get(name)]
    found = [
        f"{name} is {own.get(name, 'not there')}, on rank {rank} it is {first.get(name, 'not there')}"
        for name in names[:MAX_DIFFERENCES]
    ]
    more = [f"and {len(names) - MAX_DIFFERENCES} more differences"] if len(names) > MAX_DIFFERENCES else []
    return "; ".join(found + more)


def extremes(words: Sequence[int]) -> list[int]:
    """Words whose maximum over ranks tells the largest and the smallest of each: `~x` falls as x grows."""
    return [*words, *(~word for word in words)]


def ranges_of(maxima: Sequence[int]) -> list[tuple[int, int]]:
    """The smallest and the largest of each word, from maxima of `extremes`; both `NO_SAY` where no rank has one."""
    half = len(maxima) // 2
    return [
        (NO_SAY if high == NO_SAY == low else ~low, high)
        for high, low in zip(maxima[:half], maxima[half:], strict=True)
    ]
