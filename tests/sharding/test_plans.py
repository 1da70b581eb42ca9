"""Plans on paper: arithmetic, choices, limits and refusals."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from time import monotonic
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tpuemb_torch as tpuemb
from tests.sharding.plan_cases import Drawn, config_of, drawn
from tpuemb_torch.planning import SHARDINGS, Plan, PlanError, make_plan, parse_bytes
from tpuemb_torch.sharding.placement import shard_rows

GIB = 2**30
BIG = config_of([(10_000_000, 64, "adagrad", True), (1000, 16, "adam", True), (50, 4, "sgd", True)])


def kinds_of(plan: Plan) -> dict[str, str]:
    return {planned.table.name: planned.sharding for planned in plan.tables}


@settings(max_examples=60, deadline=None)
@given(case=drawn(), nodes=st.integers(1, 3), local=st.integers(1, 3))
def test_memory_is_that_of_the_shards(case: Drawn, nodes: int, local: int) -> None:
    world = nodes * local
    try:
        plan = make_plan(case.config, world, local, case.sharding)
    except PlanError as error:
        assert re.match(r"table 't\d': ", str(error))
        return
    slots = {"sgd": 0, "adagrad": 1, "ftrl": 2, "adam": 2}
    weights, states, rows, tables = ([0] * world for _ in range(4))
    for planned, (vocabulary, dimension, optimizer, _) in zip(plan.tables, case.tables, strict=True):
        for index, rank in enumerate(planned.ranks):
            count, width = vocabulary, dimension
            if planned.sharding in ("row_wise", "table_row_wise"):
                count = len(shard_rows(vocabulary, len(planned.ranks), index, "mod"))
            else:
                width = dimension // len(planned.ranks)
            weights[rank] += count * width * 4
            states[rank] += count * width * 4 * slots[optimizer]
            rows[rank] += count
            tables[rank] += count > 0
    assert [u.weight_bytes for u in plan.usage] == weights
    assert [u.slot_bytes for u in plan.usage] == states
    assert [u.rows for u in plan.usage] == rows
    assert [u.tables for u in plan.usage] == tables
    # No padding anywhere: the ranks together have the tables, once.
    assert sum(weights) == sum(v * d * 4 for v, d, _, _ in case.tables)


def test_buffers_of_a_step() -> None:
    config = config_of([(100, 8, "sgd", True)])  # 4 bags of each rank
    own = 2 * 4 * 8 * 4
    whole = make_plan(config, 2, sharding="table_wise", pooling_factors={"t0": 3.0}).usage
    assert [u.batch_bytes for u in whole] == [own + 8 * 3 * 12 + 2 * 8 * 8 * 4, own]
    halves = make_plan(config, 2, sharding="row_wise", pooling_factors={"t0": 3.0}).usage
    assert [u.batch_bytes for u in halves] == [own + 4 * 3 * 12 + 2 * 8 * 8 * 4] * 2


def test_kinds() -> None:
    for kind in SHARDINGS:
        assert set(kinds_of(make_plan(BIG, 4, 2, kind)).values()) == {kind}
    mixed = {"t0": "row_wise", "t1": "auto", "t2": "table_wise"}
    found = kinds_of(make_plan(BIG, 4, 2, mixed))
    assert (found["t0"], found["t2"]) == ("row_wise", "table_wise")


def test_whole_tables_go_to_the_least_loaded_rank() -> None:
    config = config_of([(1000 * n, 8, "sgd", True) for n in (5, 4, 3, 2, 1, 1)])
    plan = make_plan(config, 2, sharding="table_wise")
    assert [planned.ranks[0] for planned in plan.tables] == [0, 1, 1, 0, 0, 1]
    assert [u.rows for u in plan.usage] == [8000, 8000]


def test_nodes_matter() -> None:
    config = config_of([(20_000_000, 32, "adagrad", True), (1000, 16, "adam", True)])
    two_by_two, one_by_four = make_plan(config, 4, 2), make_plan(config, 4, 4)
    assert (two_by_two.local_world_size, one_by_four.local_world_size) == (2, 4)
    big = [plan.tables[0] for plan in (two_by_two, one_by_four)]
    # Between nodes, sums of bags are dear: the big table stays on one node; on one node it is cut over all ranks.
    assert (big[0].sharding, len(big[0].ranks)) == ("table_row_wise", 2)
    assert big[1].sharding == "row_wise"
    on_nodes = make_plan(BIG, 4, 2, "table_row_wise")
    assert {tuple(planned.ranks) for planned in on_nodes.tables} == {(0, 1), (2, 3)}
    assert {tuple(planned.ranks) for planned in make_plan(BIG, 4, 4, "table_row_wise").tables} == {(0, 1, 2, 3)}


def test_auto_splits_what_one_rank_cannot_hold() -> None:
    table_bytes = 10_000_000 * 64 * 4 * 2
    assert kinds_of(make_plan(BIG, 1))["t0"] == "table_wise"
    plan = make_plan(BIG, 4, memory_per_rank=table_bytes // 4 + 2**20)
    assert kinds_of(plan)["t0"] == "row_wise"
    assert max(u.total_bytes for u in plan.usage) <= table_bytes // 4 + 2**20


def test_pooling_factors_move_the_load() -> None:
    config = config_of([(1000, 32, "sgd", True)] * 4)
    plan = make_plan(config, 2, sharding="table_wise", pooling_factors={"t0": 3000.0})
    ranks = [planned.ranks[0] for planned in plan.tables]
    assert ranks.count(ranks[0]) == 1  # the rank with the busy table has no other


def test_same_arguments_same_plan() -> None:
    rng = random.Random(0)
    tables = [(rng.randrange(1, 100_000), rng.choice([4, 8, 64]), "adagrad", True) for _ in range(40)]
    assert make_plan(config_of(tables), 16, 4) == make_plan(config_of(tables), 16, 4)


def test_an_exact_limit_fits_and_one_byte_less_does_not() -> None:
    for kind in ("row_wise", "table_wise", "column_wise", "auto"):
        config = config_of([(1001, 4, "adam", True)])
        needed = max(u.total_bytes for u in make_plan(config, 2, sharding=kind).usage)
        if kind != "auto":
            assert make_plan(config, 2, sharding=kind, memory_per_rank=needed).memory_per_rank == needed
            with pytest.raises(PlanError, match="the tables do not fit"):
                make_plan(config, 2, sharding=kind, memory_per_rank=needed - 1)


def test_too_small_a_limit_says_what_is_needed_and_what_would_fit() -> None:
    with pytest.raises(PlanError) as caught:
        make_plan(BIG, 2, sharding="table_wise", memory_per_rank="4GiB")
    error = caught.value
    assert error.field == "memory_per_rank"
    lines = error.problem.splitlines()
    assert re.match(r"the tables do not fit: rank 0 of 2 needs 4\.8 GiB \(5,12\d,\d{3},\d{3} bytes\)", lines[0])
    assert lines[0].endswith("available are 4.0 GiB (4,294,967,296 bytes)")
    assert lines[1].startswith(
        "  table 't0': needs 4.8 GiB (5,120,000,000 bytes) (weights 2.4 GiB, slots 2.4 GiB); table_wise"
    )
    assert lines[1].endswith("on one rank, available 4.0 GiB")
    assert [line.split(":")[0].strip() for line in lines[1:4]] == ["table 't0'", "table 't1'", "table 't2'"]
    assert 'sharding "auto" on these 2 ranks' in lines[4]
    # What it says would fit does.
    make_plan(BIG, 2, sharding="auto", memory_per_rank="4GiB")
    enough = re.search(r"what would fit: [^(]*\(([\d,]+) bytes\) per rank on these 2 ranks", lines[4])
    assert enough is not None
    make_plan(BIG, 2, sharding="table_wise", memory_per_rank=int(enough[1].replace(",", "")))
    with pytest.raises(PlanError) as caught:
        make_plan(BIG, 2, memory_per_rank="1GiB")
    ranks = re.search(r"(\d+) ranks with 1.0 GiB each", str(caught.value))
    assert ranks is not None
    make_plan(BIG, int(ranks[1]), 2, memory_per_rank="1GiB")
    with pytest.raises(PlanError):
        make_plan(BIG, int(ranks[1]) - 2, 2, memory_per_rank="1GiB")


def test_of_many_tables_the_largest_are_listed() -> None:
    config = config_of([(1000 + i, 4, "sgd", True) for i in range(50)])
    with pytest.raises(PlanError) as caught:
        make_plan(config, 2, memory_per_rank=10_000)
    lines = caught.value.problem.splitlines()
    assert len(lines) == 23
    assert lines[1].startswith("  table 't49'")
    assert lines[21].startswith("  30 smaller tables: ")


@pytest.mark.parametrize(
    ("arguments", "field", "words"),
    [
        ({"world_size": 0}, "world_size", "0 is not a whole number of at least 1"),
        ({"world_size": True}, "world_size", "True is not a whole number"),
        ({"local_world_size": 3}, "local_world_size", "3 does not divide world_size 4"),
        ({"sharding": "rows"}, "sharding", "'rows' is not one of auto, row_wise"),
        ({"sharding": {"t0": "row_wise"}}, "sharding", "give each one kind"),
        ({"sharding": {"t0": "x", "t1": "auto", "t2": "auto"}}, "table 't0'", "'x' is not one of"),
        ({"memory_per_rank": "lots"}, "memory_per_rank", "'lots' is not a size"),
        ({"memory_per_rank": 0}, "memory_per_rank", "at least one"),
        ({"device": "tpu"}, "device", "'tpu' is not one of cuda, cpu"),
        ({"pooling_factors": {"u": 1.0}}, "pooling_factors", "no table 'u'"),
        ({"pooling_factors": {"t0": float("nan")}}, "pooling_factors", "table 't0': nan"),
        ({"pooling_factors": {"t0": -1}}, "pooling_factors", "table 't0': -1"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(PlanError) as caught:
        make_plan(BIG, **{"world_size": 4, **arguments})
    assert caught.value.field == field
    assert words in caught.value.problem


@pytest.mark.parametrize(
    ("table", "kind", "words"),
    [
        ((10, 6, "sgd", True), "column_wise", "dimension 6 does not divide into 4 equal columns"),
        ((7, 1, "adam", True), "row_wise", "one row of dimension 1"),
        ((10, 4, "sgd", False), "table_row_wise", "gradient_accumulation_status DISABLED"),
    ],
)
def test_what_cannot_be_built_is_refused(table: tuple[int, int, str, bool], kind: str, words: str) -> None:
    config = config_of([table])
    with pytest.raises(PlanError, match=words) as caught:
        make_plan(config, 4, 2, kind, exchange="pooled")
    assert caught.value.field == "table 't0'"
    make_plan(config, 4, 2)  # "auto" finds another way


def test_a_limit_without_its_unit_is_answered_soon() -> None:
    with pytest.raises(PlanError, match="up to 16,384 ranks alone do not help"):
        make_plan(config_of([(10_000_000, 64, "sgd", True)]), 8, memory_per_rank=80)


def test_sizes() -> None:
    assert [parse_bytes(size) for size in (5, "5", "80GB", "1.5 KiB", "2 gib", "0.5MB")] == [
        5,
        5,
        80 * 10**9,
        1536,
        2 * GIB,
        500_000,
    ]
    for wrong in ("", "GB", "-1GB", "1 XB", "1e3", 0, -4, 1.5, True, "0.1B"):
        with pytest.raises(ValueError, match=r"size|bytes"):
            parse_bytes(wrong)  # type: ignore[arg-type]


def test_very_large_tables_are_counted_exactly() -> None:
    config = config_of([(2**62 + 1, 128, "adam", True)])
    plan = make_plan(config, 1024, 8, "row_wise")
    assert sum(u.slot_bytes for u in plan.usage) == (2**62 + 1) * 128 * 4 * 2


def test_a_thousand_tables_on_a_thousand_ranks() -> None:
    rng = random.Random(0)
    tables = [(int(10 ** rng.uniform(2, 7.5)), rng.choice([16, 32, 64, 128]), "adagrad", True) for _ in range(1000)]
    config = config_of(tables)
    start = monotonic()
    plan = make_plan(config, 1024, 8, memory_per_rank="80GB")
    assert max(u.total_bytes for u in plan.usage) <= 80 * 10**9
    assert monotonic() - start < 30
    assert len(plan.to_dict()["tables"]) == 1000


def test_planning_needs_no_torchrec() -> None:
    code = """
import sys
import tpuemb_torch as tpuemb
config = tpuemb.load_config('''mode: TRAINING num_hosts: 1 num_tensor_cores: 1
    table_descriptor { name: "t" vocabulary_size: 10 dimension: 4 optimization_parameters {
        learning_rate { constant: 0.1 } adagrad {} } }
    feature_descriptor { name: "f" table_id: 0 input_shape: 2 }''')
print(tpuemb.make_plan(config, 2).usage[0].rank, "torchrec" in sys.modules, "fbgemm_gpu" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "False", "False"]
    assert tpuemb.make_plan is make_plan
