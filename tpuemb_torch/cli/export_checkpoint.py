"""`tpuemb export-checkpoint DIR OUT`"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tpuemb_torch.cli.common import Json, print_json, wrong_input

if TYPE_CHECKING:
    from torch import Tensor

    from tpuemb_torch.checkpoint.tensorflow.from_checkpoint import SavedTables
    from tpuemb_torch.checkpoint.tensorflow.plain import Item

_FORMS = ("object", "name", "npz", "safetensors")
_STRATEGIES = ("div", "mod")


def export_checkpoint(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="DIR", help="A folder that tpuemb_torch.checkpoint.save wrote.")
    ],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="A checkpoint prefix (object, name) or a file (npz, safetensors).")
    ],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="|".join(_FORMS),
            help="object: TF2 checkpoint; name: v1 Saver's and TPUEstimator's; npz, safetensors: TABLE/SLOT arrays.",
        ),
    ] = "object",
    num_shards: Annotated[
        int | None,
        typer.Option(
            "--num-shards", metavar="N", min=1, help="npz: a file for each of N hosts; name: hosts under MOD."
        ),
    ] = None,
    strategy: Annotated[
        str | None, typer.Option("--strategy", metavar="div|mod", help="Sharding; by default, the configuration's.")
    ] = None,
    rows: Annotated[
        list[str] | None,
        typer.Option("--rows", metavar="TABLE=N", help="Leave out rows from N on, which a small table has for hosts."),
    ] = None,
    step: Annotated[
        int | None, typer.Option("--step", metavar="N", help="Which checkpoint; by default the last.")
    ] = None,
    embedding: Annotated[
        str | None, typer.Option("--embedding", metavar="NAME", help="Which embedding, where the model had several.")
    ] = None,
    json: Json = False,
) -> None:
    """Write a checkpoint's tables and slots for TensorFlow, NumPy or safetensors.  Needs none of them.

    Example: tpuemb export-checkpoint runs/7 exported/ckpt --to object
    """
    if to not in _FORMS:
        raise typer.BadParameter(f"{to!r} is not one of {', '.join(_FORMS)}", param_hint="--to")
    if strategy is not None and strategy not in _STRATEGIES:
        raise typer.BadParameter(f"{strategy!r} is neither div nor mod", param_hint="--strategy")
    if (num_shards or strategy) and to in ("object", "safetensors"):
        raise typer.BadParameter(f"the form {to!r} has no shards", param_hint="--num-shards, --strategy")
    kept = _kept_rows(rows or [])
    with wrong_input(json):
        from tpuemb_torch.checkpoint.tensorflow.from_checkpoint import SavedTables

        saved = SavedTables(checkpoint, step, embedding)
        written = _write(saved, out, to, num_shards, strategy or saved.config.sharding_strategy, _items(saved, kept))
    size = sum(path.stat().st_size for path in written)
    if json:
        print_json(
            {"ok": True, "form": to, "tables": len(saved.config.tables), "bytes": size, "written": [*map(str, written)]}
        )
        return
    typer.echo(f"wrote {len(saved.config.tables)} tables, {size:,} bytes: {', '.join(map(str, written))}")


def _kept_rows(options: list[str]) -> dict[str, int]:
    kept = {}
    for option in options:
        table, _, number = option.rpartition("=")
        if not table or not number.isdecimal() or int(number) < 1:
            raise typer.BadParameter(f"{option!r} is not TABLE=N", param_hint="--rows")
        kept[table] = int(number)
    return kept


def _items(saved: SavedTables, kept: dict[str, int]) -> list[Item]:
    from tpuemb_torch.checkpoint import CheckpointError
    from tpuemb_torch.checkpoint.tensorflow.plain import Item
    from tpuemb_torch.sharding.parameters import slot_names

    tables = {table.name: table for table in saved.config.tables}
    for name, rows in kept.items():
        if name not in tables:
            raise CheckpointError(f"--rows {name}={rows}: there is no such table; there are {', '.join(tables)}")
        total = tables[name].vocabulary_size
        if rows != total and not (rows < total == saved.config.num_hosts):
            raise CheckpointError(
                f"--rows {name}={rows}: the table has {total} rows; only a table with a row for each of the "
                f"{saved.config.num_hosts} hosts may have rows that nobody asked for"
            )
    return [
        Item(
            table.name,
            slot,
            (kept.get(table.name, table.vocabulary_size), table.dimension),
            partial(saved.read, table, slot, kept.get(table.name)),
        )
        for table in saved.config.tables
        for slot in slot_names(table)
    ]


def _write(
    saved: SavedTables, out: Path, to: str, num_shards: int | None, strategy: str, items: list[Item]
) -> list[Path]:
    from tpuemb_torch.checkpoint import write_tensorflow
    from tpuemb_torch.checkpoint.tensorflow.plain import write_npz, write_npz_shards, write_safetensors
    from tpuemb_torch.sharding.progress import bytes_bar

    sharding: Literal["div", "mod"] = "mod" if strategy == "mod" else "div"
    with bytes_bar(f"writing {out}", sum(4 * item.shape[0] * item.shape[1] for item in items)) as bar:
        if to == "safetensors":
            return write_safetensors(out, items, bar.update)
        if to == "npz" and num_shards is None:
            return write_npz(out, items, bar.update)
        if to == "npz":
            assert num_shards is not None
            return write_npz_shards(out, items, num_shards, sharding, bar.update)
        tables: dict[str, dict[str, Callable[[], Tensor]]] = {}
        for item in items:
            tables.setdefault(item.table, {})[item.slot] = item.read
        return write_tensorflow(
            out,
            tables,
            "name" if to == "name" else "object",
            config=saved.config,
            num_hosts=num_shards or saved.config.num_hosts,
            sharding_strategy=sharding,
            progress=bar.update,
        )
