"""What TorchRec has and these tables do not is refused by name, on every rank, before anything is sharded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torch.distributed.device_mesh import init_device_mesh
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.model_tracker.types import DeltaTrackerConfig
from torchrec.distributed.types import CacheParams, KeyValueParams, ShardingEnv, ShardingEnv2D
from torchrec.modules.embedding_configs import DataType

import tpuemb_torch as tpuemb
from tests.distributed.torchrec_cases import CONFIG
from tests.ranks import run_ranks
from tpuemb_torch.sharding import TPUEmbeddingSharder, model_plan


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = tpuemb.TPUEmbeddingBagCollection(CONFIG, seed=1)
        self.over = torch.nn.Linear(4, 1)


def wrap(sharder: TPUEmbeddingSharder | None = None, env: ShardingEnv | None = None, **fields: Any) -> Any:
    """DistributedModelParallel with a sharder, an environment, and these fields in the plan of one table."""
    model = Model()
    plan = model_plan(model, tpuemb.make_plan(CONFIG, 2, sharding="table_wise"))
    shardings = plan.plan["embedding"]
    if "missing" in fields:
        del shardings[fields["missing"]]
    else:
        shardings["item"] = replace(shardings["item"], **fields)
    return DistributedModelParallel(model, env, torch.device("cpu"), plan, [sharder or TPUEmbeddingSharder()])


def two_dimensional() -> ShardingEnv2D:
    groups = [dist.new_group([rank]) for rank in range(2)]
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    return ShardingEnv2D(groups[dist.get_rank()], dist.group.WORLD, dist.group.WORLD, mesh)


QCOMM = QCommsConfig(forward_precision=CommType.FP16, backward_precision=CommType.BF16)
#: How to ask for it on a rank, and what the error names.
REFUSED: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "quantized": (
        lambda: wrap(TPUEmbeddingSharder(qcomm_codecs_registry=get_qcomm_codecs_registry(QCOMM))),
        ("quantized communication", "qcomm_codecs_registry", "POOLED_EMBEDDINGS_ALL_TO_ALL", "float32"),
    ),
    "2D": (lambda: wrap(env=two_dimensional()), ("2D parallelism", "DMPCollection", "use DistributedModelParallel")),
    "fused_params": (
        lambda: wrap(TPUEmbeddingSharder(fused_params={"learning_rate": 0.1, "eps": 1e-8})),
        ("fused_params ['eps', 'learning_rate']", "the configuration"),
    ),
    "module order": (
        lambda: wrap(TPUEmbeddingSharder(sharded_module_order_overwrite=["row_wise"])),
        ("sharded_module_order_overwrite ['row_wise']",),
    ),
    "kernel": (lambda: wrap(compute_kernel="fused_uvm"), ("'item'", "compute_kernel fused_uvm", "use 'fused'")),
    "cache": (lambda: wrap(cache_params=CacheParams(load_factor=0.2)), ("'item'", "cache_params")),
    "hbm": (lambda: wrap(enforce_hbm=False), ("'item'", "enforce_hbm False")),
    "rounding": (lambda: wrap(stochastic_rounding=True), ("'item'", "stochastic_rounding True", "to nearest")),
    "bounds": (lambda: wrap(bounds_check_mode=BoundsCheckMode.WARNING), ("'item'", "bounds_check_mode", "id_policy")),
    "output": (lambda: wrap(output_dtype=DataType.FP16), ("'item'", "output_dtype", "float32")),
    "key value": (lambda: wrap(key_value_params=KeyValueParams()), ("'item'", "key_value_params")),
    "missing": (lambda: wrap(missing="user"), ("'user' is not in the plan",)),
}


def ask(rank: int, world: int) -> dict[str, str]:
    """Messages by what was asked for; what begins with "one: ", the last rank alone asks for."""
    messages = {}
    for name, (request, _) in REFUSED.items():
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            request()
        messages[name] = str(caught.value)
    for name in ("quantized", "output"):
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            (REFUSED[name][0] if rank == 1 else wrap)()
        messages[f"one: {name}"] = str(caught.value)
    return messages


def test_what_is_not_there_is_refused_by_name_on_every_rank() -> None:
    results = run_ranks(2, ask)
    for name, (_, words) in REFUSED.items():
        for messages in results:
            assert all(word in messages[name] for word in words), messages[name]
    for name in ("quantized", "output"):
        one, two = (messages[f"one: {name}"] for messages in results)
        assert one == f"rank 1: {two}"
        assert all(word in two for word in REFUSED[name][1])


def accepted(rank: int, world: int) -> bool:
    """What says how it is anyway is taken; then, what is refused of a sharded module."""
    model = wrap(enforce_hbm=True, stochastic_rounding=False, output_dtype=DataType.FP32)
    assert type(model.module.embedding).__name__ == "ShardedTPUEmbeddingBagCollection"
    with pytest.raises(NotImplementedError, match=r"resharded in place.*tpuemb_torch\.checkpoint"):
        model.reshard({"embedding": (0.0, model.plan.plan["embedding"])}, "embedding")
    with pytest.raises(NotImplementedError, match=r"model trackers.*fqns_to_skip"):
        model.init_torchrec_delta_tracker(DeltaTrackerConfig())
    with pytest.raises(ValueError, match="no process group"):
        wrap(env=ShardingEnv.from_local(2, rank))
    return True


def test_what_is_so_anyway_is_accepted() -> None:
    assert run_ranks(2, accepted) == [True, True]
