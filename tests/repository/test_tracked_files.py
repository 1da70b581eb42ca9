"""What is under version control: no path of one machine, no big file."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Spelled so that this file does not match itself.
MACHINE_PATH = re.compile(rb"(?<![\w.~$}])/(home|root|Users|work|mnt|scratch)[/][\w.-]+")


def tracked_files() -> list[Path]:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    return [ROOT / name for name in listing.decode().split("\0") if name and (ROOT / name).is_file()]


def test_no_path_of_a_machine() -> None:
    assert MACHINE_PATH.search(b"see " + b"/home" + b"/someone/file")
    found = [
        f"{file.relative_to(ROOT)}: {match.group().decode()}"
        for file in tracked_files()
        if (match := MACHINE_PATH.search(file.read_bytes()))
    ]
    assert not found


def test_no_big_file() -> None:
    assert [str(file.relative_to(ROOT)) for file in tracked_files() if file.stat().st_size > 500_000] == []


def test_scripts_are_executable() -> None:
    for name in (".ci/run", "scripts/demo", "scripts/setup", "scripts/test"):
        assert (ROOT / name).stat().st_mode & 0o111, name
