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
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="torchrec", help="Write TorchRec's tables, optimizers and plan as YAML."),
    ] = None,
    source_kind: Annotated[
        str | None, typer.Option("--from", metavar="torchrec", help="IN is such a YAML file.")
    ] = None,
    world_size: Annotated[
        int | None, typer.Option(help="With --to torchrec: ranks of the plan; without it, none is written.", min=1)
    ] = None,
    sharding: Annotated[str, typer.Option(help="With --world-size: auto, row_wise, table_wise, ...")] = "auto",
    json: Json = False,
) -> None:
    """Write a configuration in another format, without loss.

    OUT appears whole or not at all; an older OUT is replaced.
    """
    input_format = check_format(format)
    for option, value in (("--to", to), ("--from", source_kind)):
        if value not in (None, "torchrec"):
            raise typer.BadParameter(f"{value!r} is not torchrec", param_hint=option)
    if world_size is not None and to is None:
        raise typer.BadParameter("is for --to torchrec", param_hint="--world-size")
    if target.exists() and source.exists() and target.samefile(source):
        raise typer.BadParameter("is the input itself; name another file", param_hint="OUT")
    with wrong_input(json):
        from tpuemb_torch.config import ConfigError, save_config
        from tpuemb_torch.config.parse import format_of_path
        from tpuemb_torch.config.torchrec_format import from_torchrec, to_torchrec
        from tpuemb_torch.config.write import write_atomically
        from tpuemb_torch.planning import make_plan

        if to is not None and format_of_path(target) != "yaml":
            raise ConfigError(str(target), "a TorchRec document is YAML: name a .yaml file")
        output_format = "torchrec" if to is not None else format_of_path(target)
        if source_kind is None:
            config, messages = load(source, input_format)
        else:
            config, messages = from_torchrec(source.read_text(encoding="utf-8"), str(source)), []
        if to is None:
            save_config(config, target)
        else:
            plan = None if world_size is None else make_plan(config, world_size, sharding=sharding).to_dict()
            write_atomically(target, to_torchrec(config, plan).encode())
    size = target.stat().st_size
    if json:
        written = {"file": str(target), "format": output_format, "bytes": size, "tables": len(config.tables)}
        print_json({"ok": True, "warnings": messages, "written": written})
        return
    print_warnings(messages)
    typer.echo(f"wrote {target}: {output_format}, {len(config.tables)} tables, {size:,} bytes")
