"""`tpuemb validate FILE...`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tpuemb_torch.cli.common import Format, Json, check_format, print_json


def validate(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Configurations: .pb .pbtxt .json .yaml.")],
    format: Format = None,
    json: Json = False,
) -> None:
    """Check configurations and list everything that is wrong with each.

    Exit code 1 if any file has a problem; warnings do not count.
    """
    input_format = check_format(format)
    results = [_check(file, input_format) for file in files]
    ok = all(result["ok"] for result in results)
    if json:
        print_json({"ok": ok, "files": results})
    else:
        for result in results:
            _print(result)
    raise typer.Exit(0 if ok else 1)


def _check(file: Path, format: Any) -> dict[str, Any]:
    from tpuemb_torch.config import ConfigError
    from tpuemb_torch.config.build import doubts
    from tpuemb_torch.config.parse import parse
    from tpuemb_torch.config.validate import problems

    result: dict[str, Any] = {"file": str(file), "ok": False, "problems": [], "warnings": []}
    try:
        proto = parse(file, format).proto
    except ConfigError as error:
        result["problems"] = [{"field": error.field, "problem": error.problem}]
        return result
    result["tables"], result["features"] = len(proto.table_descriptor), len(proto.feature_descriptor)
    result["problems"] = [{"field": error.field, "problem": error.problem} for error in problems(proto)]
    result["ok"] = not result["problems"]
    if result["ok"]:
        result["warnings"] = list(doubts(proto))
    return result


def _print(result: dict[str, Any]) -> None:
    if result["ok"]:
        typer.echo(f"{result['file']}: valid, {_count(result['tables'], 'table')}")
    else:
        typer.echo(f"{result['file']}: {_count(len(result['problems']), 'problem')}")
    for problem in result["problems"]:
        typer.echo(f"  {problem['field']}: {problem['problem']}")
    for warning in result["warnings"]:
        typer.echo(f"  warning: {warning}")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
