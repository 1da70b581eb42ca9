"""Statistics as text, figure and web page."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from rich.console import Console

from tests.statistics.plain import plain_stats
from tpuemb_torch import Stats
from tpuemb_torch.report import plot_stats, print_stats, save_png, stats_page, to_svg

ODD = "[red]<b>$x$ & y</b>[/red]"


def example(tables: int = 2) -> Stats:
    found = [plain_stats(ODD, 100, [[[1] * 6, [2, 3, 4, 5, 6, 7], []], [[1], []]])]
    found += [plain_stats(f"table {number}", 50, [[[0] * number], [[]]], 4) for number in range(1, tables)]
    return Stats(tuple(found), 4, "mod")


def printed(stats: Stats, width: int = 200) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_stats(stats, console, "[/title]")
    return console.export_text()


def test_text() -> None:
    text = printed(example())
    assert text.startswith(
        "[/title]\nInput of rank 0 of 1: 14 ids in 2 batches; numbers per shard are for 4 shards (mod)"
    )
    line = next(line for line in text.splitlines() if ODD in line)
    assert line.replace(ODD, "").split()[:10] == ["100", "7", "13", "4.0", "7", "2.60", "5", "2", "12", "7"]
    # Five of the seven hot ids, and that there are more.
    assert line.rstrip().endswith("1 (7), 2 (1), 3 (1), 4 (1), 5 (1), ...")
    assert "…" not in printed(example(), width=60)


def test_no_tables_and_no_ids() -> None:
    assert "0 ids in 0 batches" in printed(Stats((), 1, "div"))
    assert "1 shard (div)" in printed(Stats((plain_stats("t", 3, []),), 1, "div"))


def bars(axes: object, label: str) -> list[float]:
    container = next(c for c in axes.containers if c.get_label() == label)  # type: ignore[attr-defined]
    return [round(bar.get_width(), 6) for bar in container]


def test_figure() -> None:
    pytest.importorskip("matplotlib")
    means, shards, hot = plot_stats(example(4)).axes
    assert bars(means, "ids") == [6.5, 1.5, 1.0, 0.5]
    assert bars(means, "distinct ids") == [4.0, 0.5, 0.5, 0.5]
    assert bars(shards, "ids") == [12, 3, 2, 1]
    assert bars(shards, "distinct ids") == [7, 1, 1, 1]
    assert [label.get_text() for label in means.get_yticklabels()][1:] == ["table 3", "table 2", "table 1"]
    assert "4 shards" in shards.get_title()
    assert [line.get_label() for line in hot.lines][1:] == ["table 3", "table 2", "table 1"]
    assert list(hot.lines[0].get_ydata()) == [7 / 13] + [1 / 13] * 6


def test_only_the_busiest_of_many_tables_are_drawn() -> None:
    pytest.importorskip("matplotlib")
    means, _, hot = plot_stats(example(60)).axes
    assert len(bars(means, "ids")) == 40
    assert bars(means, "ids")[0] == 29.5
    assert "20 tables with fewer ids not shown" in means.get_title()
    assert len(hot.lines) == 10


def test_nothing_to_draw(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for stats in (Stats((), 1, "div"), Stats((plain_stats("t", 3, []),), 1, "div")):
        save_png(plot_stats(stats), tmp_path / "a.png")
        assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_page() -> None:
    pytest.importorskip("matplotlib")
    page = stats_page(example(), "profiles <1>")
    assert page == stats_page(example(), "profiles <1>")
    assert page.startswith("<!DOCTYPE html>")
    assert "<h1>profiles &lt;1&gt;</h1>" in page
    assert "[red]&lt;b&gt;$x$ &amp; y&lt;/b&gt;[/red]" in page
    assert "<b>" not in page
    assert page.count("<tr>") == 3
    cells = re.findall(r"<td [^>]*>([^<]*)</td>", page[page.rindex("<tr>") :])
    assert cells[:5] == ["table 1", "50", "1", "1", "0.5"]
    # In one piece: nothing is fetched from anywhere.
    assert not re.findall(r'(?:src|href)="(?!#)', page.replace("xlink:href", "href"))


def test_svg() -> None:
    pytest.importorskip("matplotlib")
    svg = to_svg(plot_stats(example()))
    assert ElementTree.fromstring(svg).tag == "{http://www.w3.org/2000/svg}svg"
