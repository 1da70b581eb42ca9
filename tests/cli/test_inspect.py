from __future__ import annotations

from tests.cli.commands import BROKEN, FILES, VALID, tpuemb


def test_text() -> None:
    result = tpuemb("inspect", VALID)
    assert (result.code, result.err) == (0, "")
    for words in ("users", "items", "clicked", "[16, 5, 4]", "beta2=0.999", "tag 0", "accumulators", "velocities"):
        assert words in result.out
    assert max(len(line) for line in result.out.splitlines()) <= 150


def test_program() -> None:
    result = tpuemb("inspect", FILES / "valid" / "user_defined.pb")
    assert result.code == 0
    assert "Program of t:" in result.out
    assert "w' = w - lr*g" in result.out


def test_json() -> None:
    result = tpuemb("inspect", "--json", VALID)
    assert result.code == 0
    described = result.json
    assert described["ok"] is True
    assert described["file"] == str(VALID)
    assert [table["name"] for table in described["tables"]] == ["users", "items"]
    assert described["tables"][1]["hyperparameters"]["beta1"] == 0.9
    assert described["features"][1]["output_shape"] == [16, 5, 4]


def test_wrong_input() -> None:
    result = tpuemb("inspect", BROKEN)
    assert result.code == 1
    assert "dimesion" in result.err
    result = tpuemb("inspect", "--json", BROKEN)
    assert result.code == 1
    assert result.json["ok"] is False
    assert result.json["error"]["field"] == f"{BROKEN}: line 11, column 3"


def test_wrong_usage() -> None:
    assert tpuemb("inspect").code == 2
    assert tpuemb("inspect", VALID, VALID).code == 2
