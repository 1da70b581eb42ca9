from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import tpuemb_torch as tpuemb
from tests.cli.commands import BROKEN, VALID
from tests.cli.commands import tpuemb as run
from tests.cli.test_cli import ROOT
from tests.statistics.plain import plain_stats
from tpuemb_torch import Stats
from tpuemb_torch.statistics import save_stats


def test_text() -> None:
    result = run("plan", VALID, "--world-size", 4, "--local-world-size", 2, "--sharding", "row_wise")
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0] == str(VALID)
    assert lines[1].startswith("2 tables on 4 ranks, 2 per node; the fullest rank needs ")
    ranks = [line.split() for line in lines[2:] if line.split()[:1] in ([str(rank)] for rank in range(4))]
    # users: 100 x 8 with one slot; items: 50 x 4 with two.
    assert [line[:3] for line in ranks] == [["0", "2", "38"], ["1", "2", "38"], ["2", "2", "37"], ["3", "2", "37"]]
    assert ranks[3][3:7] == ["992", "B", "1.2", "KiB"]
    users = next(line for line in lines if line.split()[:1] == ["users"])
    assert users.split() == ["users", "row_wise", "pooled", "0-3", "25", "8", "3.1", "KiB", "3.1", "KiB"]


def test_json() -> None:
    result = run("plan", VALID, "--world-size", 2, "--sharding", "row_wise", "--hbm", "80GB", "--json")
    assert result.code == 0
    plan = tpuemb.make_plan(tpuemb.load_config(VALID), 2, sharding="row_wise", memory_per_rank=80 * 10**9)
    described = result.json
    assert (described["ok"], described["file"], described["written"]) == (True, str(VALID), [])
    assert described["tables"] == plan.to_dict()["tables"]
    assert described["memory_per_rank"] == 80 * 10**9
    assert described["ranks"][1] == {
        "rank": 1,
        "tables": 2,
        "rows": 75,
        "weight_bytes": 50 * 8 * 4 + 25 * 4 * 4,
        "slot_bytes": 50 * 8 * 4 + 2 * 25 * 4 * 4,
        "batch_bytes": plan.usage[1].batch_bytes,
        "total_bytes": plan.usage[1].total_bytes,
    }


def test_the_plan_file(tmp_path: Path) -> None:
    for name in ("plan.yaml", "plan.json"):
        out = tmp_path / name
        result = run("plan", VALID, "--world-size", 2, "--table", "users=table_wise", "--out", out)
        assert result.code == 0
        assert result.out.endswith(f"wrote {out}\n")
        plan = tpuemb.read_plan(out)
        assert plan.tables[0].sharding == "table_wise"
        assert plan == tpuemb.make_plan(tpuemb.load_config(VALID), 2, sharding={"users": "table_wise", "items": "auto"})


def test_batches_of_statistics(tmp_path: Path) -> None:
    own = (plain_stats("users", 100, [[[1, 2, 3], [4]]], 1),)
    rank = Stats(own, 1, "div", 1, 0)
    save_stats(Stats(own, 1, "div", 1, None, (rank,)), tmp_path)
    result = run("plan", VALID, "--world-size", 2, "--stats", tmp_path, "--json")
    assert result.json["tables"]["users"]["pooling_factor"] == 2.0
    assert result.json["tables"]["users"]["distinct_ids"] == 4.0
    assert result.json["tables"]["items"]["pooling_factor"] == 1.0
    assert "distinct_ids" not in result.json["tables"]["items"]


def test_what_ranks_exchange() -> None:
    rows = ("plan", VALID, "--world-size", 2, "--sharding", "row_wise", "--json", "--exchange")
    for exchange in ("pooled", "distinct"):
        assert {table["exchange"] for table in run(*rows, exchange).json["tables"].values()} == {exchange}
    assert run(*rows, "rows").code == 2


def test_wrong_input(tmp_path: Path) -> None:
    result = run("plan", BROKEN, "--world-size", 2)
    assert result.code == 1
    assert "dimesion" in result.err
    result = run("plan", VALID, "--world-size", 2, "--hbm", "1KB")
    assert result.code == 1
    for words in ("the tables do not fit", "table 'users': needs 6.2 KiB (6,400 bytes)", "table 'items'", "would fit"):
        assert words in result.err
    result = run("plan", VALID, "--world-size", 3, "--sharding", "column_wise", "--json")
    assert result.code == 1
    assert result.json["error"]["field"] == "table 'users'"
    assert "does not divide into 3" in result.json["error"]["problem"]
    result = run("plan", VALID, "--world-size", 2, "--table", "nobody=row_wise")
    assert (result.code, result.out) == (1, "")
    assert "no table 'nobody'" in result.err
    assert run("plan", VALID, "--world-size", 2, "--stats", tmp_path).code == 1
    result = run("plan", VALID, "--world-size", 2, "--out", tmp_path / "plan.txt")
    assert result.code == 1
    assert "a plan file ends with" in result.err


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--world-size", 0),
        ("--world-size", "many"),
        ("--world-size", 4, "--local-world-size", 3),
        ("--world-size", 4, "--sharding", "rows"),
        ("--world-size", 4, "--hbm", "plenty"),
        ("--world-size", 4, "--table", "users"),
        ("--world-size", 4, "--table", "users=rows"),
        ("--world-size", 4, "--device", "tpu"),
    ],
)
def test_wrong_usage(arguments: tuple[object, ...]) -> None:
    assert run("plan", VALID, *arguments).code == 2


def test_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    png, html = tmp_path / "a.png", tmp_path / "b.html"
    result = run("plan", VALID, "--world-size", 2, "--hbm", "1MB", "--png", png, "--html", html)
    assert (result.code, result.err) == (0, "")
    assert png.read_bytes().startswith(b"\x89PNG")
    page = html.read_text()
    assert "<svg" in page
    assert "<h2>Ranks</h2>" in page and "users" in page


def test_without_matplotlib_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for option in ("--png", "--html"):
        result = run("plan", VALID, "--world-size", 2, "--out", tmp_path / "plan.yaml", option, tmp_path / "picture")
        assert result.code == 1
        assert "plots need matplotlib" in result.err
    assert list(tmp_path.iterdir()) == []


def test_imports_no_torchrec() -> None:
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
sys.argv = ["tpuemb", "plan", {str(VALID)!r}, "--world-size", "2"]
from tpuemb_torch.cli import main
try:
    main()
except SystemExit:
    pass
print("torchrec" in sys.modules, "fbgemm_gpu" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "users" in done.stdout
    assert done.stdout.splitlines()[-1] == "False False"
