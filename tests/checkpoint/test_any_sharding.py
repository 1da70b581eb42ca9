"""Checkpoints of several ranks: saved under one plan, loaded under another, bit by bit."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torchrec.distributed import DistributedModelParallel

import tpuemb_torch as tpuemb
from tests.checkpoint.cases import Model, data_folder
from tests.distributed import cases
from tests.ranks import run_ranks
from tpuemb_torch.checkpoint import CheckpointError, async_save, files, folder, load, save, tables

#: A way of saving, by name.
SAVES = {"save": save, "async_save": lambda *args, **kwargs: async_save(*args, **kwargs).result()}


def sharded(strategy: str, plan: Any, seed: int) -> tpuemb.TPUEmbedding:
    config = tpuemb.load_config(cases.config_text("adam", strategy))
    embedding = tpuemb.TPUEmbedding(config, cases.COMBINERS, seed=seed)
    return embedding if plan is None else tpuemb.shard(embedding, plan)


def train_and_save(rank: int, world: int, path: str, strategy: str, plan: Any, how: str) -> Any:
    tables.CHUNK_BYTES = 5 * 8 * 4  # several chunks on each rank
    embedding = sharded(strategy, plan, seed=5)
    embedding.set_learning_rates([0.1, 0.2])
    out = embedding(cases.make_batch(4, seed=rank))
    sum(value.square().sum() for value in out.values()).backward()
    SAVES[how](path, embedding, step=1, extra={"rank": rank})
    return cases.to_numpy(embedding.retrieve_parameters())


def load_and_save(rank: int, world: int, source: str, target: str, strategy: str, plan: Any) -> Any:
    embedding = sharded(strategy, plan, seed=6)
    extra = load(source, embedding)
    save(target, embedding, step=2, extra=extra)
    return extra, cases.to_numpy(embedding.retrieve_parameters())


def assert_same(found: Any, expected: Any) -> None:
    assert found.keys() == expected.keys()
    for table, slots in expected.items():
        for slot, value in slots.items():
            np.testing.assert_array_equal(found[table][slot], value, err_msg=f"{table}, {slot}")


MIXED = {"user": "column_wise", "item": "row_wise", "tiny": "table_wise"}


@pytest.mark.parametrize("strategy", ["DIV_DEFAULT", "MOD"])
@pytest.mark.parametrize(
    ("first", "second", "how"),
    [("row_wise", "table_wise", "save"), ("row_wise", MIXED, "async_save"), ("table_wise", "row_wise", "save")],
)
def test_three_ranks_two_ranks_one_process(tmp_path: Path, strategy: str, first: Any, second: Any, how: str) -> None:
    one, two, three = (str(tmp_path / name) for name in ("one", "two", "three"))
    expected = run_ranks(3, train_and_save, one, strategy, first, how)[0]
    for extra, found in run_ranks(2, load_and_save, one, two, strategy, second):
        assert extra == {"rank": 0}
        assert_same(found, expected)
    extra, found = load_and_save(0, 1, two, three, strategy, None)
    assert_same(found, expected)
    assert [file.name for file in data_folder(Path(one)).iterdir() if "scratch" in file.name] == []
    plan = folder.read_description(data_folder(Path(two)))["plan"]["collection."]
    assert plan["item"]["sharding"] == (second if isinstance(second, str) else second["item"])


def damaged(rank: int, world: int, path: str) -> str:
    embedding = sharded("DIV_DEFAULT", "row_wise", seed=6)
    before = cases.to_numpy(embedding.retrieve_parameters())
    with pytest.raises(CheckpointError) as caught:
        load(path, embedding)
    assert_same(cases.to_numpy(embedding.retrieve_parameters()), before)
    return str(caught.value)


@pytest.mark.parametrize("file", ["__0_0.distcp", "__1_0.distcp", "extra.pt"])
def test_a_file_damaged_on_disk_is_named_on_every_rank(tmp_path: Path, file: str) -> None:
    run_ranks(2, train_and_save, str(tmp_path), "DIV_DEFAULT", "row_wise", "save")
    content = bytearray((data_folder(tmp_path) / file).read_bytes())
    content[len(content) // 2] ^= 1
    (data_folder(tmp_path) / file).write_bytes(content)
    for message in run_ranks(2, damaged, str(tmp_path)):
        assert f"file {file} is not as it was written" in message


def copies_differ(rank: int, world: int, path: str) -> Any:
    """An unsharded layer on each rank: rank 0's is saved."""
    embedding = sharded("DIV_DEFAULT", None, seed=rank)
    save(path, embedding)
    return cases.to_numpy(embedding.retrieve_parameters())


def test_of_unsharded_copies_that_of_rank_0_is_saved(tmp_path: Path) -> None:
    expected = run_ranks(2, copies_differ, str(tmp_path))[0]
    embedding = sharded("DIV_DEFAULT", None, seed=9)
    load(tmp_path, embedding)
    assert_same(cases.to_numpy(embedding.retrieve_parameters()), expected)


