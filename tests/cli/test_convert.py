from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType

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


@pytest.mark.parametrize("name", ["by_feature", "by_table", "user_defined"])
def test_torchrec_and_back(tmp_path: Path, name: str) -> None:
    source, middle, back = FILES / "valid" / f"{name}.pb", tmp_path / "x.yaml", tmp_path / "y.pb"
    assert tpuemb("convert", source, middle, "--to", "torchrec").code == 0
    assert tpuemb("convert", "--from", "torchrec", middle, back).code == 0
    config, again = load_config(source), load_config(back)
    assert again.tables == config.tables
    assert again.features == config.features
    assert again == config


def test_torchrec_tables_are_what_torchrec_takes(tmp_path: Path) -> None:
    target = tmp_path / "x.yaml"
    written = tpuemb("convert", VALID, target, "--to", "torchrec", "--world-size", "2", "--json").json["written"]
    assert written["format"] == "torchrec"
    document = yaml.safe_load(target.read_text())
    config = load_config(VALID)
    assert [t["num_embeddings"] for t in document["tables"]] == [t.vocabulary_size for t in config.tables]
    assert set(document["optimizers"]) == {t.name for t in config.tables}
    assert document["plan"]["world_size"] == 2
    tables = [
        {k: v for k, v in t.items() if k in ("name", "num_embeddings", "embedding_dim", "feature_names")}
        for t in document["tables"]
    ]
    made = [
        EmbeddingBagConfig(**t, pooling=PoolingType[d["pooling"]])
        for t, d in zip(tables, document["tables"], strict=True)
    ]
    assert [t.name for t in made] == [t.name for t in config.tables]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d.pop("format"), "is not a TorchRec document"),
        (lambda d: d.update(extra=1), r"unknown keys \['extra'\]"),
        (lambda d: d["tables"][0].update(pooling="MEAN"), r"tables\[0\].pooling"),
        (lambda d: d["tables"][0].pop("embedding_dim"), r"tables\[0\].embedding_dim: is missing"),
        (lambda d: d["tables"][0].update(embedding_dim=0), "dimension"),
        (lambda d: d["optimizers"].clear(), "optimizers"),
        (lambda d: d["features"][0].update(table="nowhere"), r"features\[0\].table"),
        (lambda d: d["tables"][0].update(feature_names=[]), "feature_names have it in"),
    ],
)
def test_wrong_torchrec_documents(tmp_path: Path, edit: Any, message: str) -> None:
    target = tmp_path / "x.yaml"
    tpuemb("convert", VALID, target, "--to", "torchrec")
    document = yaml.safe_load(target.read_text())
    edit(document)
    target.write_text(yaml.safe_dump(document))
    result = tpuemb("convert", "--from", "torchrec", target, tmp_path / "y.pb")
    assert result.code == 1
    assert re.search(message, result.err)
    assert not (tmp_path / "y.pb").exists()


def test_torchrec_options(tmp_path: Path) -> None:
    assert tpuemb("convert", VALID, tmp_path / "x.pb", "--to", "torchrec").code == 1
    assert tpuemb("convert", VALID, tmp_path / "x.yaml", "--to", "keras").code == 2
    assert tpuemb("convert", VALID, tmp_path / "x.yaml", "--world-size", "2").code == 2
