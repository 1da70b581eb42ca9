"""How the step's cost grows: one quantity at a time, the others fixed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from tpuemb_torch.benchmarks.implementations import OPTIMIZERS, Batch, Ours
from tpuemb_torch.benchmarks.measure import distinct_rows, interleaved, machine, random_gradient
from tpuemb_torch.benchmarks.workloads import Workload

#: What all have in common unless it is the quantity: one table, uniform ids, 10 a bag.
_BASE = Workload("growth", (1_000_000,), 64, 8_192, (10,), None)


def quantities() -> Mapping[str, Sequence[tuple[int, Workload]]]:
    """The values of each quantity with their workloads."""
    return {
        "ids": [(10 * batch, replace(_BASE, batch=batch)) for batch in (512, 2_048, 8_192, 32_768)],
        # The same number of ids, drawn from fewer rows: fewer are distinct.
        "distinct rows": [(rows, replace(_BASE, rows=(rows,))) for rows in (1_000, 10_000, 100_000, 1_000_000)],
        # The same distinct rows, spread over larger tables.
        "rows of the table": [
            (rows, replace(_BASE, rows=(rows,), dim=32)) for rows in (500_000, 2_000_000, 8_000_000, 20_000_000)
        ],
        "tables": [
            (count, replace(_BASE, rows=(1_000_000 // count,) * count, batch=512, hots=(max(1, 160 // count),) * count))
            for count in (1, 10, 100)
        ]
        + [(1_000, replace(_BASE, rows=(1_000,) * 1_000, batch=82, hots=(1,) * 1_000))],
        "dimension": [(dim, replace(_BASE, rows=(200_000,), dim=dim)) for dim in (1, 8, 32, 64, 65, 128, 512)],
    }


def bench_growth(
    optimizer: str = "adagrad",
    repeats: int = 9,
    factor: float = 1.0,
    patience: float = 0.0,
    processor_time: bool = False,
) -> dict[str, Any]:
    """Measures the compiled step for each value of each quantity, the values in turns.

    Args:
        optimizer: name of `OPTIMIZERS`.
        repeats: steps of each.
        factor: on rows and batches, for a try.
        patience: see `interleaved`.
        processor_time: see `interleaved`.

    Returns:
        `{"machine", "optimizer", "rows": [{"quantity", "value", "ids", "distinct_rows", "step_ms", ...}]}`.
    """
    rows = []
    for quantity, cases in quantities().items():
        prepared = []
        for value, workload in cases:
            workload = workload if factor == 1.0 else workload.scaled(factor)
            ids, offsets = workload.draw(seed=1)
            batch = Batch(workload, ids, offsets, random_gradient(workload.bags, workload.dim * len(workload.rows)))
            ours = Ours(workload, OPTIMIZERS[optimizer], "compiled", "cpu")
            ours.load(batch)
            prepared.append((value, batch, ours))
        measured = interleaved(
            [ours for _, _, ours in prepared], repeats, "cpu", patience=patience, processor_time=processor_time
        )
        for (value, batch, _), times in zip(prepared, measured, strict=True):
            common = {"quantity": quantity, "value": value, "ids": batch.workload.ids}
            rows.append({**common, "distinct_rows": distinct_rows(batch), **times.summary()})
    return {"machine": machine("cpu"), "optimizer": optimizer, "rows": rows}


def print_growth(result: dict[str, Any], console: Console) -> None:
    """Prints what `bench_growth` returned."""
    table = Table(title=f"Growth of the {result['optimizer']} step")
    for heading in ("quantity", "value", "ids", "distinct rows", "forward ms", "step ms", "ns an id"):
        table.add_column(heading, justify="left" if heading == "quantity" else "right")
    for row in result["rows"]:
        table.add_row(
            row["quantity"],
            f"{row['value']:,}",
            f"{row['ids']:,}",
            f"{row['distinct_rows']:,}",
            f"{row['forward_ms']:.2f}",
            f"{row['step_ms']:.2f}",
            f"{1e6 * row['step_ms'] / row['ids']:.0f}",
        )
    console.print(table)


def plot_growth(result: dict[str, Any], path: Path) -> None:
    """Writes a plot of what `bench_growth` returned; needs matplotlib."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row["quantity"] for row in result["rows"]))
    figure = Figure(figsize=(3.2 * len(names), 3.0), layout="constrained")
    for axes, name in zip(np.atleast_1d(figure.subplots(1, len(names))), names, strict=True):
        chosen = [row for row in result["rows"] if row["quantity"] == name]
        axes.plot([row["value"] for row in chosen], [row["step_ms"] for row in chosen], "o-", label="step")
        axes.plot([row["value"] for row in chosen], [row["forward_ms"] for row in chosen], "s--", label="lookup")
        axes.set(xscale="log", xlabel=name, ylabel="ms", ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path)
