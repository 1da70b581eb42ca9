"""Plans as text tables, plots and a web page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape as escape_html
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tpuemb_torch.planning import Plan, format_bytes
from tpuemb_torch.report.page import page
from tpuemb_torch.report.plots import require_matplotlib, to_svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_RANK_COLUMNS = ("rank", "tables", "rows", "weights", "slots", "buffers of a step", "total")
_TABLE_COLUMNS = ("table", "sharding", "exchange", "ranks", "rows/rank", "columns/rank", "weights", "slots")
_TEXT = ("table", "sharding", "exchange", "ranks")
_MOST_RANKS_NAMED = 8


def print_plan(plan: Plan, console: Console | None = None, title: str | None = None) -> None:
    """Prints a line per rank and a line per table.

    Args:
        plan: what to print.
        console: where; by default standard output.
        title: the headline, such as the name of the file.
    """
    console = console or Console()
    if title:
        console.print(title, style="bold", markup=False)
    console.print(plan_summary(plan), markup=False, highlight=False)
    for name, columns, rows in _views(plan):
        view = Table(title=name, title_justify="left", box=box.SIMPLE_HEAD)
        for column in columns:
            view.add_column(column, justify="left" if column in _TEXT else "right", overflow="fold")
        for cells in rows:
            view.add_row(*(escape(cell) for cell in cells))
        console.print(view)


def plan_page(plan: Plan, title: str) -> str:
    """Returns a web page in one piece, with the tables and the plot.

    Raises:
        ImportError: without matplotlib; says how to install it.
    """
    parts = [f"<p>{escape_html(plan_summary(plan))}</p>", to_svg(plot_plan(plan))]
    for name, columns, rows in _views(plan):
        classes = [' class="text"' if column in _TEXT else "" for column in columns]
        parts.append(f"<h2>{escape_html(name)}</h2><table>")
        for tag, line in (("th", columns), *(("td", cells) for cells in rows)):
            cells = (f"<{tag}{kind}>{escape_html(cell)}</{tag}>" for kind, cell in zip(classes, line, strict=True))
            parts.append(f"<tr>{''.join(cells)}</tr>")
        parts.append("</table>")
    return page(title, parts)


def plot_plan(plan: Plan) -> Figure:
    """Returns a figure: the memory of each rank by weights, slots and buffers, and what each kind of sharding stores.

    Raises:
        ImportError: without matplotlib; says how to install it.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 5), layout="constrained")
    memory, kinds = figure.subplots(1, 2, width_ratios=(3, 1))
    unit = 2**30
    below: list[float] = [0.0] * plan.world_size
    for label, field in (("weights", "weight_bytes"), ("slots", "slot_bytes"), ("buffers of a step", "batch_bytes")):
        top = [low + getattr(usage, field) / unit for low, usage in zip(below, plan.usage, strict=True)]
        # One outline for all ranks, however many.
        edges = [rank - 0.5 for rank in range(plan.world_size + 1)]
        memory.stairs(top, edges, baseline=below, fill=True, label=label)
        below = top
    if plan.memory_per_rank is not None:
        memory.axhline(plan.memory_per_rank / unit, color="black", linestyle="--", label="limit")
    memory.set_title("memory of each rank")
    memory.set_xlabel("rank")
    memory.set_ylabel("GiB")
    memory.set_ylim(bottom=0)
    memory.legend(fontsize="small")
    stored = _stored_by_kind(plan)
    kinds.barh(list(stored), [size / unit for size, _ in stored.values()])
    kinds.set_yticks(range(len(stored)), [f"{kind} ({count} tables)" for kind, (_, count) in stored.items()])
    kinds.set_title("weights and slots by sharding")
    kinds.set_xlabel("GiB")
    return figure


def plan_summary(plan: Plan) -> str:
    """Returns in one sentence what a plan is for, and how full its ranks are."""
    totals = [usage.total_bytes for usage in plan.usage]
    tables = f"{len(plan.tables)} table{'' if len(plan.tables) == 1 else 's'}"
    ranks = f"{plan.world_size} rank{'' if plan.world_size == 1 else 's'}"
    limit = "" if plan.memory_per_rank is None else f" of {format_bytes(plan.memory_per_rank)}"
    mean = sum(totals) // len(totals)
    return (
        f"{tables} on {ranks}, {plan.local_world_size} per node; the fullest rank needs {format_bytes(max(totals))}"
        f"{limit}, the mean {format_bytes(mean)}, the emptiest {format_bytes(min(totals))}"
    )


def describe_plan(plan: Plan) -> dict[str, Any]:
    """Returns a plan as plain values that JSON can hold: those of its file, and "ranks" with each rank's sizes."""
    return {
        **plan.to_dict(),
        "ranks": [
            {
                "rank": usage.rank,
                "tables": usage.tables,
                "rows": usage.rows,
                "weight_bytes": usage.weight_bytes,
                "slot_bytes": usage.slot_bytes,
                "batch_bytes": usage.batch_bytes,
                "total_bytes": usage.total_bytes,
            }
            for usage in plan.usage
        ],
    }


def _views(plan: Plan) -> list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
    ranks: list[tuple[str, ...]] = [
        (
            str(usage.rank),
            f"{usage.tables:,}",
            f"{usage.rows:,}",
            *map(format_bytes, (usage.weight_bytes, usage.slot_bytes, usage.batch_bytes, usage.total_bytes)),
        )
        for usage in plan.usage
    ]
    tables: list[tuple[str, ...]] = [
        (
            planned.table.name,
            planned.sharding,
            planned.exchange,
            _ranks(planned.ranks),
            f"{planned.rows(0):,}",
            str(planned.columns),
            format_bytes(planned.table.weight_bytes),
            format_bytes(planned.table.weight_bytes * planned.table.num_slots),
        )
        for planned in plan.tables
    ]
    return [("Ranks", _RANK_COLUMNS, ranks), ("Tables", _TABLE_COLUMNS, tables)]


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    shown = " ".join(map(str, ranks[:_MOST_RANKS_NAMED]))
    return shown if len(ranks) <= _MOST_RANKS_NAMED else f"{shown} and {len(ranks) - _MOST_RANKS_NAMED} more"


def _stored_by_kind(plan: Plan) -> dict[str, tuple[int, int]]:
    stored: dict[str, tuple[int, int]] = {}
    for planned in plan.tables:
        size, count = stored.get(planned.sharding, (0, 0))
        stored[planned.sharding] = (size + planned.table.weight_bytes * (1 + planned.table.num_slots), count + 1)
    return stored
