"""What the commands share: options, output, and errors without tracebacks."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from tpuemb_torch.config import Config
    from tpuemb_torch.config.parse import Format as FormatName

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Format = Annotated[
    str | None,
    typer.Option("--format", metavar="binary|text|json|yaml", help="Format of the input, if its ending does not say."),
]


def print_json(value: dict[str, Any]) -> None:
    """Prints a value as JSON that every parser takes (no NaN, no Infinity)."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def check_format(name: str | None) -> FormatName | None:
    """Returns the name of a format.

    Raises:
        typer.BadParameter: if there is no such format.
    """
    formats: dict[str, FormatName] = {"binary": "binary", "text": "text", "json": "json", "yaml": "yaml"}
    if name is not None and name not in formats:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(formats)}", param_hint="--format")
    return None if name is None else formats[name]


def load(file: Path, format: FormatName | None) -> tuple[Config, list[str]]:
    """Returns a file's configuration and the warnings about it."""
    from tpuemb_torch.config import ConfigWarning, load_config

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConfigWarning)
        config = load_config(file, format=format)
    return config, [str(warning.message) for warning in caught]


def print_warnings(messages: list[str]) -> None:
    """Prints warnings to standard error."""
    for message in messages:
        typer.secho(f"warning: {message}", err=True, fg=typer.colors.YELLOW)


@contextmanager
def wrong_input(as_json: bool) -> Iterator[None]:
    """Turns an error of the input, or a library that is not there, into a message and the exit code 1."""
    from tpuemb_torch.config import ConfigError
    from tpuemb_torch.planning import PlanError
    from tpuemb_torch.statistics import StatsError

    try:
        yield
    except (ConfigError, PlanError, StatsError, OSError, ImportError, _checkpoint_error()) as error:
        field: object = None
        problem = str(error)
        if isinstance(error, ConfigError | PlanError | StatsError):
            field, problem = error.field, error.problem
        elif isinstance(error, OSError):
            field, problem = error.filename, error.strerror or problem
        if as_json:
            print_json({"ok": False, "error": {"field": None if field is None else str(field), "problem": problem}})
        else:
            where = "" if field is None else f"{field}: "
            typer.secho(f"error: {where}{problem}", err=True, fg=typer.colors.RED)
        sys.exit(1)


def _checkpoint_error() -> type[Exception]:
    """CheckpointError, if what raises it was imported: that takes torch, which most commands do without."""
    errors = sys.modules.get("tpuemb_torch.checkpoint.errors")
    return ImportError if errors is None else errors.CheckpointError
