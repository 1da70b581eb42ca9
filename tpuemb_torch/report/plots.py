"""Plots, drawn with matplotlib where it is installed (the extra "plot"); no window, no global state."""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING, Any

from tpuemb_torch.statistics import Stats, TableStats

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_TABLES = 40
_MOST_CURVES = 10


def require_matplotlib() -> None:
    """Imports matplotlib.

    Raises:
        ImportError: if it is missing or broken; says how to install it.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ImportError(f'plots need matplotlib ({error}): pip install "tpuemb-torch[plot]"') from error


def plot_stats(stats: Stats) -> Figure:
    """Returns a figure of input statistics: ids and distinct ids of a batch, the largest shards, and the hot ids.

    Of very many tables, those with the most ids are drawn.

    Raises:
        ImportError: without matplotlib; says how to install it.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    shown = sorted(stats.tables, key=lambda table: -table.ids)[:_MOST_TABLES]
    names = [_shortened(table.name) for table in shown]
    figure = Figure(figsize=(16, max(4.0, 1.5 + 0.3 * len(shown))), layout="constrained")
    means, shards, hot = figure.subplots(1, 3)
    _pairs(
        means,
        names,
        {
            "ids": [_per_batch(table, table.ids) for table in shown],
            "distinct ids": [t.mean_distinct_ids for t in shown],
        },
    )
    left_out = len(stats.tables) - len(shown)
    means.set_title("mean of a batch" + (f" ({left_out} tables with fewer ids not shown)" if left_out else ""))
    _pairs(
        shards,
        names,
        {
            "ids": [float(table.max_ids_per_shard) for table in shown],
            "distinct ids": [float(table.max_distinct_ids_per_shard) for table in shown],
        },
    )
    shards.tick_params(labelleft=False)  # the names are on the left of the figure
    shards.set_title(f"most of a batch in one of {stats.num_shards} shards")
    for table, name in list(zip(shown, names, strict=True))[:_MOST_CURVES]:
        if table.hot_ids:
            shares = [count / table.ids for _, count in table.hot_ids]
            hot.plot(range(1, len(shares) + 1), shares, marker="o", markersize=3, label=name)
    hot.set_title("share of a table's ids")
    hot.set_xlabel("hot id, the most frequent first")
    hot.set_ylim(bottom=0)
    hot.xaxis.get_major_locator().set_params(integer=True)
    if hot.lines:
        hot.legend(fontsize="small")
    return figure


def save_png(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Writes a figure to a PNG file, which appears whole or not at all."""
    from pathlib import Path

    from tpuemb_torch.config.write import write_atomically

    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100)
    write_atomically(Path(path), buffer.getvalue())


def to_svg(figure: Figure) -> str:
    """Returns a figure as an `<svg>` element; the same figure gives the same text."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "tpuemb"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _pairs(axes: Any, names: list[str], values: dict[str, list[float]]) -> None:
    """Two bars for each name, the first name on top."""
    height = 0.4
    for number, (label, widths) in enumerate(values.items()):
        axes.barh([place + number * height for place in range(len(names))], widths, height, label=label)
    axes.set_xscale("symlog", linthresh=1)  # tables differ by orders of magnitude, and may have 0
    axes.set_yticks([place + height / 2 for place in range(len(names))], names)
    axes.invert_yaxis()
    axes.legend(fontsize="small")


def _per_batch(table: TableStats, number: int) -> float:
    return number / table.batches if table.batches else 0.0


def _shortened(name: str) -> str:
    # Dollar signs would be mathematics.
    return (name if len(name) <= 30 else f"{name[:29]}…").replace("$", r"\$")
