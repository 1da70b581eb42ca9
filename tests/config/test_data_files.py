"""The files of tests/data/configs: valid ones in every format, broken ones with the error that each must give."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tpuemb_torch.config import ConfigError, load_config
from tpuemb_torch.config.parse import format_of_path
from tpuemb_torch.config.write import to_json, to_text, to_yaml

FOLDER = Path(__file__).resolve().parents[1] / "data" / "configs"
EXPECTED = json.loads((FOLDER / "broken" / "expected.json").read_text())


def test_every_broken_file_has_an_expectation() -> None:
    assert {path.name for path in (FOLDER / "broken").iterdir()} == {*EXPECTED, "expected.json"}


@pytest.mark.parametrize("name", EXPECTED)
def test_broken(name: str) -> None:
    path = FOLDER / "broken" / name
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    field = caught.value.field.replace(str(path), name)
    if name.endswith(".yaml"):  # the C and the Python parser count columns differently
        field = field.partition(", column")[0]
    assert field == EXPECTED[name]["field"]
    assert EXPECTED[name]["says"] in str(caught.value)
    assert name in str(caught.value) or name == "table_as_number.pb"


@pytest.mark.parametrize("name", ["by_feature", "by_table", "user_defined"])
def test_valid(name: str) -> None:
    config = load_config(FOLDER / "valid" / f"{name}.pb")
    for ending, write in ((".pbtxt", to_text), (".json", to_json), (".yaml", to_yaml)):
        path = FOLDER / "valid" / f"{name}{ending}"
        assert load_config(path) == config
        assert load_config(write(config.to_proto()), format=format_of_path(path)) == config
    assert config.serialize() == (FOLDER / "valid" / f"{name}.pb").read_bytes()
