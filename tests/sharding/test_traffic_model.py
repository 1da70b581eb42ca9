"""The communication model by itself: by hand, what holds for every plan, and the page that projects with it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from math import inf
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.sharding.plan_cases import Drawn, drawn
from tpuemb_torch.benchmarks.scaling import WORKLOADS, details, expected_distinct, rows_of, summary
from tpuemb_torch.planning import Plan, PlanError, PlannedTable, TablePlan, make_plan, save_plan
from tpuemb_torch.planning.costs import Machines, seconds
from tpuemb_torch.planning.projection import Network, project, seconds_of
from tpuemb_torch.planning.requests import id_bytes_of
from tpuemb_torch.planning.traffic import traffic
from tpuemb_torch.sharding.placement import RowPlacement

ROOT = Path(__file__).resolve().parents[2]
PAGE, SCRIPT = ROOT / "docs" / "scaling.md", ROOT / "scripts" / "project_scaling"
#: 10 rows of 8 columns; a rank has 6 bags with 12 ids, 5 of them different.
TABLE = PlannedTable("t", 10, 8, 1, bags=6, pooling_factor=2.0, distinct_ids=5.0)


def plan_of(sharding: str, exchange: str = "pooled", ranks: range = range(4)) -> Plan:
    return Plan((TablePlan(TABLE, sharding, ranks, exchange),), 4, 2)  # type: ignore[arg-type]


def by_content(plan: Plan, weighted: bool = False) -> dict[str, tuple[list[float], list[float], list[float]]]:
    """What each rank sends within its node and to the other, and its messages, by phase and content."""
    return {
        f"{c.phase}: {c.content}": (c.wire.sent_within.tolist(), c.wire.sent_between.tolist(), c.messages.tolist())
        for c in traffic(plan, weighted=weighted)
        if c.phase != "agreement"
    }


def test_table_wise_on_two_nodes() -> None:
    """Rank 1 of 4 has the table."""
    others = [1.0, 0.0, 1.0, 1.0]
    within, between = [1, 0, 0, 0], [0, 0, 1, 1]
    assert by_content(plan_of("table_wise", ranks=range(1, 2)), weighted=True) == {
        "input dist: splits": ([32.0] * 4, [64.0] * 4, [3.0] * 4),
        "input dist: lengths": ([48.0 * n for n in within], [48.0 * n for n in between], others),
        "input dist: ids": ([48.0 * n for n in within], [48.0 * n for n in between], others),
        "input dist: gains": ([48.0 * n for n in within], [48.0 * n for n in between], others),
        # 6 bags of 8 columns.
        "output dist: sums": ([0.0, 192.0, 0.0, 0.0], [0.0, 384.0, 0.0, 0.0], [0.0, 3.0, 0.0, 0.0]),
        "backward: gradients": ([192.0 * n for n in within], [192.0 * n for n in between], others),
    }
    distinct = by_content(plan_of("table_wise", "distinct", range(1, 2)))
    assert distinct["input dist: ids"] == ([20.0 * n for n in within], [20.0 * n for n in between], others)
    assert distinct["output dist: rows"] == ([0.0, 160.0, 0.0, 0.0], [0.0, 320.0, 0.0, 0.0], [0.0, 3.0, 0.0, 0.0])
    assert distinct["input dist: counts"] == ([8.0 * n for n in within], [8.0 * n for n in between], others)


def test_rings_of_row_wise_and_of_nodes() -> None:
    found = by_content(plan_of("row_wise"))
    # 4 ranks hand in sums of 4 x 6 bags; 3/4 of them go on, half of that to the other node.
    for content in ("output dist: sums", "backward: gradients"):
        assert found[content] == ([288.0] * 4, [288.0] * 4, [3.0] * 4)
    # Rows 3, 3, 2, 2: so are the ids.
    assert found["input dist: ids"][0] == pytest.approx([48 * 0.3, 48 * 0.3, 48 * 0.2, 48 * 0.2])
    found = by_content(plan_of("table_row_wise", ranks=range(2, 4)))
    assert found["output dist: sums"] == ([0.0, 0.0, 384.0, 384.0], [0.0] * 4, [0.0, 0.0, 1.0, 1.0])
    assert found["output dist: sums between nodes"] == ([0.0] * 4, [0.0, 0.0, 192.0, 192.0], [0.0, 0.0, 1.0, 1.0])
    assert found["backward: gradients between nodes"] == ([0.0] * 4, [192.0, 192.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0])


@given(case=drawn(), nodes=st.integers(1, 3), local=st.integers(1, 3), distinct=st.booleans())
def test_what_is_sent_is_received(case: Drawn, nodes: int, local: int, distinct: bool) -> None:
    exchanges = {n: "distinct" if distinct and kind != "column_wise" else "auto" for n, kind in case.sharding.items()}
    try:
        plan = make_plan(case.config, nodes * local, local, case.sharding, exchange=exchanges)
    except PlanError:
        return
    for collective in traffic(plan, weighted=True, step_protocol=True):
        wire = collective.wire
        assert np.sum(wire.sent_within) == pytest.approx(np.sum(wire.received_within))
        assert np.sum(wire.sent_between) == pytest.approx(np.sum(wire.received_between))
        assert all((np.asarray(values) >= 0).all() for values in wire)
        assert nodes > 1 or not wire.sent_between.any()
        assert local > 1 or not wire.sent_within.any()


def test_numbers_of_the_wrong_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"table 't': numbers of shape \[2, 3\]; give one, or \[4, 4\]"):
        traffic(plan_of("row_wise"), ids={"t": np.zeros((2, 3))})


def test_seconds() -> None:
    network = Network(1000.0, 100.0, 0.5, 2.0, 0.125)
    sums = next(c for c in traffic(plan_of("row_wise")) if c.content == "sums")
    # Three steps around the ring, one of them to the other node; the bytes of both networks at the same time.
    assert seconds_of(sums, network) == (0.288, 2.88, 2 * 0.5 + 2.0)
    rows = next(c for c in traffic(plan_of("table_wise", "distinct", range(1, 2))) if c.content == "rows")
    assert seconds_of(rows, network) == (0.16, 3.2, 2.0 + 3 * 0.125)
    assert seconds_of(rows, network).total == 3.2 + 2.375
    whole = project(traffic(plan_of("row_wise")), network)
    assert whole.seconds == pytest.approx(
        sum(seconds_of(collective, network).total for collective in traffic(plan_of("row_wise")))
    )
    assert whole.slowest == "sums: messages"


@pytest.mark.parametrize(
    ("sharding", "exchange", "ranks"),
    [
        ("column_wise", "pooled", (0, 3)),
        *(
            (sharding, exchange, ranks)
            for exchange in ("pooled", "distinct")
            for sharding, ranks in (
                ("row_wise", range(4)),
                ("table_row_wise", range(2, 4)),
                ("table_wise", range(1, 2)),
            )
        ),
    ],
)
def test_the_planner_weighs_the_same_bytes(sharding: str, exchange: str, ranks: range) -> None:
    """What those with a shard receive of requests and gradients and send of rows, within nodes and between them."""
    even = replace(plan_of(sharding, exchange, ranks).tables[0], table=replace(TABLE, vocabulary_size=12))
    plan = Plan((even,), 4, 2)
    shown = [
        c for c in traffic(plan, weighted=True) if c.phase != "agreement" and c.content not in ("splits", "counts")
    ]
    ways = {"within": Machines(inf, 1, inf), "between": Machines(inf, inf, 1)}
    for way, machines in ways.items():
        weighed = seconds(even, 4, 2, machines)
        for rank in ranks:
            bytes_of = [
                getattr(c.wire, f"{'sent' if c.phase == 'output dist' else 'received'}_{way}")[rank] for c in shown
            ]
            assert sum(bytes_of) == pytest.approx(weighed)


def test_expected_distinct_ids() -> None:
    assert expected_distinct(1, 5) == 1.0
    assert expected_distinct(3, 1) == pytest.approx(1.0)
    shares = 1 / np.arange(1, 10_001)
    shares /= shares.sum()
    assert expected_distinct(10_000, 5000) == pytest.approx((1 - (1 - shares) ** 5000).sum(), rel=1e-6)
    rng = np.random.default_rng(0)
    drawn_ids = [len(np.unique(rng.choice(10_000, 5000, p=shares))) for _ in range(20)]
    assert expected_distinct(10_000, 5000) == pytest.approx(np.mean(drawn_ids), rel=0.02)
    # Above the length that is taken one by one: nearly as exact.
    shares = 1 / np.arange(1, 1_000_001)
    shares /= shares.sum()
    assert expected_distinct(1_000_000, 20_000) == pytest.approx((1 - (1 - shares) ** 20_000).sum(), rel=1e-3)


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_page_has_what_the_model_says(name: str) -> None:
    page = PAGE.read_text(encoding="utf-8").splitlines()
    rows = rows_of(WORKLOADS[name], [8, 64], 8)
    for line in list(details(rows))[2:]:
        assert line in page, f"{line}: run scripts/project_scaling again"
    for line in list(summary(rows))[2:]:
        start = line.rstrip(" |")
        assert any(found.startswith(start) for found in page), f"{line}: run scripts/project_scaling again"


def test_the_script(tmp_path: Path) -> None:
    def run(*arguments: str) -> list[str]:
        command = [sys.executable, str(SCRIPT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()

    printed = run("--ranks", "8", "--workload", "sequence")
    assert printed[0] == f"### sequence: {WORKLOADS['sequence'].title}"
    rows = rows_of(WORKLOADS["sequence"], [8], 8)
    assert printed[2:] == [*summary(rows), "", *details(rows), ""]
    save_plan(plan_of("table_wise", "distinct", range(1, 2)), tmp_path / "plan.yaml")
    assert run("--plan", str(tmp_path / "plan.yaml"))[2:] == [
        "| agreement | all | batch | all_reduce | 48 B | 36 B | 36 B | 36 B | 2 | 0.03 |",
        "| input dist | table_wise | counts | all_to_all | 8 B | 8 B | 4 B | 16 B | 1 | 0.02 |",
        "| input dist | table_wise | ids | all_to_all | 20 B | 20 B | 10 B | 40 B | 1 | 0.02 |",
        "| output dist | table_wise | rows | all_to_all | 640 B | 160 B | 80 B | 320 B | 3 | 0.02 |",
        "| backward | table_wise | gradients | all_to_all | 160 B | 160 B | 80 B | 320 B | 1 | 0.02 |",
    ]


@pytest.mark.parametrize(
    ("rows", "shards", "size"), [(2**31 - 1, 1, 4), (2**31, 1, 8), (2**31 - 1, 4, 8), (2**31 - 4, 4, 4)]
)
def test_ids_take_four_bytes_while_padded_tables_allow_it(rows: int, shards: int, size: int) -> None:
    """The rule of `ShardedTPUEmbeddingBagCollection`, whose placed ids go up to the padded table's last row."""
    sharding = "row_wise" if shards > 1 else "table_wise"
    plan = TablePlan(PlannedTable("t", rows, 1, 0, bags=6), sharding, range(shards))  # type: ignore[arg-type]
    placement = RowPlacement([rows], [shards], "div")
    assert id_bytes_of(plan) == size == (4 if placement.largest_id < torch.iinfo(torch.int32).max else 8)
