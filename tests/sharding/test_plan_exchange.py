"""Which tables a plan lets exchange distinct rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.sharding.plan_cases import BATCH, config_of
from tpuemb_torch.planning import PlanError, make_plan, read_plan, save_plan

CONFIG = config_of([(1000, 8, "sgd", True), (3, 8, "sgd", True), (1000, 8, "sgd", False)])


def exchanges(sharding: str = "row_wise", local: int = 2, **arguments: Any) -> list[str]:
    return [table.exchange for table in make_plan(CONFIG, 4, local, sharding, **arguments).tables]


def test_auto_takes_distinct_rows_where_they_cost_less() -> None:
    # Nothing is known of the batches: 10 ids a bag, or as many as the table has rows.
    assert exchanges() == ["pooled", "distinct", "pooled"]
    assert exchanges(local=4) == ["pooled", "distinct", "pooled"]
    assert [t.exchange for t in make_plan(CONFIG, 256, 8, "row_wise").tables] == ["distinct"] * 3
    assert [t.exchange for t in make_plan(CONFIG, 256, 8, "table_wise").tables] == ["pooled", "distinct", "pooled"]
    # Sums of the bags of 4 ranks go around a ring, which crosses each of 2 nodes once; rows go to the rank that asks.
    assert exchanges(pooling_factors={"t0": 3.0, "t2": 4.0}) == ["distinct", "distinct", "pooled"]
    assert exchanges(distinct_ids={"t0": 16.0, "t2": 12.0}) == ["pooled", "distinct", "distinct"]
    # On one node it is as many bags as ranks.
    assert exchanges(local=4, pooling_factors={"t0": 4.0, "t2": 5.0}) == ["distinct", "distinct", "pooled"]
    # Table-wise, sums are those of the rank's own bags.
    assert exchanges("table_wise", pooling_factors={"t0": 1.0, "t2": 2.0}) == ["distinct", "distinct", "pooled"]
    assert exchanges("column_wise", pooling_factors={"t0": 1.0}) == ["pooled"] * 3
    assert [table.exchange for table in make_plan(CONFIG, 1, sharding="row_wise").tables] == ["pooled"] * 3


def test_node_wise_without_accumulation_needs_distinct_rows() -> None:
    assert exchanges("table_row_wise", pooling_factors={"t0": 2.0}) == ["pooled", "distinct", "distinct"]
    assert make_plan(CONFIG, 1, sharding="table_row_wise").tables[2].exchange == "distinct"
    with pytest.raises(PlanError, match="use exchange distinct, row_wise or table_wise"):
        exchanges("table_row_wise", exchange="pooled")


def test_what_is_asked_for_is_done_or_refused() -> None:
    assert exchanges(exchange="distinct") == ["distinct"] * 3
    assert exchanges(exchange="pooled") == ["pooled"] * 3
    assert exchanges(exchange={"t0": "distinct", "t1": "pooled"}) == ["distinct", "pooled", "pooled"]
    with pytest.raises(PlanError, match="column_wise exchanges sums of bags"):
        exchanges("column_wise", exchange="distinct")
    with pytest.raises(PlanError, match="exchange 'rows' is not one of auto, pooled, distinct"):
        exchanges(exchange="rows")
    for wrong in ("", None, 3, ["distinct"]):
        with pytest.raises(PlanError, match=r"one of auto, pooled, distinct"):
            exchanges(exchange=wrong)
    with pytest.raises(PlanError, match="no table 't9'"):
        exchanges(exchange={"t9": "pooled"})
    with pytest.raises(PlanError, match=r"distinct_ids.*-1"):
        exchanges(distinct_ids={"t0": -1})


def test_files_keep_it(tmp_path: Path) -> None:
    plan = make_plan(CONFIG, 4, 2, "row_wise", exchange={"t0": "distinct"}, distinct_ids={"t0": 2.5})
    save_plan(plan, tmp_path / "plan.yaml")
    assert read_plan(tmp_path / "plan.yaml") == plan
    text = (tmp_path / "plan.yaml").read_text()
    (tmp_path / "old.yaml").write_text("\n".join(line for line in text.splitlines() if "exchange" not in line))
    assert [table.exchange for table in read_plan(tmp_path / "old.yaml").tables] == ["pooled"] * 3
    for old, new, words in (
        ("exchange: distinct", "exchange: rows", "exchange: 'rows' is not one of pooled, distinct"),
        ("distinct_ids: 2.5", "distinct_ids: -1", "distinct_ids: -1 is not a finite number"),
        ("sharding: row_wise", "sharding: column_wise", "ranks"),
    ):
        assert old in text
        (tmp_path / "wrong.yaml").write_text(text.replace(old, new, 1))
        with pytest.raises(PlanError, match=words):
            read_plan(tmp_path / "wrong.yaml")


def test_memory_counts_the_rows_that_travel() -> None:
    pooled, distinct = (make_plan(CONFIG, 4, 4, "row_wise", exchange=e).tables[0] for e in ("pooled", "distinct"))
    # A shard gets a quarter of each rank's 4 distinct rows; of bags, all.
    assert distinct.batch_bytes(4) == BATCH * (8 + 2 * 8 * 4)
    assert pooled.batch_bytes(4) == BATCH * 12 + 2 * 4 * BATCH * 8 * 4
    assert distinct.own_bytes == 2 * pooled.own_bytes == 2 * 2 * BATCH * 8 * 4
