"""State of sharded tables: placement, load and retrieve, checkpoints, state dicts, and errors on one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tpuemb_torch as tpuemb
from tests.distributed import cases
from tests.ranks import run_ranks

SIZES = (1, 2, 5, 7, 13)


def many_sizes(strategy: str) -> tpuemb.Config:
    tables = "\n".join(
        f'table_descriptor {{ name: "t{rows}" vocabulary_size: {rows} dimension: 3 optimization_parameters {{'
        f" learning_rate {{ constant: 0.5 }} adagrad {{}} }} }}"
        for rows in SIZES
    )
    features = "\n".join(
        f'feature_descriptor {{ name: "f{rows}" table_id: {i} input_shape: 4 }}' for i, rows in enumerate(SIZES)
    )
    return tpuemb.load_config(
        f"mode: TRAINING num_hosts: 1 num_tensor_cores: 1 sharding_strategy: {strategy} {tables} {features}"
    )


def numbered(rows: int, slot: int = 0) -> torch.Tensor:
    """Row r is r + slot * 1000 in every column."""
    return (torch.arange(rows).float() + 1000 * slot)[:, None].expand(rows, 3).contiguous()


def every_id(rank: int, world: int, strategy: str) -> Any:
    cfg = many_sizes(strategy)
    embedding = tpuemb.shard(tpuemb.TPUEmbedding(cfg, device="meta"), "row_wise")
    embedding.load_parameters({f"t{rows}": {"parameters": numbered(rows)} for rows in SIZES})
    out = embedding.eval()({f"f{rows}": torch.arange(13) % rows for rows in SIZES})
    stored = {s.part.table.name: s.tensors["parameters"][:, 0].tolist() for s in embedding.collection.stored()}
    return {name: values[:, 0].tolist() for name, values in out.items()}, stored


@pytest.mark.parametrize("strategy", ["DIV_DEFAULT", "MOD"])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
def test_every_id_finds_its_row_and_rows_lie_on_their_host(world: int, strategy: str) -> None:
    results = run_ranks(world, every_id, strategy)
    for rank, (found, stored) in enumerate(results):
        for rows in SIZES:
            assert found[f"f{rows}"] == [i % rows for i in range(13)]
            if strategy == "MOD":
                expected = list(range(rows))[rank::world]
            else:
                q, r = divmod(rows, world)
                expected = list(range(rows))[rank * q + min(rank, r) : (rank + 1) * q + min(rank + 1, r)]
            assert stored[f"t{rows}"] == expected


def load_and_retrieve(rank: int, world: int, plan: str, num_shards: int) -> Any:
    """Rank r loads shards r, r + world, ...; every rank then reads every shard."""
    cfg = many_sizes("MOD")
    embedding = tpuemb.shard(tpuemb.TPUEmbedding(cfg), plan)
    tables = {"t13": 13, "t7": 7}
    for first in range(0, num_shards, world):
        shard = min(first + rank, num_shards - 1)
        given = {
            name: {
                "parameters": numbered(rows)[shard::num_shards],
                "accumulators": numbered(rows, slot=1)[shard::num_shards],
            }
            for name, rows in tables.items()
        }
        embedding.load_parameters(given, num_shards, shard)
    shards = [embedding.retrieve_parameters(list(tables), num_shards, shard) for shard in range(num_shards)]
    whole = embedding.retrieve_parameters()
    return [cases.to_numpy(s) for s in shards], cases.to_numpy(whole)


@pytest.mark.parametrize("plan", ["row_wise", "table_wise"])
@pytest.mark.parametrize("num_shards", [1, 2, 5])
def test_load_and_retrieve_do_not_depend_on_the_sharding(plan: str, num_shards: int) -> None:
    for shards, whole in run_ranks(3, load_and_retrieve, plan, num_shards):
        for name, rows in (("t13", 13), ("t7", 7)):
            for slot, number in (("parameters", 0), ("accumulators", 1)):
                np.testing.assert_array_equal(whole[name][slot], numbered(rows, number).numpy())
                for shard in range(num_shards):
                    np.testing.assert_array_equal(
                        shards[shard][name][slot], numbered(rows, number).numpy()[shard::num_shards]
                    )
        assert set(whole) == {f"t{rows}" for rows in SIZES}
        np.testing.assert_array_equal(whole["t5"]["accumulators"], np.full((5, 3), 0.1, np.float32))


def failing_load(rank: int, world: int) -> str:
    embedding = tpuemb.shard(tpuemb.TPUEmbedding(many_sizes("MOD"), seed=1), "row_wise")
    before = embedding.retrieve_parameters()
    rows = 5 if rank == 0 else 6
    with pytest.raises(ValueError, match="t5") as caught:
        embedding.load_parameters({"t5": {"parameters": torch.zeros(rows, 3)}})
    after = embedding.retrieve_parameters()
    assert all(torch.equal(before[t][s], after[t][s]) for t in before for s in before[t])
    return str(caught.value)


def test_a_wrong_shape_on_one_rank_raises_on_all_and_writes_nothing() -> None:
    messages = run_ranks(2, failing_load)
    assert "[6, 3]" in messages[1] and "[5, 3]" in messages[1]
    assert "rank 1" in messages[0]


def bad_batch(rank: int, world: int, how: str) -> str:
    embedding = tpuemb.shard(tpuemb.TPUEmbedding(many_sizes("DIV_DEFAULT")), "row_wise")
    ids = {f"f{rows}": torch.zeros(4, dtype=torch.int64) for rows in SIZES}
    if rank == 1:
        ids["f7"] = torch.tensor([0, 1, 7, 2]) if how == "range" else torch.tensor([0.5] * 4)
    with pytest.raises(tpuemb.InputError) as caught:
        embedding(ids)
    # The job can go on.
    embedding({name: torch.zeros(4, dtype=torch.int64) for name in ids})
    return str(caught.value)


@pytest.mark.parametrize("how", ["range", "dtype"])
def test_a_bad_batch_on_one_rank_raises_on_all(how: str) -> None:
    messages = run_ranks(2, bad_batch, how)
    assert "f7" in messages[1]
    assert "another rank" in messages[0]


def rejected_enqueues(rank: int, world: int) -> list[float]:
    """Rank 0's third batch has a bad id; returns what each good batch's recv gave."""
    cfg = tpuemb.load_config("""
        mode: TRAINING num_hosts: 1 num_tensor_cores: 2
        table_descriptor { name: "t" vocabulary_size: 9 dimension: 2 optimization_parameters {
            learning_rate { constant: 0 } stochastic_gradient_descent {} } }
        feature_descriptor { name: "f" table_id: 0 input_shape: 1 }""")
    embedding = tpuemb.shard(tpuemb.TPUEmbedding(cfg), "row_wise")
    embedding.load_parameters({"t": {"parameters": torch.arange(9.0)[:, None].expand(9, 2)}})
    seen = []
    for batch in range(6):
        bad = batch == 2 and rank == 0
        try:
            embedding.enqueue([torch.tensor([99 if bad else batch])])
        except tpuemb.InputError:
            continue
        (activation,) = embedding.recv_activations()
        embedding.send_gradients([torch.zeros_like(activation)])
        seen.append(float(activation[0, 0]))
    return seen


def test_a_rejected_batch_is_in_no_rank_s_queue() -> None:
    assert run_ranks(2, rejected_enqueues) == [[0.0, 1.0, 3.0, 4.0, 5.0]] * 2


def refused_steps(rank: int, world: int) -> list[str]:
    """Wrong gradients on one rank, then rates that differ, then a good step; the messages of the first two."""
    embedding = tpuemb.shard(tpuemb.TPUEmbedding(tpuemb.load_config(cases.config_text("adagrad"))), "row_wise")
    embedding.enqueue(cases.make_batch(3, seed=rank))
    gradients = [torch.ones_like(a) for a in embedding.recv_activations()]
    before = embedding.retrieve_parameters()
    messages = []
    wrong = [gradients[0][:1], *gradients[1:]] if rank == 1 else gradients
    for sent, rates in ((wrong, (0.1, 0.2)), (gradients, (0.1, 0.2 + 0.1 * rank))):
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            embedding.send_gradients(sent, rates)
        messages.append(str(caught.value))
    after = embedding.retrieve_parameters()
    assert all(torch.equal(before[t][s], after[t][s]) for t in before for s in before[t])
    embedding.send_gradients(gradients, (0.1, 0.2))
    assert not torch.equal(before["user"]["parameters"], embedding.retrieve_parameters()["user"]["parameters"])
    return messages


def test_a_step_that_one_rank_refuses_changes_no_table_on_any() -> None:
    first, second = run_ranks(2, refused_steps)
    assert "another rank refused" in first[0]
    assert "'viewer' has shape [1, 8]" in second[0]
    assert first[1] == second[1] == "learning rate of tag 1 is 0.2 on one rank and 0.3 on another: send the same on all"


def odd_tables(rank: int, world: int, plan: str) -> Any:
    """Dimension 1 with two features, and names that torch's modules refuse."""
    names = ["a.b", "items", "a_b_table0", "plain"]
    tables = "".join(
        f'table_descriptor {{ name: "{name}" vocabulary_size: 5 dimension: {1 + i % 2} optimization_parameters {{'
        " learning_rate { constant: 0.5 } adam { beta1: 0.9 beta2: 0.9 epsilon: 0.1 } } }"
        for i, name in enumerate(names)
    )
    features = "".join(
        f'feature_descriptor {{ name: "{name}/{j}" table_id: {i} input_shape: 3 }}'
        for i, name in enumerate(names)
        for j in range(2)
    )
    cfg = tpuemb.load_config(f"mode: TRAINING num_hosts: 1 num_tensor_cores: 1 {tables} {features}")
    embedding = tpuemb.TPUEmbedding(cfg, seed=2)
    if world > 1:
        embedding = tpuemb.shard(embedding, plan)
    ids = torch.tensor([0, 4, 2]) if world > 1 else torch.tensor([0, 4, 2] * 2)
    out = embedding({f.name: ids for f in cfg.features})
    sum(value.square().sum() for value in out.values()).backward()
    return cases.to_numpy(embedding.retrieve_parameters())


