"""`tpuemb import-checkpoint CKPT`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tpuemb_torch.cli.common import Format, Json, check_format, load, print_json, print_warnings, wrong_input

if TYPE_CHECKING:
    from tpuemb_torch.checkpoint.tensorflow.matching import Contents

_WIDTH_OF_A_FILE = 160


def import_checkpoint(
    checkpoint: Annotated[
        Path,
        typer.Argument(metavar="CKPT", help="A TensorFlow checkpoint: its prefix, or a folder for its latest one."),
    ],
    config: Annotated[Path, typer.Option("--config", metavar="FILE", help="The configuration of the tables.")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Where to write; without it, only show what is there.")
    ] = None,
    world_size: Annotated[
        int, typer.Option("--world-size", metavar="N", min=1, help="Ranks that will load it: a file for each.")
    ] = 1,
    mapping: Annotated[
        Path | None, typer.Option("--mapping", metavar="FILE", help="Names of tables and tensors in the checkpoint.")
    ] = None,
    fill_missing: Annotated[
        bool, typer.Option("--fill-missing", help="Start slots that the checkpoint lacks at their initial values.")
    ] = False,
    step: Annotated[int, typer.Option("--step", metavar="N", min=0, help="Number of training steps so far.")] = 0,
    format: Format = None,
    json: Json = False,
) -> None:
    """Turn a TensorFlow checkpoint's embedding tables into one that tpuemb_torch.checkpoint.load reads.

    Needs no TensorFlow.  Shows which tensor becomes which table and slot, and what is missing or unused, before it
    reads them.
    """
    input_format = check_format(format)
    with wrong_input(json):
        from tpuemb_torch.checkpoint import CheckpointError
        from tpuemb_torch.checkpoint.tensorflow.bundle import TensorBundle
        from tpuemb_torch.checkpoint.tensorflow.mapping_file import read_mapping
        from tpuemb_torch.checkpoint.tensorflow.matching import find_tables
        from tpuemb_torch.checkpoint.tensorflow.to_checkpoint import complete, write_checkpoint

        loaded, messages = load(config, input_format)
        contents = find_tables(TensorBundle(checkpoint), loaded, None if mapping is None else read_mapping(mapping))
        if not json:
            print_warnings(messages)
            _print(contents)
        if contents.missing and not fill_missing:
            listed = "; ".join(f"table {t!r}: {', '.join(slots)}" for t, slots in contents.missing.items())
            raise CheckpointError(
                f"checkpoint {contents.bundle.prefix} lacks slots of the config's optimizers ({listed}); "
                "name their tensors with --mapping, or start them at their initial values with --fill-missing"
            )
        tables = complete(contents, loaded)
        if out is not None:
            write_checkpoint(out, loaded, tables, world_size, step)
    if json:
        print_json(
            {"ok": True, "warnings": messages, **_description(contents), "out": None if out is None else str(out)}
        )
    elif out is not None:
        typer.echo(f"wrote {out}: {len(tables)} tables, load it with tpuemb_torch.checkpoint.load")


def _rows(contents: Contents) -> list[dict[str, Any]]:
    return [
        {
            "table": table,
            "slot": slot,
            "shape": list(source.shape),
            "tensors": list(source.tensors),
            "layout": source.layout,
        }
        for table, slots in contents.tables.items()
        for slot, source in slots.items()
    ]


def _description(contents: Contents) -> dict[str, Any]:
    return {
        "checkpoint": contents.bundle.prefix,
        "found_by": contents.found_by,
        "tensors": _rows(contents),
        "missing": [{"table": table, "slot": slot} for table, slots in contents.missing.items() for slot in slots],
        "unused": contents.unused,
        "padding": contents.padding,
    }


def _print(contents: Contents) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH_OF_A_FILE)
    table = Table(title=escape(f"{contents.bundle.prefix} ({contents.found_by})"), title_justify="left")
    for column in ("table", "slot", "shape", "tensor", "layout"):
        table.add_column(column, overflow="fold")
    for row in _rows(contents):
        first, *others = row["tensors"]
        tensor = first if not others else f"{first} ... {others[-1]}"
        shape = " x ".join(f"{size:,}" for size in row["shape"])
        table.add_row(*map(escape, (row["table"], row["slot"], shape, tensor, row["layout"])))
    for name, slots in contents.missing.items():
        for slot in slots:
            table.add_row(escape(name), escape(slot), "", "[red]missing[/red]", "")
    console.print(table)
    for what, names in (("unused", contents.unused), ("padding of small tables", contents.padding)):
        if names:
            console.print(escape(f"{what}: {', '.join(names)}"), highlight=False)
