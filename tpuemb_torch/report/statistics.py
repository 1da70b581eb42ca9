"""Input statistics as a text table and as a web page."""

from __future__ import annotations

from html import escape as escape_html

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tpuemb_torch.report.page import page
from tpuemb_torch.report.plots import plot_stats, to_svg
from tpuemb_torch.statistics import Stats, TableStats

#: Headings, and whether a column has numbers.
_COLUMNS = (
    "table",
    "rows",
    "touched",
    "ids",
    "distinct/batch",
    "max distinct",
    "ids/bag",
    "bags",
    "empty",
    "max ids/shard",
    "max distinct/shard",
    "hot ids (count)",
)
_TEXT = ("table", "hot ids (count)")
_HOT_IDS_SHOWN = 5


def print_stats(stats: Stats, console: Console | None = None, title: str | None = None) -> None:
    """Prints a line per table.

    Args:
        stats: what to print.
        console: where; by default standard output.
        title: the headline, such as the directory.
    """
    console = console or Console()
    if title:
        console.print(title, style="bold", markup=False)
    console.print(summary(stats), markup=False, highlight=False)
    view = Table(box=box.SIMPLE_HEAD)
    for name in _COLUMNS:
        view.add_column(name, justify="left" if name in _TEXT else "right", overflow="fold")
    for table in stats.tables:
        view.add_row(*(escape(cell) for cell in _cells(table)))
    console.print(view)


def stats_page(stats: Stats, title: str) -> str:
    """Returns a web page in one piece, with the table and the plots.

    Raises:
        ImportError: without matplotlib; says how to install it.
    """
    classes = ['class="text"' if name in _TEXT else "" for name in _COLUMNS]

    def row(tag: str, cells: tuple[str, ...]) -> str:
        inner = (f"<{tag} {kind}>{escape_html(cell)}</{tag}>" for kind, cell in zip(classes, cells, strict=True))
        return f"<tr>{''.join(inner)}</tr>"

    parts = [
        f"<p>{escape_html(summary(stats))}</p>",
        to_svg(plot_stats(stats)),
        "<table>",
        row("th", _COLUMNS),
        *(row("td", _cells(table)) for table in stats.tables),
        "</table>",
    ]
    return page(title, parts)


def summary(stats: Stats) -> str:
    """Returns in one sentence what the numbers are of."""
    ranks = f"{stats.world_size} rank{'' if stats.world_size == 1 else 's'}"
    whose = ranks if stats.rank is None else f"rank {stats.rank} of {stats.world_size}"
    shards = f"{stats.num_shards} shard{'' if stats.num_shards == 1 else 's'} ({stats.sharding_strategy})"
    batches = max((table.batches for table in stats.tables), default=0)
    ids = sum(table.ids for table in stats.tables)
    return f"Input of {whose}: {ids:,} ids in {batches:,} batches; numbers per shard are for {shards}"


def _cells(table: TableStats) -> tuple[str, ...]:
    hot = [f"{row} ({count:,})" for row, count in table.hot_ids[:_HOT_IDS_SHOWN]]
    if len(table.hot_ids) > _HOT_IDS_SHOWN:
        hot.append("...")
    return (
        table.name,
        f"{table.vocabulary_size:,}",
        f"{table.touched_rows:,}",
        f"{table.ids:,}",
        f"{table.mean_distinct_ids:,.1f}",
        f"{table.max_distinct_ids:,}",
        f"{table.pooling_factor:,.2f}",
        f"{table.bags:,}",
        f"{table.empty_bags:,}",
        f"{table.max_ids_per_shard:,}",
        f"{table.max_distinct_ids_per_shard:,}",
        ", ".join(hot),
    )
