"""Runs `tpuemb` in this process and gives what a shell would see."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from typer.testing import CliRunner

from tpuemb_torch.cli import app

FILES = Path(__file__).resolve().parents[1] / "data" / "configs"
VALID = FILES / "valid" / "by_feature.pb"
BROKEN = FILES / "broken" / "typo.pbtxt"


class Result(NamedTuple):
    """Exit code and both streams."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Standard output, which must be one JSON object of standard JSON."""
        return json.loads(self.out, parse_constant=lambda name: (_ for _ in ()).throw(ValueError(name)))


def tpuemb(*arguments: object) -> Result:
    """Runs a command; an exception other than an exit is a failure of the test."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="tpuemb")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Result(result.exit_code, result.stdout, result.stderr)
