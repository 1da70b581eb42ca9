from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli.commands import tpuemb
from tests.cli.test_cli import ROOT
from tests.statistics.plain import plain_stats
from tpuemb_torch import Stats, read_stats
from tpuemb_torch.statistics import merge_tables, save_stats


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Statistics of two ranks."""
    batches = [[[[7, 7, 1], []]], [[[2_345], [7]]]]
    ranks = tuple(Stats((plain_stats("users", 12_345, own, 2),), 2, "div", 2, rank) for rank, own in enumerate(batches))
    tables = (merge_tables([own.tables[0] for own in ranks], 3, [(7, 3), (1, 1), (2_345, 1)]),)
    save_stats(Stats(tables, 2, "div", 2, None, ranks), tmp_path / "profiles")
    return tmp_path / "profiles"


def test_text(folder: Path) -> None:
    result = tpuemb("stats", folder)
    assert (result.code, result.err) == (0, "")
    title, summary, *_ = result.out.splitlines()
    assert title == str(folder)
    assert summary == "Input of 2 ranks: 5 ids in 2 batches; numbers per shard are for 2 shards (div)"
    line = next(line for line in result.out.splitlines() if line.strip().startswith("users"))
    numbers = "12,345 3 5 2.0 2 1.25 4 1 3 2".split()
    assert line.split() == ["users", *numbers, "7", "(3),", "1", "(1),", "2345", "(1)"]


def test_one_rank(folder: Path) -> None:
    result = tpuemb("stats", folder, "--rank", 1)
    assert result.code == 0
    assert "Input of rank 1 of 2: 2 ids in 1 batches" in result.out
    assert tpuemb("stats", folder, "--rank", 0, "--json").json["tables"][0]["ids"] == 3
    for rank in (-1, 2):
        wrong = tpuemb("stats", folder, "--rank", rank)
        assert wrong.code == 2
        assert "--rank" in wrong.err and f"{rank} is outside [0, 2)" in wrong.err


def test_json(folder: Path) -> None:
    result = tpuemb("stats", "--json", folder)
    assert result.code == 0
    assert result.json == {
        "ok": True,
        "directory": str(folder),
        "written": [],
        **json.loads(read_stats(folder).to_json()),
    }


def test_wrong_input(tmp_path: Path, folder: Path) -> None:
    result = tpuemb("stats", tmp_path)
    assert result.code == 1
    assert result.err.startswith(f"error: {tmp_path / 'stats.json'}: no such file")
    (folder / "stats.json").write_text((folder / "stats.json").read_text().replace('"ids": 5', '"ids": "5"'))
    result = tpuemb("stats", "--json", folder)
    assert result.code == 1
    assert result.json == {
        "ok": False,
        "error": {
            "field": f"{folder / 'stats.json'}: tables[0].ids",
            "problem": "a string instead of a whole number",
        },
    }


def test_wrong_usage(folder: Path) -> None:
    assert tpuemb("stats").code == 2
    assert tpuemb("stats", folder, folder).code == 2


def test_plots(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    png, html = tmp_path / "a.png", tmp_path / "b.html"
    result = tpuemb("stats", folder, "--png", png, "--html", html)
    assert (result.code, result.err) == (0, "")
    assert f"wrote {png}\nwrote {html}\n" in result.out
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "<svg" in html.read_text()
    assert tpuemb("stats", folder, "--html", html, "--json").json["written"] == [str(html)]
    result = tpuemb("stats", folder, "--png", tmp_path / "none" / "a.png")
    assert result.code == 1
    assert "No such file" in result.err


def test_without_matplotlib(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for option in ("--png", "--html"):
        result = tpuemb("stats", folder, option, tmp_path / "out")
        assert result.code == 1
        assert "plots need matplotlib" in result.err and 'pip install "tpuemb-torch[plot]"' in result.err
    assert tpuemb("stats", folder, "--png", tmp_path / "out", "--json").json["error"]["field"] is None
    assert not (tmp_path / "out").exists()
    assert tpuemb("stats", folder).code == 0


def test_imports_no_torch(folder: Path) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
sys.argv = ["tpuemb", "stats", {str(folder)!r}]
from tpuemb_torch.cli import main
try:
    main()
except SystemExit:
    pass
print("torch" in sys.modules, "matplotlib" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "users" in done.stdout
    assert done.stdout.splitlines()[-1] == "False False"


def test_a_rank_by_itself_has_no_ranks(folder: Path) -> None:
    assert replace(read_stats(folder).ranks[0], rank=None).ranks == ()
    assert "ranks" not in tpuemb("stats", folder, "--rank", 0, "--json").json