@pytest.mark.parametrize("plan", ["row_wise", "table_wise", "auto"])
def test_dimension_one_and_names_that_modules_refuse(plan: str) -> None:
    expected = odd_tables(0, 1, plan)
    for found in run_ranks(2, odd_tables, plan):
        assert found.keys() == expected.keys()
        for table, slots in expected.items():
            for slot, value in slots.items():
                np.testing.assert_allclose(found[table][slot], value, rtol=1e-5, atol=1e-6, err_msg=f"{table} {slot}")


def one_number_shards(rank: int, world: int) -> str:
    cfg = tpuemb.load_config("""
        mode: TRAINING num_hosts: 1 num_tensor_cores: 1
        table_descriptor { name: "t" vocabulary_size: 2 dimension: 1 optimization_parameters {
            learning_rate { constant: 0.5 } adam { epsilon: 0.1 } } }
        feature_descriptor { name: "f" table_id: 0 input_shape: 2 }""")
    with pytest.raises(ValueError, match="'t': the plan gives a rank one row of dimension 1") as caught:
        tpuemb.shard(tpuemb.TPUEmbedding(cfg), "row_wise")
    tpuemb.shard(tpuemb.TPUEmbedding(cfg), "table_wise")
    return str(caught.value)


def test_the_shard_that_torchrec_cannot_describe_is_refused_by_name() -> None:
    assert len(set(run_ranks(2, one_number_shards))) == 1