def saves_in_turn(rank: int, world: int, path: str) -> list[float]:
    """Saves in the background while every rank trains on: the checkpoint has the values of the call."""
    embedding = sharded("MOD", "row_wise", seed=5)
    embedding.set_learning_rates([0.1, 0.2])
    found = []
    for step in range(4):
        expected = embedding.retrieve_parameters()["user"]["parameters"]
        future = async_save(path, embedding, step=step, extra=step, keep=4)
        out = embedding(cases.make_batch(4, seed=10 * rank + step))
        sum(value.square().sum() for value in out.values()).backward()
        future.result()
        other = sharded("MOD", "row_wise", seed=1)
        assert load(path, other, step=step) == step
        found.append(float((other.retrieve_parameters()["user"]["parameters"] - expected).abs().max()))
        assert not torch.equal(embedding.retrieve_parameters()["user"]["parameters"], expected)
    return found


def test_training_goes_on_in_the_group_while_a_save_is_written(tmp_path: Path) -> None:
    assert run_ranks(2, saves_in_turn, str(tmp_path)) == [[0.0] * 4] * 2


def one_disk_is_full(rank: int, world: int, path: str, strategy: str) -> str:
    embedding = sharded(strategy, "row_wise", seed=5)
    save(path, embedding, step=1, extra=1)
    if rank == 1:
        if strategy == "MOD":
            os.posix_fallocate = no_space
        else:
            files._DigestedFile.write = no_space  # type: ignore[method-assign]
    with pytest.raises(CheckpointError) as caught:
        save(path, embedding, step=2, extra=2)
    assert load(path, embedding) == 1
    return str(caught.value)


def no_space(*_args: Any) -> int:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("strategy", "what"), [("DIV_DEFAULT", "cannot write checkpoint"), ("MOD", "no room to bring")]
)
def test_a_rank_that_cannot_write_stops_the_save_on_all(tmp_path: Path, strategy: str, what: str) -> None:
    for message in run_ranks(2, one_disk_is_full, str(tmp_path), strategy):
        assert what in message and "No space left" in message
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".")] == []


def wrapped(model: Model) -> nn.Module:
    """With DistributedModelParallel, which shards tables and copies the rest to all ranks."""
    return DistributedModelParallel(model, device=torch.device("cpu"), sharders=tpuemb.sharders())  # type: ignore[arg-type]


def save_wrapped(rank: int, world: int, path: str) -> Any:
    model = Model(1)
    save(f"{path}/parallel", wrapped(model))
    plain = Model(2)
    load(f"{path}/parallel", plain)
    save(f"{path}/plain", plain)
    other = Model(3)
    load(f"{path}/plain", wrapped(other))
    return [
        {name: value.detach().numpy() for name, value in m.over.state_dict().items()} for m in (model, plain, other)
    ]


def test_a_model_in_distributed_model_parallel(tmp_path: Path) -> None:
    expected, restored = Model(1), Model(4)
    for results in run_ranks(2, save_wrapped, str(tmp_path)):
        for found in results:
            np.testing.assert_array_equal(found["weight"], expected.over.weight.detach().numpy())
    load(tmp_path / "parallel", restored)
    assert_same(*(cases.to_numpy(m.embedding.retrieve_parameters()) for m in (restored, expected)))


def with_a_sharded_dense_part(rank: int, world: int, path: str) -> tuple[str, float]:
    """A dense part in DTensors is saved whole; one of which each rank has a part, without saying so, is refused."""
    model = Model(1)
    weight = model.over.weight.detach().clone()
    distribute_module(model.over, init_device_mesh("cpu", (world,)), shard_columns)
    save(path, model)
    other = Model(2)
    load(path, other)
    model.norm.weight = nn.Parameter(torch.ones(3 + rank))
    with pytest.raises(CheckpointError) as caught:
        save(path, model)
    load(path, other)
    return str(caught.value), float((other.over.weight - weight).abs().max())


def shard_columns(_name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    for name, parameter in module.named_parameters():
        placement = Shard(1) if name == "weight" else Replicate()
        setattr(module, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [placement])))


def test_dense_parts_that_are_sharded(tmp_path: Path) -> None:
    for message, difference in run_ranks(2, with_a_sharded_dense_part, str(tmp_path)):
        assert message.startswith("norm.weight has shapes [(3,), (4,)] on the ranks")
        assert difference == 0.0


@pytest.mark.gpu
def test_from_cpu_to_gpu_and_back(tmp_path: Path) -> None:
    config = tpuemb.load_config(cases.config_text("adam"))
    layers = [
        tpuemb.TPUEmbedding(config, cases.COMBINERS, seed=seed, device=device)
        for seed, device in enumerate(("cpu", "cuda", "cpu"))
    ]
    expected = cases.to_numpy(layers[0].retrieve_parameters())
    for source, target in pairwise(layers):
        save(tmp_path, source, extra={"t": torch.ones(1, device=source.collection.kernel.device)})
        assert load(tmp_path, target)["t"].device.type == "cpu"
        assert_same(cases.to_numpy(target.retrieve_parameters()), expected)
