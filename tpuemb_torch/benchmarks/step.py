"""`bench_step`: the embedding step of this package beside others, in one process."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from tpuemb_torch.benchmarks.implementations import IMPLEMENTATIONS, OPTIMIZERS, Batch, Implementation
from tpuemb_torch.benchmarks.measure import (
    copy_bandwidth,
    distinct_rows,
    error_of_first_step,
    interleaved,
    machine,
    moved_bytes,
    peak_memory,
    random_gradient,
)
from tpuemb_torch.benchmarks.workloads import WORKLOADS, Workload
from tpuemb_torch.config import Config
from tpuemb_torch.optimizers import slots_of


def bench_step(
    workloads: Sequence[str],
    optimizers: Sequence[str],
    implementations: Sequence[str],
    repeats: int = 15,
    threads: int | None = None,
    device: str = "cpu",
    scale: float = 1.0,
    patience: float = 0.0,
    processor_time: bool = False,
) -> dict[str, Any]:
    """Measures steps.

    Args:
        workloads: names of `WORKLOADS`.
        optimizers: names of `OPTIMIZERS`.
        implementations: names of `IMPLEMENTATIONS`; each is timed in turns with the first one.
        repeats: steps of each after the warm-up.
        threads: number of threads; None leaves torch's.
        device: "cpu" or "cuda".
        scale: factor on rows and batches, for a try.
        patience: see `interleaved`.
        processor_time: see `interleaved`.

    Returns:
        `{"machine", "copy_gb_per_s", "rows": [...]}`, ready for JSON.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    result: dict[str, Any] = {"machine": machine(device), "copy_gb_per_s": copy_bandwidth(device), "rows": []}
    for name in workloads:
        workload = WORKLOADS[name] if scale == 1.0 else WORKLOADS[name].scaled(scale)
        ids, offsets = workload.draw(seed=1)
        batch = Batch(workload, ids, offsets, random_gradient(workload.bags, workload.dim * len(workload.rows)))
        distinct = distinct_rows(batch)
        for optimizer in optimizers:
            for row in _rows(batch, optimizer, implementations, repeats, device, patience, processor_time):
                slots = len(slots_of(_config(workload, optimizer).tables[0].optimizer))
                row["ids"], row["distinct_rows"] = workload.ids, distinct
                row["ids_per_s"] = workload.ids / row["step_ms"] * 1e3
                row["gb_per_s"] = moved_bytes(batch, distinct, slots) / row["step_ms"] / 1e6
                row["load"] = os.getloadavg()[0]
                result["rows"].append(row)
    return result


def _config(workload: Workload, optimizer: str) -> Config:
    one = Workload(workload.name, workload.rows[:1], workload.dim, workload.batch, workload.hots[:1], None)
    return one.config(OPTIMIZERS[optimizer])


def _rows(
    batch: Batch,
    optimizer: str,
    implementations: Sequence[str],
    repeats: int,
    device: str,
    patience: float,
    processor_time: bool,
) -> Iterator[dict[str, Any]]:
    """One row per implementation; at most two are in memory."""
    names = [
        name
        for name in implementations
        if (has := IMPLEMENTATIONS[name].optimizers) is None or optimizer in has
        if device in IMPLEMENTATIONS[name].devices
    ]
    if not names:
        return

    def build(name: str) -> tuple[Implementation, dict[str, Any]]:
        entry = IMPLEMENTATIONS[name]
        implementation = entry.build(batch.workload, OPTIMIZERS[optimizer], entry.kernel, device)
        implementation.load(batch)
        error = error_of_first_step(implementation, batch, OPTIMIZERS[optimizer])
        row = {"workload": batch.workload.name, "optimizer": optimizer, "implementation": entry.label}
        for _ in range(2):  # what is compiled or loaded once is not part of a step's memory
            implementation.forward()
            implementation.backward()
        return implementation, {**row, "max_error": error, "peak_bytes": peak_memory(implementation)}

    ours, own_row = build(names[0])
    if len(names) == 1:
        (times,) = interleaved([ours], repeats, device, patience=patience, processor_time=processor_time)
        yield {**own_row, **times.summary(), "ratio": 1.0}
    for index, name in enumerate(names[1:]):
        other, row = build(name)
        own_times, times = interleaved([ours, other], repeats, device, patience=patience, processor_time=processor_time)
        own, theirs = own_times.summary(), times.summary()
        if index == 0:
            yield {**own_row, **own, "ratio": 1.0}
        yield {**row, **theirs, "ratio": theirs["step_ms"] / own["step_ms"], "own_step_ms": own["step_ms"]}
        del other
        gc.collect()


def print_step(result: dict[str, Any], console: Console) -> None:
    """Prints what `bench_step` returned."""
    about = ", ".join(f"{key} {value}" for key, value in result["machine"].items())
    console.print(f"{about}; copy bandwidth {result['copy_gb_per_s']:.0f} GB/s", highlight=False)
    table = Table(title="Embedding step: forward, gradient and optimizer")
    for heading in ("workload", "optimizer", "implementation"):
        table.add_column(heading)
    headings = (
        "forward ms",
        "step ms",
        "p90/median",
        "ratio to ours",
        "M ids/s",
        "GB/s",
        "of copy",
        "peak MB",
        "error",
    )
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in result["rows"]:
        table.add_row(
            row["workload"],
            row["optimizer"],
            row["implementation"],
            f"{row['forward_ms']:.1f}",
            f"{row['step_ms']:.1f}",
            f"{row['p90_over_median']:.2f}",
            f"{row['ratio']:.2f}",
            f"{row['ids_per_s'] / 1e6:.1f}",
            f"{row['gb_per_s']:.1f}",
            f"{row['gb_per_s'] / result['copy_gb_per_s']:.0%}",
            "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:.0f}",
            f"{row['max_error']:.0e}",
        )
    console.print(table)
