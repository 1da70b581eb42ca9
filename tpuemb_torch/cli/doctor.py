"""`tpuemb doctor`"""

from __future__ import annotations

import typer

from tpuemb_torch.cli.common import Json, print_json


def doctor(json: Json = False) -> None:
    """Show versions, the C++ compiler and the GPUs, and what to install.

    Exit code 1 if something is missing or broken that the layer needs.
    """
    from tpuemb_torch.cli.checks import run_checks

    checks, advice = run_checks()
    ok = not any(check.needed and not check.ok for check in checks)
    if json:
        print_json({"ok": ok, "checks": [check.to_dict() for check in checks], "install": advice})
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            mark = "ok" if check.ok else ("MISSING" if check.needed else "-")
            typer.echo(f"{check.name:<{width}}  {mark:<7}  {check.found}")
            if check.note:
                typer.echo(f"{'':<{width}}           {check.note}")
        if advice:
            typer.echo("Install what is needed with:")
            for line in advice:
                typer.echo(f"    {line}")
        elif ok:
            typer.echo("All that is needed is there.")
    raise typer.Exit(0 if ok else 1)
