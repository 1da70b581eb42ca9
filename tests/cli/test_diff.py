from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.commands import BROKEN, FILES, VALID, tpuemb
from tests.cli.test_cli import ROOT
from tests.config import examples
from tpuemb_torch.config import load_config, save_config


def saved(path: Path, proto: object) -> Path:
    save_config(load_config(proto), path)  # type: ignore[arg-type]
    return path


def test_equal(tmp_path: Path) -> None:
    other = tmp_path / "b.yaml"
    save_config(load_config(VALID), other)
    result = tpuemb("diff", VALID, other)
    assert (result.code, result.err) == (0, "")
    assert result.out == f"{VALID} and {other} are equal\n"
    described = tpuemb("diff", "--json", VALID, other).json
    assert (described["ok"], described["equal"], described["differences"]) == (True, True, [])


def test_fields(tmp_path: Path) -> None:
    a = examples.by_feature()
    b = examples.by_feature()
    b.table_descriptor[0].dimension = 16
    b.table_descriptor[1].optimization_parameters.adam.beta2 = 0.99
    b.num_hosts = 3
    files = saved(tmp_path / "a.pb", a), saved(tmp_path / "b.pb", b)
    result = tpuemb("diff", *files)
    assert result.code == 1
    title, *lines = result.out.splitlines()
    assert title.endswith("differ in 3 fields")
    assert "  table_descriptor['users'].dimension: 8 -> 16" in lines
    assert "  table_descriptor['items'].optimization_parameters.adam.beta2: 0.999 -> 0.99" in lines
    assert f"  num_hosts: {a.num_hosts} -> 3" in lines
    described = tpuemb("diff", "--json", *files)
    assert described.code == 1
    assert (described.json["equal"], described.json["mean_the_same"]) == (False, False)
    assert {"field": "table_descriptor['users'].dimension", "a": 8, "b": 16} in described.json["differences"]


def test_one_more_table_and_another_order(tmp_path: Path) -> None:
    a = examples.by_feature()
    b = examples.by_feature()
    first, second = (a.table_descriptor[i] for i in range(2))
    del b.table_descriptor[:]
    b.table_descriptor.extend([second, first])
    for feature in b.feature_descriptor:
        feature.table_id = 1 - feature.table_id
    result = tpuemb("diff", saved(tmp_path / "a.pb", a), saved(tmp_path / "b.pb", b), "--json")
    assert result.json["differences"] == [
        {"field": "order of table_descriptor", "a": ["users", "items"], "b": ["items", "users"]}
    ]
    third = b.table_descriptor.add()
    third.CopyFrom(first)
    third.name = "more"
    b.feature_descriptor[0].table_id = 2
    b.feature_descriptor.add(name="other", table_id=1, input_shape=[16])
    found = tpuemb("diff", saved(tmp_path / "a.pb", a), saved(tmp_path / "b.pb", b), "--json").json["differences"]
    fields = {difference["field"]: difference for difference in found}
    assert set(fields) == {
        "order of table_descriptor",
        "table_descriptor['more']",
        "feature_descriptor['user'].table",
        "feature_descriptor['other']",
    }
    assert fields["table_descriptor['more']"]["a"] is None
    assert fields["table_descriptor['more']"]["b"]["dimension"] == first.dimension
    assert fields["feature_descriptor['user'].table"]["b"] == "more"


def test_defaults_mean_the_same(tmp_path: Path) -> None:
    a = examples.by_feature()
    b = examples.by_feature()
    b.table_descriptor[0].optimization_parameters.clipping_limits.SetInParent()
    result = tpuemb("diff", saved(tmp_path / "a.pb", a), saved(tmp_path / "b.pb", b))
    assert result.code == 1
    assert "clipping_limits: not set -> {}" in result.out
    assert "They mean the same" in result.out


def test_programs_are_formulas(tmp_path: Path) -> None:
    a = saved(tmp_path / "a.pb", examples.with_program(examples.program()))
    b = saved(tmp_path / "b.pb", examples.with_program(examples.program(num_slots=1)))
    found = tpuemb("diff", "--json", a, b).json["differences"]
    (program,) = (d for d in found if d["field"].endswith("user_defined_program"))
    assert program["a"][0] == "w' = w - lr*g"
    assert program["b"][:2] == ["w' = w - lr*g", "Slot_0' = Slot_0"]


@pytest.mark.parametrize("file", sorted((FILES / "valid").iterdir()), ids=lambda path: path.name)
def test_every_configuration_equals_itself(file: Path) -> None:
    assert tpuemb("diff", file, file).code == 0


def test_wrong_input_and_usage() -> None:
    result = tpuemb("diff", VALID, BROKEN)
    assert result.code == 1
    assert "dimesion" in result.err
    assert tpuemb("diff", "--json", VALID, BROKEN).json["ok"] is False
    assert tpuemb("diff", VALID).code == 2


def test_imports_no_torch() -> None:
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
sys.argv = ["tpuemb", "diff", {str(VALID)!r}, {str(VALID)!r}]
from tpuemb_torch.cli import main
try:
    main()
except SystemExit:
    pass
print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "are equal" in done.stdout
    assert done.stdout.splitlines()[-1] == "False"