def two_pushes(rank: int, world: int, reduction: str, divide: bool, plan: str) -> float:
    from torchrec.distributed.comm_ops import set_gradient_division

    set_gradient_division(divide)
    cfg = tpuemb.load_config("""
        mode: TRAINING num_hosts: 1 num_tensor_cores: 2
        table_descriptor { name: "t" vocabulary_size: 5 dimension: 2 optimization_parameters {
            learning_rate { constant: 1 } stochastic_gradient_descent {} } }
        feature_descriptor { name: "f" table_id: 0 input_shape: 1 }""")
    found = []
    for exchange in ("pooled", "distinct"):
        embedding = tpuemb.shard(tpuemb.TPUEmbedding(cfg, gradient_reduction=reduction), plan, exchange=exchange)
        embedding.load_parameters({"t": {"parameters": torch.zeros(5, 2)}})
        embedding({"f": torch.tensor([3])})["f"].sum().backward()
        found.append(float(embedding.retrieve_parameters()["t"]["parameters"][3, 0]))
    return found


@pytest.mark.parametrize("plan", ["row_wise", "table_wise"])
@pytest.mark.parametrize("divide", [True, False])
@pytest.mark.parametrize(("reduction", "expected"), [("sum", -2.0), ("mean", -1.0)])
def test_gradients_of_ranks_add_up(reduction: str, expected: float, divide: bool, plan: str) -> None:
    assert run_ranks(2, two_pushes, reduction, divide, plan) == [[expected] * 2] * 2


