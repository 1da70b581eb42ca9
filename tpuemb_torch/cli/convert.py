"""`tpuemb convert IN OUT`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tpuemb_torch.cli.common import Format, Json, check_format, load, print_json, print_warnings, wrong_input


def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="A configuration: .pb .pbtxt .json .yaml.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The file to write; its ending says the format.")],
    format: Format = None,
    json: Json = False,
) -> None:
    """Write a configuration in another format, without loss.

    OUT appears whole or not at all; an older OUT is replaced.
    """
    input_format = check_format(format)
    if target.exists() and source.exists() and target.samefile(source):
        raise typer.BadParameter("is the input itself; name another file", param_hint="OUT")
    with wrong_input(json):
        from tpuemb_torch.config import save_config
        from tpuemb_torch.config.parse import format_of_path

        output_format = format_of_path(target)
        config, messages = load(source, input_format)
        save_config(config, target)
    size = target.stat().st_size
    if json:
        written = {"file": str(target), "format": output_format, "bytes": size, "tables": len(config.tables)}
        print_json({"ok": True, "warnings": messages, "written": written})
        return
    print_warnings(messages)
    typer.echo(f"wrote {target}: {output_format}, {len(config.tables)} tables, {size:,} bytes")
