"""Ranks that differ in configuration, options or plan: an error on all of them at the start that says in what."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.distributed.types import ShardMetadata

import tpuemb_torch as tpuemb
from tests.distributed import cases
from tests.ranks import run_ranks
from tpuemb_torch.planning import make_plan, save_plan
from tpuemb_torch.sharding import agreement
from tpuemb_torch.sharding.plans import to_torchrec

TEXT = cases.config_text("adagrad")
ROWS, TABLE = "row_wise", "table_wise"


def changed(old: str, new: str) -> tuple[str, str]:
    assert old in TEXT
    return "text", TEXT.replace(old, new, 1)


#: What rank 1 has otherwise, and what every rank must hear of it.
DIFFERENCES: list[tuple[tuple[str, Any], str]] = [
    (changed("dimension: 8", "dimension: 16"), "rank 1: table 'user': dimension is 16, on rank 0 it is 8"),
    (
        changed("vocabulary_size: 7", "vocabulary_size: 9"),
        "rank 1: table 'item': vocabulary_size is 9, on rank 0 it is 7",
    ),
    (changed('"tiny"', '"small"'), "rank 1: the name of table 2 is 'small', on rank 0 it is 'tiny'"),
    (
        changed("adagrad {}", "momentum { momentum: 0.5 }"),
        "table 'user': algorithm is momentum, on rank 0 it is adagrad",
    ),
    (changed("constant: 0.1", "constant: 0.2"), "constant=0.20000000298023224"),
    (
        changed("value: 1.5", "value: 1.25"),
        "table 'user': clipping_limits is Limits(lower=-inf, upper=1.25), on rank 0",
    ),
    (changed("DIV_DEFAULT", "MOD"), "rank 1: sharding_strategy is mod, on rank 0 it is div"),
    (changed("mode: TRAINING", "mode: INFERENCE"), "rank 1: mode is inference, on rank 0 it is training"),
    (changed("input_shape: 6", "input_shape: 12"), "feature 'viewer': input_shape is [12], on rank 0 it is [6]"),
    (("combiners", {"user": "sum"}), "rank 1: table 'user': combiner is sum, on rank 0 it is mean"),
    (("id_policy", "drop"), "rank 1: id_policy is 'drop', on rank 0 it is 'error'"),
    (("gradient_reduction", "mean"), "rank 1: gradient_reduction is 'mean', on rank 0 it is 'sum'"),
    (("seed", 1), "rank 1: seed is 1, on rank 0 it is 0"),
    (("experimental", {"mdl_adagrad_light"}), "rank 1: experimental is mdl_adagrad_light, on rank 0 it is none"),
    (("exchange", "distinct"), "rank 1: table 'user': exchange is distinct, on rank 0 it is pooled"),
    (("plan", TABLE), "rank 1: table 'user': sharding is table_wise, on rank 0 it is row_wise"),
    (("plan", {"user": ROWS, "item": TABLE, "tiny": ROWS}), "rank 1: table 'item': sharding is table_wise"),
    (("version", "9.9"), "rank 1: the version of tpuemb_torch is 9.9, on rank 0 it is "),
]


def layer(options: dict[str, Any]) -> tpuemb.TPUEmbedding:
    given = {"text": TEXT, "combiners": cases.COMBINERS, **options}
    config = tpuemb.load_config(given.pop("text"))
    known = {table.name for table in config.tables}
    combiners = {name: combiner for name, combiner in given.pop("combiners").items() if name in known}
    return tpuemb.TPUEmbedding(config, combiners, device="meta", **given)


def shard_differently(rank: int, world: int) -> list[str]:
    messages = []
    own_version = agreement.__version__
    for (option, value), _ in DIFFERENCES:
        options = {option: value} if rank == 1 else {}
        plan, exchange = options.pop("plan", ROWS), options.pop("exchange", "pooled")
        agreement.__version__ = options.pop("version", own_version)
        with pytest.raises(ValueError, match="the ranks shard different layers") as caught:
            tpuemb.shard(layer(options), plan, exchange=exchange)
        messages.append(str(caught.value))
        agreement.__version__ = own_version
    # The job can go on; kernels may differ.
    embedding = tpuemb.shard(layer({"kernel": "eager" if rank else "compiled"}), ROWS)
    embedding(cases.make_batch(3, rank))
    return messages


@pytest.mark.parametrize("world", [2, 3])
def test_every_difference_is_named_on_every_rank(world: int) -> None:
    for messages in run_ranks(world, shard_differently):
        for message, ((option, _), expected) in zip(messages, DIFFERENCES, strict=True):
            assert expected in message, option
            assert "rank 2:" not in message


def test_kernels_may_differ_but_not_in_how_they_group_tables() -> None:
    text = """mode: TRAINING num_hosts: 1 num_tensor_cores: 1
        table_descriptor { name: "t" vocabulary_size: 4 dimension: 4 optimization_parameters {
            learning_rate { constant: 0.1 } stochastic_gradient_descent {} } }
        feature_descriptor { name: "f" table_id: 0 input_shape: 1 }"""
    eager, auto, fbgemm = (
        agreement.describe(tpuemb.TPUEmbeddingBagCollection(text, kernel=kernel), {}, torch.device("cpu"))
        for kernel in ("eager", "auto", "fbgemm")
    )
    assert eager == auto
    assert {name for name in auto if auto[name] != fbgemm[name]} == {"whether the kernel is fbgemm"}


def bad_plan_on_one_rank(rank: int, world: int, folder: str) -> list[str]:
    """Plans that one rank cannot use, of every kind that `shard` takes."""
    good = make_plan(tpuemb.load_config(TEXT), world, sharding=TABLE)
    save_plan(good, f"{folder}/good-{rank}.yaml")
    module = layer({}).collection
    ready = to_torchrec(module, good)
    elsewhere = to_torchrec(module, good)
    table = next(iter(elsewhere.values()))
    assert table.sharding_spec is not None
    (shard,) = table.sharding_spec.shards
    other = "rank:1/cpu" if "rank:0" in str(shard.placement) else "rank:0/cpu"
    table.sharding_spec.shards = [ShardMetadata(shard.shard_offsets, shard.shard_sizes, other)]
    messages = []
    for plans in (
        ("rowwise", ROWS),
        ("auto", "nothing"),
        (f"{folder}/good-0.yaml", f"{folder}/none.yaml"),
        (good, {"user": ROWS}),
        (ready, "rowwise"),
        (ready, ROWS),
        (ready, elsewhere),
        (good, None),
    ):
        with pytest.raises((ValueError, OSError, TypeError)) as caught:
            tpuemb.shard(layer({}), plans[rank])
        messages.append(str(caught.value))
    # Different ways to say the same.
    tpuemb.shard(layer({}), ready if rank else f"{folder}/good-0.yaml")
    return messages


def test_a_plan_that_is_bad_on_one_rank_raises_on_all(tmp_path: Any) -> None:
    both = run_ranks(2, bad_plan_on_one_rank, str(tmp_path))
    words = ["'rowwise' is not one of", "'nothing' is not one of", "none.yaml: no such file", "names tables ['user']"]
    words += ["'rowwise' is not one of", "sharding is row_wise", "shards is [([0, 0], [", "or its file, got None"]
    for messages in both:
        for message, expected in zip(messages, words, strict=True):
            assert expected in message


def on_nodes_of_other_sizes(rank: int, world: int) -> str:
    """TorchRec makes groups for the nodes of such tables, for which a rank that refuses its plan would be missed."""
    os.environ["LOCAL_WORLD_SIZE"] = str(world - rank)
    module = layer({}).collection
    plan = to_torchrec(module, make_plan(module.config, world, sharding="table_row_wise"))
    with pytest.raises(ValueError, match="the ranks shard different layers") as caught:
        tpuemb.shard(layer({}), plan)
    return str(caught.value)


def test_ranks_that_take_their_nodes_for_others_are_told_so() -> None:
    for message in run_ranks(2, on_nodes_of_other_sizes, timeout=20):
        assert "rank 1: the number of ranks of its node (LOCAL_WORLD_SIZE) is 1, on rank 0 it is 2" in message


class Model(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.embedding = tpuemb.TPUEmbedding(TEXT, cases.COMBINERS, seed=seed)


def in_a_model(rank: int, world: int) -> str:
    from torchrec.distributed import DistributedModelParallel

    with pytest.raises(ValueError, match="the ranks shard different layers") as caught:
        DistributedModelParallel(Model(seed=rank), device=torch.device("cpu"), sharders=tpuemb.sharders())
    return str(caught.value)


def test_distributed_model_parallel() -> None:
    first, second = run_ranks(2, in_a_model)
    assert first == second
    assert "rank 1: seed is 1, on rank 0 it is 0" in first


def many_differences(rank: int, world: int) -> str:
    own = {f"value {number}": str(number * rank) for number in range(10)}
    with pytest.raises(ValueError, match="different") as caught:
        agreement.check_same(own, torch.distributed.group.WORLD)
    return str(caught.value)


def test_of_many_differences_the_first_are_named() -> None:
    messages = run_ranks(7, many_differences)
    assert len(set(messages)) == 1
    lines = messages[0].splitlines()
    assert lines[1] == (
        "rank 1: value 1 is 1, on rank 0 it is 0; value 2 is 2, on rank 0 it is 0; value 3 is 3, on rank 0 it is 0; "
        "and 6 more differences"
    )
    assert [re.match(r"rank (\d)", line) is not None for line in lines[1:]] == [True] * 4 + [False]
    assert lines[-1] == "and 2 more ranks"


def only_a_digest(rank: int, world: int) -> int:
    """Elements that equal ranks exchange: the digest's, however large the layer is."""
    import torch.distributed as dist

    sent = []
    reduce = dist.all_reduce

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(tensor.numel())
        return reduce(tensor, *args, **kwargs)

    agreement.dist.all_reduce = counted
    try:
        agreement.check_same({f"value {number}": "x" * 100 for number in range(1000)}, dist.group.WORLD)
    finally:
        agreement.dist.all_reduce = reduce
    return sum(sent)


def test_equal_ranks_exchange_four_numbers() -> None:
    assert run_ranks(2, only_a_digest) == [4, 4]
