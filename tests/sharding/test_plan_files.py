"""Plan files: what is written is read, and what is wrong is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.sharding.plan_cases import Drawn, config_of, drawn
from tpuemb_torch.planning import PlanError, make_plan, read_plan, save_plan

CONFIG = config_of([(20, 4, "adagrad", True), (9, 2, "sgd", True), (5, 4, "adam", True), (8, 2, "sgd", True)])
KINDS = {"t0": "row_wise", "t1": "table_wise", "t2": "column_wise", "t3": "table_row_wise"}


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=drawn(), nodes=st.integers(1, 3), local=st.integers(1, 3), ending=st.sampled_from(["yaml", "yml", "json"]))
def test_round_trip(tmp_path: Path, case: Drawn, nodes: int, local: int, ending: str) -> None:
    numbers = {"pooling_factors": {"t0": 2.5}, "distinct_ids": {"t0": 3.25}}
    try:
        plan = make_plan(case.config, nodes * local, local, memory_per_rank="1GB", **numbers)
    except PlanError as error:
        assert "give it a second row" in str(error)  # the one table that no plan can hold
        return
    save_plan(plan, tmp_path / f"plan.{ending}")
    again = read_plan(tmp_path / f"plan.{ending}")
    assert again == plan
    assert again.usage == plan.usage


def test_what_a_file_looks_like(tmp_path: Path) -> None:
    save_plan(make_plan(CONFIG, 4, 2, KINDS, exchange="pooled"), tmp_path / "plan.yaml")
    content = yaml.safe_load((tmp_path / "plan.yaml").read_text())
    tables = content.pop("tables")
    assert content == {"tpuemb_plan": 1, "world_size": 4, "local_world_size": 2, "memory_per_rank": None}
    assert tables["t0"] == {
        "sharding": "row_wise",
        "exchange": "pooled",
        "rows": 20,
        "dimension": 4,
        "slots": 1,
        "bags": 4,
        "pooling_factor": 1.0,
    }
    assert tables["t2"]["ranks"] == [0, 1, 2, 3]
    assert tables["t1"]["rank"] in range(4)
    assert tables["t3"]["node"] in range(2)


def test_a_file_by_hand_needs_no_batch(tmp_path: Path) -> None:
    text = """
tpuemb_plan: 1
world_size: 2
local_world_size: 2
memory_per_rank: 16GB
tables:
  t: {sharding: column_wise, ranks: [1, 0], rows: 3, dimension: 4, slots: 1}
"""
    (tmp_path / "plan.yml").write_text(text)
    plan = read_plan(tmp_path / "plan.yml")
    assert plan.memory_per_rank == 16 * 10**9
    assert [u.total_bytes for u in plan.usage] == [3 * 2 * 4 * 2] * 2


@pytest.mark.parametrize(
    ("path", "value", "field", "words"),
    [
        (["tpuemb_plan"], 2, "tpuemb_plan", "2: this version reads format 1"),
        (["tpuemb_plan"], None, "tpuemb_plan", "None: this version reads format 1"),
        (["world_size"], 0, "world_size", "0 must be at least 1"),
        (["world_size"], "4", "world_size", "'4' is not a whole number"),
        (["world_size"], 2**70, "world_size", "must be in [1, 16777216)"),
        (["local_world_size"], 3, "local_world_size", "3 does not divide world_size 4"),
        (["memory_per_rank"], "much", "memory_per_rank", "'much' is not a size"),
        (["wordl_size"], 4, "wordl_size", "is not a field of a plan; there are tpuemb_plan, world_size"),
        (["tables"], [], "tables", "is not a mapping"),
        (["tables", "t0"], 1, "tables.t0", "1 is not a mapping"),
        (["tables", "t0", "sharding"], "rows", "tables.t0.sharding", "'rows' is not one of row_wise, table_wise"),
        (["tables", "t0", "rank"], 1, "tables.t0.rank", "has no meaning for row_wise"),
        (["tables", "t0", "rows"], 0, "tables.t0.rows", "0 must be at least 1"),
        (["tables", "t0", "slots"], -1, "tables.t0.slots", "-1 must be at least 0"),
        (["tables", "t0", "bags"], 1.5, "tables.t0.bags", "1.5 is not a whole number"),
        (["tables", "t0", "pooling_factor"], -1, "tables.t0.pooling_factor", "-1 is not a finite number"),
        (["tables", "t0", "sweeps_all_rows"], 1, "tables.t0.sweeps_all_rows", "1 is neither true nor false"),
        (["tables", "t1", "rank"], 4, "tables.t1.rank", "4 must be in [0, 4)"),
        (["tables", "t1", "rank"], True, "tables.t1.rank", "True is not a whole number"),
        (["tables", "t2", "ranks"], [0, 4], "tables.t2.ranks", "4 must be in [0, 4)"),
        (["tables", "t2", "ranks"], [0, 0], "tables.t2", "give different ones in [0, 4)"),
        (["tables", "t2", "ranks"], [0, 1, 2], "tables.t2", "dimension 4 does not divide into 3 equal columns"),
        (["tables", "t2", "ranks"], [], "tables.t2.ranks", "[] is not a list of ranks"),
        (["tables", "t3", "node"], 2, "tables.t3.node", "2 must be in [0, 2)"),
    ],
)
@pytest.mark.parametrize("ending", ["yaml", "json"])
def test_wrong_fields(tmp_path: Path, path: list[str], value: Any, field: str, words: str, ending: str) -> None:
    content: Any = make_plan(CONFIG, 4, 2, KINDS).to_dict()
    inner = content
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    file = tmp_path / f"plan.{ending}"
    file.write_text(json.dumps(content))
    with pytest.raises(PlanError) as caught:
        read_plan(file)
    assert caught.value.field == f"{file}: {field}"
    assert words in caught.value.problem


@pytest.mark.parametrize("field", ["rows", "dimension", "slots", "rank"])
def test_missing_fields(tmp_path: Path, field: str) -> None:
    content = make_plan(CONFIG, 4, 2, KINDS).to_dict()
    del content["tables"]["t1"][field]
    (tmp_path / "plan.json").write_text(json.dumps(content))
    with pytest.raises(PlanError, match=rf"tables\.t1\.{field}: is missing"):
        read_plan(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("plan.json", "{", "is not valid JSON"),
        ("plan.json", "[" * 100_000, "is not valid JSON"),
        ("plan.json", "3", "is not a mapping of fields"),
        ("plan.yaml", "a: [", "is not valid YAML"),
        ("plan.yaml", "a: 1\na: 2", "the key 'a' is given twice"),
        ("plan.yaml", "", "is not a mapping of fields"),
        ("plan.txt", "", "a plan file ends with one of .yaml, .yml, .json"),
        ("plan.yaml", "\xff", "is not UTF-8 text"),
    ],
)
def test_no_plan_at_all(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(PlanError, match=words) as caught:
        read_plan(tmp_path / name)
    assert str(tmp_path / name) in caught.value.field


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="no such file"):
        read_plan(tmp_path / "none.yaml")
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(PlanError, match="cannot be read: Is a directory"):
        read_plan(tmp_path / "folder.yaml")
    with pytest.raises(PlanError, match="a plan file ends with"):
        save_plan(make_plan(CONFIG, 2), tmp_path / "plan")
    with pytest.raises(FileNotFoundError):
        save_plan(make_plan(CONFIG, 2), tmp_path / "none" / "plan.yaml")
