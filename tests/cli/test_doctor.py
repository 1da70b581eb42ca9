from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from tests.cli.commands import tpuemb
from tests.cli.test_cli import ROOT
from tpuemb_torch.cli import checks

NAMES = ["tpuemb_torch", "python", "protobuf", "torch", "fbgemm", "torchrec", "GPU", "C++ compiler"]


def by_name(result: Any) -> dict[str, Any]:
    return {check["name"]: check for check in result.json["checks"]}


def without(monkeypatch: pytest.MonkeyPatch, *missing: str, **versions: str) -> None:
    """Makes distributions missing, or of another version."""
    real = checks.installed_version

    def installed(*names: str) -> str | None:
        for name in names:
            if name in missing:
                return None
            if name.replace("-", "_") in versions:
                return versions[name.replace("-", "_")]
        return real(*names)

    monkeypatch.setattr(checks, "installed_version", installed)


def test_all_is_there() -> None:
    result = tpuemb("doctor")
    assert (result.code, result.err) == (0, "")
    for name in NAMES:
        assert any(line.startswith(name) for line in result.out.splitlines()), name
    assert result.out.endswith("All that is needed is there.\n")
    described = tpuemb("doctor", "--json").json
    assert (described["ok"], described["install"]) == (True, [])
    assert {name: check["ok"] for name, check in by_name(tpuemb("doctor", "--json")).items()}["torchrec"]


@pytest.mark.parametrize("missing", ["torchrec", "torch"])
def test_something_is_missing(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    without(monkeypatch, missing)
    result = tpuemb("doctor")
    assert result.code == 1
    line = next(line for line in result.out.splitlines() if line.split()[0] == missing)
    assert line.split()[1:] == ["MISSING", "not", "found"]
    assert "Install what is needed with:" in result.out
    assert 'pip install --no-deps "torchrec==1.8.*"' in result.out
    described = tpuemb("doctor", "--json")
    assert described.code == 1
    assert described.json["ok"] is False
    assert any("torch" in line for line in described.json["install"])


def test_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, torch="2.6.0", protobuf="4.25.3")
    result = tpuemb("doctor", "--json")
    found = by_name(result)
    assert (found["torch"]["ok"], found["torch"]["found"], found["torch"]["note"]) == (False, "2.6.0", "needs 2.13")
    assert found["protobuf"]["note"] == "needs 5.26 or later"
    assert 'pip install "protobuf>=5.26"' in result.json["install"]


def test_a_library_that_does_not_import(monkeypatch: pytest.MonkeyPatch) -> None:
    real = checks.import_module

    def broken(name: str) -> Any:
        if name == "fbgemm_gpu":
            raise OSError("undefined symbol: _ZN3c10\nmore")
        return real(name)

    monkeypatch.setattr(checks, "import_module", broken)
    result = tpuemb("doctor", "--json")
    assert result.code == 1
    assert by_name(result)["fbgemm"]["note"] == "cannot be imported: undefined symbol: _ZN3c10"


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.shutil, "which", lambda name: None)
    result = tpuemb("doctor", "--json")
    assert result.code == 0  # the eager kernel works without
    assert by_name(result)["C++ compiler"]["found"] == "not found"
    assert '"eager" works without' in by_name(result)["C++ compiler"]["note"]


def test_wrong_usage() -> None:
    assert tpuemb("doctor", "me").code == 2


def test_works_where_torchrec_is_not_installed() -> None:
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
for name in ("torch", "torchrec", "fbgemm_gpu"):
    sys.modules[name] = None
sys.argv = ["tpuemb", "doctor"]
from tpuemb_torch.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "MISSING" in done.stdout and "cannot be imported" in done.stdout
    assert done.stderr == ""
