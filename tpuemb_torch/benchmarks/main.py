"""Options of `bench_step`, shared by `tpuemb bench` and `scripts/bench_step`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

# Before torch is imported: its profiler tells of every start.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

WORKLOADS = ("zipf", "dlrm", "tiny", "large", "sequence")


def bench(
    workload: Annotated[str, typer.Argument(metavar="WORKLOAD[,…]", help=f"Of {', '.join(WORKLOADS)}.")] = "zipf",
    optimizers: Annotated[
        str, typer.Option("--optimizers", metavar="NAME[,…]", help='Names, or "all".')
    ] = "sgd,adagrad,adam",
    implementations: Annotated[
        str, typer.Option("--implementations", metavar="NAME[,…]", help="The others are timed in turns with the first.")
    ] = "compiled,eager,fbgemm,embedding-bag",
    extra: Annotated[
        str | None, typer.Option("--with", metavar="NAME[,…]", help='More implementations: "tensorflow", "by-name".')
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Steps of each.")] = 15,
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="Default: torch's choice.")] = None,
    device: Annotated[str, typer.Option("--device", metavar="cpu|cuda")] = "cpu",
    scale: Annotated[float, typer.Option("--scale", help="Factor on rows and batches, for a try.")] = 1.0,
    patience: Annotated[
        float, typer.Option("--patience", help="Seconds to wait, before each turn, for other processes to pause.")
    ] = 0.0,
    processor_time: Annotated[
        bool, typer.Option("--processor-time", help="Count processor time: for a busy machine, with --threads 1.")
    ] = False,
    growth: Annotated[
        bool, typer.Option("--growth", help="Instead: how the step grows with ids, rows, tables and dimensions.")
    ] = False,
    png: Annotated[Path | None, typer.Option("--png", metavar="OUT", help="Plot of --growth.")] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="OUT", help="Write the results as JSON.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Time the embedding step (lookup, gradient, optimizer) beside FBGEMM's, torch's and TensorFlow's."""
    import torch
    from rich.console import Console

    from tpuemb_torch.benchmarks.growth import bench_growth, plot_growth, print_growth
    from tpuemb_torch.benchmarks.implementations import IMPLEMENTATIONS, OPTIMIZERS
    from tpuemb_torch.benchmarks.step import bench_step, print_step

    names = implementations.split(",") + (extra.split(",") if extra else [])
    rules = list(OPTIMIZERS) if optimizers == "all" else optimizers.split(",")
    _check("WORKLOAD", workload.split(","), WORKLOADS)
    _check("--implementations", names, IMPLEMENTATIONS)
    _check("--optimizers", rules, OPTIMIZERS)
    _check("--device", [device], ("cpu", "cuda"))
    if device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("there is no CUDA device", param_hint="--device")
    if threads is not None:
        torch.set_num_threads(threads)
    if growth:
        result = bench_growth(rules[0], repeats, scale, patience, processor_time)
        if png is not None:
            plot_growth(result, png)
    else:
        result = bench_step(
            workload.split(","), rules, names, repeats, threads, device, scale, patience, processor_time
        )
    report({"ok": True, **result}, print_growth if growth else print_step, out, as_json, Console)


def report(result: dict[str, Any], show: Any, out: Path | None, as_json: bool, console: Any) -> None:
    """Prints a result as a table or as JSON, and writes it to a file."""
    text = json.dumps(result, indent=2)
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")
    if as_json:
        typer.echo(text)
        return
    terminal = console()
    show(result, terminal if terminal.is_terminal else console(width=180))


def _check(option: str, names: Any, known: Any) -> None:
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(known)}", param_hint=option)