def train_and_save(rank: int, world: int, path: str, plan: str | None) -> Any:
    cfg = tpuemb.load_config(cases.config_text("ftrl", "MOD"))
    embedding = tpuemb.TPUEmbedding(cfg, seed=5)
    if plan is not None:
        embedding = tpuemb.shard(embedding, plan)
    embedding.set_learning_rates([0.1, 0.2])
    for t in range(2):
        out = embedding(cases.make_batch(4, seed=10 * rank + t))
        sum(value.square().sum() for value in out.values()).backward()
    tpuemb.checkpoint.save(path, embedding, step=2, extra={"note": "two steps"})
    return cases.to_numpy(embedding.retrieve_parameters())


def load_again(rank: int, world: int, path: str, plan: str | None) -> Any:
    embedding = tpuemb.TPUEmbedding(tpuemb.load_config(cases.config_text("ftrl", "MOD")), seed=6)
    if plan is not None:
        embedding = tpuemb.shard(embedding, plan)
    extra = tpuemb.checkpoint.load(path, embedding)
    return extra, cases.to_numpy(embedding.retrieve_parameters())


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [((3, "row_wise"), (2, "table_wise")), ((2, "table_wise"), (3, "row_wise")), ((2, "row_wise"), (1, "row_wise"))],
)
def test_a_checkpoint_loads_under_any_sharding(tmp_path: Path, saved: Any, loaded: Any) -> None:
    expected = run_ranks(saved[0], train_and_save, str(tmp_path), saved[1])[0]
    results = run_ranks(loaded[0], load_again, str(tmp_path), loaded[1])
    results.append(load_again(0, 1, str(tmp_path), None))  # and without any process group
    for extra, parameters in results:
        assert extra == {"note": "two steps"}
        for table, slots in expected.items():
            for slot, value in slots.items():
                np.testing.assert_array_equal(parameters[table][slot], value)


def shard_after_training(rank: int, world: int) -> None:
    cfg = tpuemb.load_config(cases.config_text("adagrad"))
    embedding = tpuemb.TPUEmbedding(cfg, cases.COMBINERS)
    embedding.set_learning_rates([0.1, 0.2])
    sum(v.sum() for v in embedding(cases.make_batch(6, seed=1)).values()).backward()
    before = embedding.retrieve_parameters()
    sharded = tpuemb.shard(embedding, "row_wise")
    after = sharded.retrieve_parameters()
    assert all(torch.equal(before[t][s], after[t][s]) for t in before for s in before[t])
    # The rates set before sharding still hold, and the unsharded layer is left as it was.
    sum(v.sum() for v in sharded(cases.make_batch(6, seed=1)).values()).backward()
    assert torch.equal(embedding.retrieve_parameters()["user"]["parameters"], before["user"]["parameters"])
    assert not torch.equal(sharded.retrieve_parameters()["user"]["parameters"], before["user"]["parameters"])


def test_sharding_keeps_parameters_slots_and_rates() -> None:
    run_ranks(2, shard_after_training)


def state_dict_shapes(rank: int, world: int, strategy: str) -> Any:
    embedding = tpuemb.shard(tpuemb.TPUEmbedding(many_sizes(strategy), seed=4), "row_wise")
    state = embedding.state_dict()
    shapes = {k: tuple(v.size()) for k, v in state.items() if k.endswith("weight")}
    optimizer = embedding.collection.fused_optimizer.state_dict()["state"]
    slots = {k: tuple(v.size()) for entry in optimizer.values() for k, v in entry.items()}
    embedding.load_state_dict(state)
    unsharded = tpuemb.TPUEmbedding(many_sizes(strategy), seed=4)
    if strategy == "MOD" and world > 1:
        # Rows of another order must not be taken silently.
        with pytest.raises(RuntimeError, match="MOD"):
            embedding.load_state_dict(unsharded.state_dict())
    else:
        embedding.load_state_dict(unsharded.state_dict())
        loaded = embedding.retrieve_parameters()
        expected = unsharded.retrieve_parameters()
        assert all(torch.equal(loaded[t]["parameters"], expected[t]["parameters"]) for t in loaded)
    return shapes, slots


@pytest.mark.parametrize("strategy", ["DIV_DEFAULT", "MOD"])
def test_state_dicts_show_no_padding(strategy: str) -> None:
    for shapes, slots in run_ranks(3, state_dict_shapes, strategy):
        assert shapes == {f"collection.embedding_bags.t{rows}.weight": (rows, 3) for rows in SIZES}
        assert slots == {f"t{rows}.momentum1": (rows, 3) for rows in SIZES}
