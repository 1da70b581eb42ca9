"""`tpuemb plan FILE --world-size N`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tpuemb_torch.cli.common import Format, Json, check_format, load, print_json, print_warnings, wrong_input

if TYPE_CHECKING:
    from tpuemb_torch.planning import Plan

_KINDS = ("auto", "row_wise", "table_wise", "column_wise", "table_row_wise")
_EXCHANGES = ("auto", "pooled", "distinct")
_DEVICES = ("cuda", "cpu")
_WIDTH_OF_A_FILE = 150


def plan(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A configuration: .pb .pbtxt .json .yaml.")],
    world_size: Annotated[int, typer.Option("--world-size", metavar="N", min=1, help="Number of ranks.")],
    local_world_size: Annotated[
        int | None, typer.Option("--local-world-size", metavar="M", min=1, help="Ranks of each node; by default, all.")
    ] = None,
    sharding: Annotated[str, typer.Option("--sharding", metavar="|".join(_KINDS), help="For all tables.")] = "auto",
    table: Annotated[
        list[str] | None, typer.Option("--table", metavar="NAME=KIND", help="For one table; may be given often.")
    ] = None,
    exchange: Annotated[
        str, typer.Option("--exchange", metavar="|".join(_EXCHANGES), help="What ranks send: sums, or distinct rows.")
    ] = "auto",
    hbm: Annotated[
        str | None,
        typer.Option("--hbm", "--memory", metavar="SIZE", help="Memory of each rank for the tables: 80GB, 75GiB."),
    ] = None,
    stats: Annotated[
        Path | None, typer.Option("--stats", metavar="DIR", help="What write_stats() wrote: ids of bags.")
    ] = None,
    device: Annotated[
        str, typer.Option("--device", metavar="|".join(_DEVICES), help="Whose bandwidths balance the load.")
    ] = "cuda",
    out: Annotated[
        Path | None, typer.Option("--out", metavar="OUT", help="Write the plan to a .yaml or .json file.")
    ] = None,
    png: Annotated[Path | None, typer.Option("--png", metavar="OUT", help="Write a plot to a PNG file.")] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="OUT", help="Write tables and plot to a web page.")
    ] = None,
    format: Format = None,
    json: Json = False,
) -> None:
    """Plan on paper which rank holds what: memory, rows and tables of every rank.

    Needs no devices, no process group and no torchrec.  Plots need matplotlib.
    """
    input_format = check_format(format)
    _check("--sharding", sharding, _KINDS)
    _check("--exchange", exchange, _EXCHANGES)
    _check("--device", device, _DEVICES)
    own = dict(_own_kind(item) for item in table or [])
    if local_world_size is not None and world_size % local_world_size:
        raise typer.BadParameter(
            f"{local_world_size} does not divide --world-size {world_size}", param_hint="--local-world-size"
        )
    memory = None if hbm is None else _memory(hbm)
    with wrong_input(json):
        from tpuemb_torch.planning import PlanError, make_plan
        from tpuemb_torch.statistics import read_stats

        config, messages = load(file, input_format)
        names = [table.name for table in config.tables]
        unknown = [name for name in own if name not in names]
        if unknown:
            raise PlanError("--table", f"no table {unknown[0]!r}: {file} has {', '.join(names)}")
        kinds = {name: own.get(name, sharding) for name in names}
        seen = None if stats is None else read_stats(stats)
        factors, distinct = (None, None) if seen is None else (seen.pooling_factors(), seen.mean_distinct_ids())
        made = make_plan(
            *(config, world_size, local_world_size, kinds, memory, factors, device),
            exchange=exchange,
            distinct_ids=distinct,
        )
        written = _write(made, str(file), out, png, html)
    if json:
        from tpuemb_torch.report import describe_plan

        paths = [str(path) for path in written]
        print_json({"ok": True, "file": str(file), "warnings": messages, "written": paths, **describe_plan(made)})
        return
    from rich.console import Console

    from tpuemb_torch.report import print_plan

    print_warnings(messages)
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH_OF_A_FILE)
    print_plan(made, console, str(file))
    for path in written:
        typer.echo(f"wrote {path}")


def _write(made: Plan, title: str, out: Path | None, png: Path | None, html: Path | None) -> list[Path]:
    from tpuemb_torch.config.write import write_atomically
    from tpuemb_torch.planning import save_plan
    from tpuemb_torch.report import plan_page, plot_plan, save_png
    from tpuemb_torch.report.plots import require_matplotlib

    if png is not None or html is not None:
        require_matplotlib()  # before anything is written
    if out is not None:
        save_plan(made, out)
    if png is not None:
        save_png(plot_plan(made), png)
    if html is not None:
        write_atomically(html, plan_page(made, title).encode())
    return [path for path in (out, png, html) if path is not None]


def _check(option: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise typer.BadParameter(f"{value!r} is not one of {', '.join(choices)}", param_hint=option)


def _own_kind(item: str) -> tuple[str, str]:
    name, found, kind = item.rpartition("=")
    if not found:
        raise typer.BadParameter(f"{item!r} is not NAME=KIND", param_hint="--table")
    _check("--table", kind, _KINDS)
    return name, kind


def _memory(size: str) -> int:
    from tpuemb_torch.planning import parse_bytes

    try:
        return parse_bytes(size)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--hbm") from None
