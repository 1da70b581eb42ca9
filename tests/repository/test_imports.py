"""Imports point one way: a room may import from those before it, never from those after."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "tpuemb_torch"
ROOMS = (
    "_version",
    "_requirements",
    "protos",
    "config",
    "optimizers",
    "planning",
    "preprocessing",
    "statistics",
    "kernels",
    "sent_steps",
    "fused_weights",
    "collection",
    "sharding",
    "step_protocol",
    "supplied",
    "embedding",
    "learning_rates",
    "train_pipeline",
    "ops",
    "checkpoint",
    "report",
    "benchmarks",
    "cli",
    "models",
)
TORCHREC_FREE = ("_version", "_requirements", "protos", "config", "optimizers", "planning", "report")


def room_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_modules(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def sources() -> list[Path]:
    return [file for file in sorted(PACKAGE.rglob("*.py")) if file != PACKAGE / "__init__.py"]


def test_every_room_has_its_place() -> None:
    assert {room_of(file) for file in sources()} == set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_imports_point_one_way(room: str) -> None:
    allowed = ROOMS[: ROOMS.index(room) + 1]
    for file in sources():
        if room_of(file) != room:
            continue
        for module in imported_modules(ast.parse(file.read_text(encoding="utf-8"))):
            package, *names = module.split(".")
            if package == "tpuemb_torch" and names and names != ["__version__"]:
                assert names[0] in allowed, f"{file.relative_to(PACKAGE)} imports {module}"
            if room in TORCHREC_FREE and room != "_requirements":
                assert package not in ("torchrec", "fbgemm_gpu"), f"{file.relative_to(PACKAGE)} imports {module}"


def test_nothing_imports_tensorflow() -> None:
    for file in sources():
        if file.name == "tensorflow_step.py":  # the benchmark that was asked to measure it
            continue
        for module in imported_modules(ast.parse(file.read_text(encoding="utf-8"))):
            assert module.split(".")[0] != "tensorflow", f"{file.relative_to(PACKAGE)} imports {module}"
