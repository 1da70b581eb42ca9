"""The command `tpuemb`: one file per command; each imports what it needs only when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from tpuemb_torch.cli.bench import bench
from tpuemb_torch.cli.convert import convert
from tpuemb_torch.cli.diff import diff
from tpuemb_torch.cli.doctor import doctor
from tpuemb_torch.cli.export_checkpoint import export_checkpoint
from tpuemb_torch.cli.import_checkpoint import import_checkpoint
from tpuemb_torch.cli.inspect import inspect
from tpuemb_torch.cli.plan import plan
from tpuemb_torch.cli.stats import stats
from tpuemb_torch.cli.validate import validate

app = typer.Typer(
    name="tpuemb",
    help="TPU embedding configurations on PyTorch.  Exit code 0: fine, 1: wrong input, 2: wrong usage.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (validate, inspect, convert, plan, diff, stats, import_checkpoint, export_checkpoint, doctor, bench):
    app.command()(command)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    """Options of `tpuemb` itself."""
    if version:
        from tpuemb_torch import __version__

        typer.echo(__version__)
        raise typer.Exit


def main() -> None:
    """Runs the command line; the entry point of the console script `tpuemb`."""
    app(prog_name="tpuemb")
