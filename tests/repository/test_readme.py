"""The README and the docs: their code runs, their links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.main import get_command

from tpuemb_torch.cli import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_python_blocks_of_the_readme_run_in_order() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S | re.M)
    assert len(blocks) >= 2
    namespace: dict[str, object] = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"README.md, python block {number}", "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_every_page_is_in_the_table_of_contents() -> None:
    contents = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f"({page.name})" not in contents] == ["README.md"]


def test_commands_of_the_readme_exist() -> None:
    used = set(re.findall(r"^tpuemb (\S+)", (ROOT / "README.md").read_text(encoding="utf-8"), re.M))
    assert used
    assert used <= set(get_command(app).commands)  # type: ignore[attr-defined]
