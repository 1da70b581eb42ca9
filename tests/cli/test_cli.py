"""The command line as a whole."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer.main

from tests.cli.commands import BROKEN, VALID, tpuemb
from tpuemb_torch import __version__
from tpuemb_torch.cli import app

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tpuemb_torch.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)


def test_commands() -> None:
    assert {"validate", "inspect", "convert"} <= set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_json(command: str) -> None:
    for option in ("--help", "-h"):
        result = tpuemb(command, option)
        assert result.code == 0
        assert "--json" in result.out
        assert COMMANDS[command].help


def test_no_arguments_is_wrong_usage() -> None:
    result = tpuemb()
    assert result.code == 2
    assert "validate" in result.out + result.err
    assert tpuemb("no-such-command").code == 2


def test_version() -> None:
    result = tpuemb("--version")
    assert (result.code, result.out) == (0, f"{__version__}\n")


def test_as_a_module() -> None:
    done = run("validate", VALID)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{VALID}: valid, 2 tables\n"
    done = run("inspect", BROKEN)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
    assert "Usage: tpuemb" in run("--help").stdout


@pytest.mark.parametrize("arguments", [("--help",), ("validate", VALID), ("convert", VALID, "x.yaml")])
def test_light_commands_import_no_torch(arguments: tuple[object, ...], tmp_path: Path) -> None:
    code = f"""
import os, sys
os.chdir({str(tmp_path)!r})
sys.path.insert(0, {str(ROOT)!r})
sys.argv = ["tpuemb", *{[str(a) for a in arguments]!r}]
from tpuemb_torch.cli import main
try:
    main()
except SystemExit:
    pass
print("torch" in sys.modules, "tensorflow" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False False"


def test_starts_quickly() -> None:
    """About 0.3 s; the limit leaves room for a busy machine, and is still below what importing torch takes."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        assert run("validate", VALID).returncode == 0
        times.append(time.perf_counter() - start)
    assert min(times) < 1.5
