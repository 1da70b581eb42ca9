from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.commands import BROKEN, FILES, VALID, tpuemb

TWO_PROBLEMS = """
mode: TRAINING num_hosts: 1 num_tensor_cores: 1
table_descriptor { name: "t" vocabulary_size: 0 dimension: 4 optimization_parameters { learning_rate { constant: 1 } } }
feature_descriptor { input_shape: 4 }
"""
DOUBTFUL = TWO_PROBLEMS.replace("vocabulary_size: 0", "vocabulary_size: 5").replace(
    "learning_rate { constant: 1 }", "adagrad {}"
)


@pytest.mark.parametrize("ending", ["pb", "pbtxt", "json", "yaml"])
def test_valid(ending: str) -> None:
    result = tpuemb("validate", VALID.with_suffix(f".{ending}"))
    assert (result.code, result.err) == (0, "")
    assert result.out == f"{VALID.with_suffix(f'.{ending}')}: valid, 2 tables\n"


def test_all_problems_of_all_files(tmp_path: Path) -> None:
    bad = tmp_path / "bad.pbtxt"
    bad.write_text(TWO_PROBLEMS)
    result = tpuemb("validate", VALID, bad, BROKEN, tmp_path / "missing.pb")
    assert result.code == 1
    lines = result.out.splitlines()
    assert lines[0].endswith("valid, 2 tables")
    assert lines[1] == f"{bad}: 2 problems"
    assert lines[2].startswith("  table_descriptor[0].vocabulary_size: 0 (table 't')")
    assert lines[3].startswith("  table_descriptor[0].optimization_parameters.parameters: no optimizer is chosen")
    assert lines[4] == f"{BROKEN}: 1 problem"
    assert "line 11" in lines[5]
    assert "no such file" in lines[7]
    assert len(lines) == 8


def test_warnings_do_not_fail(tmp_path: Path) -> None:
    path = tmp_path / "doubtful.pbtxt"
    path.write_text(DOUBTFUL)
    result = tpuemb("validate", path)
    assert result.code == 0
    assert "warning: table_descriptor[0].optimization_parameters.learning_rate: not set" in result.out
    assert tpuemb("validate", "--json", path).json["files"][0]["warnings"]


def test_json(tmp_path: Path) -> None:
    bad = tmp_path / "bad.pbtxt"
    bad.write_text(TWO_PROBLEMS)
    result = tpuemb("validate", "--json", VALID, bad)
    assert result.code == 1
    assert result.json["ok"] is False
    good_file, bad_file = result.json["files"]
    assert good_file == {
        "file": str(VALID), "ok": True, "problems": [], "warnings": [], "tables": 2, "features": 2
    }  # fmt: skip
    assert [problem["field"] for problem in bad_file["problems"]] == [
        "table_descriptor[0].vocabulary_size",
        "table_descriptor[0].optimization_parameters.parameters",
    ]
    assert tpuemb("validate", "--json", VALID).json["ok"] is True


@pytest.mark.parametrize(
    "path", sorted(p for p in (FILES / "broken").iterdir() if p.name != "expected.json"), ids=lambda p: p.name
)
def test_broken_files_give_no_traceback(path: Path) -> None:
    result = tpuemb("validate", path)
    assert result.code == 1
    assert result.out.startswith(f"{path}: 1 problem\n")
    for command in ("inspect", "convert"):
        result = tpuemb(command, path, *(["/nowhere/x.pb"] if command == "convert" else []))
        assert result.code == 1
        assert result.err.startswith("error: ")
        assert result.out == ""


def test_format_of_a_file_without_ending(tmp_path: Path) -> None:
    path = tmp_path / "config"
    path.write_bytes(VALID.read_bytes())
    result = tpuemb("validate", path)
    assert result.code == 1
    assert "unknown file ending" in result.out
    assert tpuemb("validate", "--format", "binary", path).code == 0
    assert tpuemb("validate", "--format", "text", path).code == 1


def test_wrong_usage() -> None:
    assert tpuemb("validate").code == 2
    assert tpuemb("validate", "--no-such-option", VALID).code == 2
    result = tpuemb("validate", "--format", "xml", VALID)
    assert result.code == 2
    assert "xml" in result.err
