"""`tpuemb diff A B`"""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer

from tpuemb_torch.cli.common import Format, Json, check_format, load, print_json, print_warnings, wrong_input

_MOST_CHARACTERS = 120


def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="A configuration: .pb .pbtxt .json .yaml.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The other; may be in another format.")],
    format: Format = None,
    json: Json = False,
) -> None:
    """Show in which fields two configurations differ.

    Exit code 0 if they are equal, 1 if they differ (or one cannot be read).
    """
    input_format = check_format(format)
    with wrong_input(json):
        from tpuemb_torch.report.differences import differences, mean_the_same

        first, messages = load(a, input_format)
        second, more = load(b, input_format)
        found = differences(first, second)
        same = mean_the_same(first, second)
    if json:
        listed = [{"field": difference.field, "a": difference.a, "b": difference.b} for difference in found]
        report = {"ok": True, "a": str(a), "b": str(b), "equal": not found, "mean_the_same": same}
        print_json({**report, "warnings": [*messages, *more], "differences": listed})
    else:
        print_warnings([*messages, *more])
        if not found:
            typer.echo(f"{a} and {b} are equal")
        else:
            typer.echo(f"{a} and {b} differ in {len(found)} field{'' if len(found) == 1 else 's'}")
        for difference in found:
            typer.echo(f"  {difference.field}: {_shown(difference.a)} -> {_shown(difference.b)}")
        if found and same:
            typer.echo("They mean the same: what one of them leaves out is the value that the other sets.")
    raise typer.Exit(1 if found else 0)


def _shown(value: Any) -> str:
    if value is None:
        return "not set"
    text = dumps(value, ensure_ascii=False)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 3]}..."
