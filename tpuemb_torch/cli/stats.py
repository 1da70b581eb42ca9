"""`tpuemb stats DIR`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tpuemb_torch.cli.common import Json, print_json, wrong_input

_WIDTH_OF_A_FILE = 200


def stats(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Where write_stats() wrote: profile_data_directory.")
    ],
    rank: Annotated[
        int | None, typer.Option("--rank", metavar="N", help="The input of one rank; by default, of all together.")
    ] = None,
    png: Annotated[Path | None, typer.Option("--png", metavar="OUT", help="Write plots to a PNG file.")] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="OUT", help="Write table and plots to a web page.")
    ] = None,
    json: Json = False,
) -> None:
    """Show what a layer looked up: ids, distinct ids, bags, the largest shards and the hot ids of every table.

    Plots need matplotlib.
    """
    with wrong_input(json):
        from tpuemb_torch.statistics import read_stats

        found = read_stats(directory)
        if rank is not None:
            if not 0 <= rank < found.world_size:
                raise typer.BadParameter(f"{rank} is outside [0, {found.world_size})", param_hint="--rank")
            found = found.ranks[rank]
        title = str(directory)
        written = []
        if png is not None or html is not None:
            from tpuemb_torch.config.write import write_atomically
            from tpuemb_torch.report import plot_stats, save_png, stats_page

            if png is not None:
                save_png(plot_stats(found), png)
                written.append(png)
            if html is not None:
                write_atomically(html, stats_page(found, title).encode())
                written.append(html)
    if json:
        print_json({"ok": True, "directory": title, "written": [str(path) for path in written], **found.to_dict()})
        return
    from rich.console import Console

    from tpuemb_torch.report import print_stats

    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH_OF_A_FILE)
    print_stats(found, console, title)
    for path in written:
        typer.echo(f"wrote {path}")
