"""docs/migration.md: its commands and Python blocks run in order, on checkpoints that TensorFlow wrote."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.cli.commands import tpuemb
from tests.golden import golden

PAGE = Path(__file__).resolve().parents[3] / "docs" / "migration.md"
#: What the page's YAML blocks are called in its text.
FILES = ["embedding.yaml", "stacked.yaml", "v1.yaml", "mapping.yaml"]


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "checkpoints").symlink_to(golden("checkpoints"))
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.S | re.M)
    files = [text for language, text in blocks if language == "yaml"]
    for name, text in zip(FILES, files, strict=True):
        (tmp_path / name).write_text(text)
    namespace: dict[str, object] = {}
    commands = 0
    for language, text in blocks:
        if language == "sh":
            for line in text.splitlines():
                program, *arguments = shlex.split(line)
                assert program == "tpuemb"
                result = tpuemb(*arguments)
                assert result.code == 0, f"{line}\n{result.out}{result.err}"
                commands += 1
        elif language == "python":
            exec(compile(text, PAGE.name, "exec"), namespace)
    assert commands > 10
