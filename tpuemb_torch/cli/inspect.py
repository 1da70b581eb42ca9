"""`tpuemb inspect FILE`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tpuemb_torch.cli.common import Format, Json, check_format, load, print_json, print_warnings, wrong_input

_WIDTH_OF_A_FILE = 150


def inspect(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A configuration: .pb .pbtxt .json .yaml.")],
    format: Format = None,
    json: Json = False,
) -> None:
    """Show the tables, features, shapes and resolved optimizers of a configuration."""
    input_format = check_format(format)
    with wrong_input(json):
        config, messages = load(file, input_format)
    if json:
        from tpuemb_torch.report import describe

        print_json({"ok": True, "file": str(file), "warnings": messages, **describe(config)})
        return
    from rich.console import Console

    from tpuemb_torch.report import print_config

    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH_OF_A_FILE)
    print_warnings(messages)
    print_config(config, console, str(file))
