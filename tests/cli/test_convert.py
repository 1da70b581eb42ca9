from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cli.commands import BROKEN, FILES, VALID, tpuemb
from tpuemb_torch.config import load_config


@pytest.mark.parametrize("ending", ["pb", "binpb", "pbtxt", "textproto", "json", "yaml", "yml"])
@pytest.mark.parametrize("name", ["by_feature", "by_table", "user_defined"])
def test_there_and_back(tmp_path: Path, name: str, ending: str) -> None:
    source, middle, back = FILES / "valid" / f"{name}.pb", tmp_path / f"x.{ending}", tmp_path / "y.pb"
    result = tpuemb("convert", source, middle)
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith(f"wrote {middle}: ")
    assert tpuemb("convert", middle, back).code == 0
    assert back.read_bytes() == source.read_bytes()


def test_json(tmp_path: Path) -> None:
    target = tmp_path / "x.yaml"
    written = tpuemb("convert", "--json", VALID, target).json["written"]
    assert written == {"file": str(target), "format": "yaml", "bytes": target.stat().st_size, "tables": 2}


def test_an_older_file_is_replaced(tmp_path: Path) -> None:
    target = tmp_path / "x.pbtxt"
    target.write_text("old")
    assert tpuemb("convert", VALID, target).code == 0
    assert load_config(target) == load_config(VALID)
    assert [path.name for path in tmp_path.iterdir()] == ["x.pbtxt"]


def test_the_input_is_not_overwritten(tmp_path: Path) -> None:
    source = tmp_path / "x.pb"
    source.write_bytes(VALID.read_bytes())
    os.symlink(source, tmp_path / "link.pb")
    for target in (source, tmp_path / "." / "x.pb", tmp_path / "link.pb"):
        result = tpuemb("convert", source, target)
        assert result.code == 2
        assert "is the input itself" in result.err
    assert source.read_bytes() == VALID.read_bytes()


@pytest.mark.parametrize("target", ["x.bin", "x", "missing/x.pb"])
def test_impossible_targets(tmp_path: Path, target: str) -> None:
    result = tpuemb("convert", VALID, tmp_path / target)
    assert result.code == 1
    assert result.err.startswith(f"error: {tmp_path}")
    assert list(tmp_path.iterdir()) == []


def test_wrong_input_leaves_the_target_alone(tmp_path: Path) -> None:
    target = tmp_path / "x.pb"
    target.write_text("old")
    result = tpuemb("convert", "--json", BROKEN, target)
    assert result.code == 1
    assert result.json["error"]["problem"]
    assert target.read_text() == "old"


def test_wrong_usage() -> None:
    assert tpuemb("convert").code == 2
    assert tpuemb("convert", VALID).code == 2
