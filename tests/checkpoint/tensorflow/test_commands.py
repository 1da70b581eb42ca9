"""`tpuemb import-checkpoint` and `export-checkpoint`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import tpuemb_torch as tpuemb
from tests.checkpoint.tensorflow.examples import (
    Tables,
    assert_same,
    config_of,
    golden_prefix,
    golden_values,
    values,
    write_variables,
)
from tests.checkpoint.tensorflow.ranks_load import load_and_retrieve
from tests.cli.commands import tpuemb as command
from tests.ranks import run_ranks
from tpuemb_torch.checkpoint import load, read_tensorflow, save, steps, write_tensorflow
from tpuemb_torch.config import Config, save_config
from tpuemb_torch.sharding import shard_rows

SHAPES = {"user": (50, 8), "a/b": (7, 3)}
TABLES = {
    name: {slot: values(*shape, seed=i) for i, slot in enumerate(("parameters", "accumulators"))}
    for name, shape in SHAPES.items()
}


def written(config: Config, path: Path) -> Path:
    save_config(config, path)
    return path


def retrieved(config: Config, path: Path) -> Tables:
    embedding = tpuemb.TPUEmbedding(config, seed=5)
    load(path, embedding)
    return embedding.retrieve_parameters()


@pytest.mark.parametrize("world_size", [1, 3, 9])
@pytest.mark.parametrize("name", ["tpuembedding_v2_stacked_2dev_adam", "tf215v1_adam", "tpuembedding_v1_4hosts_adam"])
def test_what_is_imported_loads(tmp_path: Path, name: str, world_size: int) -> None:
    expected = golden_values(name)
    config = config_of({t: tuple(found["parameters"].shape) for t, found in expected.items()}, "adam")  # type: ignore[misc]
    file, out = written(config, tmp_path / "config.yaml"), tmp_path / "out"
    prefix = golden_prefix(name)
    result = command("import-checkpoint", prefix, "--config", file, "--out", out, "--world-size", world_size)
    assert (result.code, result.err) == (0, "")
    assert all(table in result.out for table in expected)
    assert_same(retrieved(config, out), expected)
    files = list(out.glob("step-0-*/__*.distcp"))
    assert len(files) == min(world_size, max(len(found["parameters"]) for found in expected.values()))


def test_ranks_load_what_is_imported(tmp_path: Path) -> None:
    write_tensorflow(tmp_path / "ckpt", TABLES)
    config = config_of(SHAPES)
    file = written(config, tmp_path / "c.pb")
    result = command(
        "import-checkpoint", tmp_path / "ckpt", "--config", file, "--out", tmp_path / "out", "--world-size", 2
    )
    assert result.code == 0
    for got in run_ranks(2, load_and_retrieve, config.serialize(), tmp_path / "out"):
        assert_same({t: {s: torch.from_numpy(v) for s, v in found.items()} for t, found in got.items()}, TABLES)


def test_earlier_checkpoints_in_the_folder_stay(tmp_path: Path) -> None:
    write_tensorflow(tmp_path / "ckpt", TABLES)
    config = config_of(SHAPES)
    file, out = written(config, tmp_path / "c.pb"), tmp_path / "out"
    save(out, tpuemb.TPUEmbedding(config, seed=3), step=9)
    for step in (5, 7):
        arguments = ("import-checkpoint", tmp_path / "ckpt", "--config", file, "--out", out, "--step", step)
        assert command(*arguments).code == 0
    assert steps(out) == [7, 5, 9]
    assert_same(retrieved(config, out), TABLES)


def test_json_says_what_became_what(tmp_path: Path) -> None:
    tensors = {"user": values(50, 8), "user/Adagrad": values(50, 8), "tiny": values(1, 2), "tiny/Adagrad": values(1, 2)}
    tensors |= {"dummy_1_tiny": values(1, 2), "global_step": torch.tensor(4)}
    prefix = write_variables(tmp_path / "ckpt", tensors, {"user": [25, 25]})
    file = written(config_of({"user": (50, 8), "tiny": (2, 2)}, num_hosts=2), tmp_path / "c.json")
    result = command("import-checkpoint", prefix, "--config", file, "--json").json
    assert result["ok"]
    assert result["tensors"][0] == {
        "table": "user",
        "slot": "parameters",
        "shape": [50, 8],
        "tensors": ["user"],
        "layout": "one tensor in 2 slices",
    }
    assert [row["tensors"] for row in result["tensors"][1:]] == [["user/Adagrad"], ["tiny"], ["tiny/Adagrad"]]
    assert (result["unused"], result["padding"], result["missing"]) == (["global_step"], ["dummy_1_tiny"], [])
    assert result["out"] is None
    assert {path.name for path in tmp_path.iterdir()} == {"c.json", "ckpt.index", "ckpt.data-00000-of-00001"}


def test_rows_that_only_hosts_need(tmp_path: Path) -> None:
    tables = {"tiny": {"parameters": values(3, 2), "accumulators": values(3, 2).abs()}}
    write_tensorflow(tmp_path / "ckpt", tables)
    config = config_of({"tiny": (5, 2)}, num_hosts=5)
    file, out = written(config, tmp_path / "c.pb"), tmp_path / "out"
    assert command("import-checkpoint", tmp_path / "ckpt", "--config", file, "--out", out).code == 0
    # TensorFlow loads zeros into them.
    padded = {slot: torch.cat([value, torch.zeros(2, 2)]) for slot, value in tables["tiny"].items()}
    assert_same(retrieved(config, out), {"tiny": padded})
    assert command("export-checkpoint", out, tmp_path / "back", "--rows", "tiny=3").code == 0
    assert_same(read_tensorflow(tmp_path / "back"), tables)


def test_slots_that_are_not_there(tmp_path: Path) -> None:
    write_tensorflow(tmp_path / "ckpt", {t: {"parameters": found["parameters"]} for t, found in TABLES.items()})
    config = config_of(SHAPES)
    arguments = ("import-checkpoint", tmp_path / "ckpt", "--config", written(config, tmp_path / "c.pb"), "--out")
    result = command(*arguments, tmp_path / "out")
    assert result.code == 1
    assert "missing" in result.out
    assert (
        "lacks slots of the config's optimizers (table 'user': accumulators; table 'a/b': accumulators)" in result.err
    )
    assert not (tmp_path / "out").exists()
    assert command(*arguments, tmp_path / "out", "--fill-missing").code == 0
    got = retrieved(config, tmp_path / "out")
    assert torch.equal(got["user"]["parameters"], TABLES["user"]["parameters"])
    fresh = tpuemb.TPUEmbedding(config).retrieve_parameters()
    assert torch.equal(got["user"]["accumulators"], fresh["user"]["accumulators"])


def test_a_mapping_file(tmp_path: Path) -> None:
    write_tensorflow(tmp_path / "ckpt", TABLES)
    (tmp_path / "m.yaml").write_text("tables: {other: a/b}")
    config = config_of({"user": (50, 8), "other": (7, 3)})
    file, out = written(config, tmp_path / "c.pb"), tmp_path / "out"
    arguments = ("import-checkpoint", tmp_path / "ckpt", "--config", file, "--out", out)
    assert "no table 'other'" in command(*arguments).err
    assert command(*arguments, "--mapping", tmp_path / "m.yaml").code == 0
    assert_same(retrieved(config, out), {"user": TABLES["user"], "other": TABLES["a/b"]})


@pytest.mark.parametrize("damage", ["index", "data", "missing", "type"])
def test_wrong_input_leaves_nothing(tmp_path: Path, damage: str) -> None:
    tables = TABLES
    if damage == "type":
        tables = {t: {slot: value.double() for slot, value in found.items()} for t, found in TABLES.items()}
    index, data = write_tensorflow(tmp_path / "ckpt", tables)
    file = written(config_of(SHAPES), tmp_path / "c.pb")
    old = tmp_path / "out"
    save(old, tpuemb.TPUEmbedding(config_of(SHAPES), seed=1), step=3)
    before = {path: path.read_bytes() for path in old.rglob("*") if path.is_file()}
    if damage == "missing":
        data.unlink()
    elif damage != "type":
        damaged = bytearray((index if damage == "index" else data).read_bytes())
        damaged[-100] ^= 4
        (index if damage == "index" else data).write_bytes(damaged)
    for extra in ((), ("--json",)):
        result = command("import-checkpoint", tmp_path / "ckpt", "--config", file, "--out", old, *extra)
        assert result.code == 1
        problem = result.json["error"]["problem"] if extra else result.err
        expected = {"index": "ckpt.index is damaged", "data": "is damaged: CRC32C", "missing": "No such file"}
        assert expected.get(damage, "is torch.float64; tables are float32") in problem
        assert {path: path.read_bytes() for path in old.rglob("*") if path.is_file()} == before


def test_wrong_usage(tmp_path: Path) -> None:
    assert command("import-checkpoint", tmp_path / "x").code == 2
    assert command("import-checkpoint", tmp_path / "x", "--config", tmp_path / "c", "--world-size", 0).code == 2
    for options in (("--to", "zip"), ("--num-shards", "2"), ("--to", "npz", "--strategy", "x"), ("--rows", "t")):
        assert command("export-checkpoint", tmp_path / "x", tmp_path / "y", *options).code == 2
    result = command("export-checkpoint", tmp_path / "x", tmp_path / "y", "--json")
    assert (result.code, result.json["ok"]) == (1, False)
    assert "no checkpoint in" in result.json["error"]["problem"]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    embedding = tpuemb.TPUEmbedding(config_of(SHAPES, num_hosts=3, strategy="MOD"))
    embedding.load_parameters(TABLES)
    save(tmp_path / "saved", embedding, step=7)
    return tmp_path / "saved"


@pytest.mark.parametrize("form", ["object", "name"])
def test_tensorflow_forms(tmp_path: Path, saved: Path, form: str) -> None:
    result = command("export-checkpoint", saved, tmp_path / "out" / "ckpt", "--to", form, "--json").json
    assert result["written"] == [f"{tmp_path}/out/ckpt.index", f"{tmp_path}/out/ckpt.data-00000-of-00001"]
    config = config_of(SHAPES, num_hosts=3, strategy="MOD")
    assert_same(read_tensorflow(tmp_path / "out" / "ckpt", config), TABLES)


def test_plain_files(tmp_path: Path, saved: Path) -> None:
    assert command("export-checkpoint", saved, tmp_path / "t.npz", "--to", "npz").code == 0
    with np.load(tmp_path / "t.npz") as arrays:
        assert set(arrays.files) == {f"{t}/{slot}" for t, found in TABLES.items() for slot in found}
        assert all(np.array_equal(arrays[f"{t}/{s}"], v) for t, found in TABLES.items() for s, v in found.items())
    assert command("export-checkpoint", saved, tmp_path / "t.safetensors", "--to", "safetensors").code == 0
    load_file = pytest.importorskip("safetensors.torch").load_file
    tensors = load_file(tmp_path / "t.safetensors")
    assert_same(tensors_by_table(tensors), TABLES)


def tensors_by_table(tensors: dict[str, torch.Tensor]) -> Tables:
    tables: Tables = {}
    for name, tensor in tensors.items():
        table, _, slot = name.rpartition("/")
        tables.setdefault(table, {})[slot] = tensor
    return tables


@pytest.mark.parametrize("strategy", ["div", "mod"])
def test_files_of_one_host_each(tmp_path: Path, saved: Path, strategy: str) -> None:
    options = ["--to", "npz", "--num-shards", "3", *(["--strategy", "div"] if strategy == "div" else [])]
    result = command("export-checkpoint", saved, tmp_path / "t.npz", *options, "--json").json
    # Load takes them as they are.
    embedding = tpuemb.TPUEmbedding(config_of(SHAPES, num_hosts=3, strategy=strategy_name(strategy)))
    for host, path in enumerate(result["written"]):
        assert Path(path).name == f"t-0000{host}-of-00003.npz"
        with np.load(path) as arrays:
            part = tensors_by_table({name: torch.from_numpy(arrays[name]) for name in arrays.files})
        assert len(part["user"]["parameters"]) == len(shard_rows(50, 3, host, strategy))  # type: ignore[arg-type]
        embedding.load_parameters(part, num_shards=3, shard_id=host)
    assert_same(embedding.retrieve_parameters(), TABLES)


def strategy_name(strategy: str) -> str:
    return {"div": "DIV_DEFAULT", "mod": "MOD"}[strategy]


def test_one_of_several_steps_and_embeddings(tmp_path: Path) -> None:
    class Model(torch.nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.first = tpuemb.TPUEmbedding(config_of({"a": (4, 2)}), seed=seed)
            self.second = tpuemb.TPUEmbedding(config_of({"b": (5, 2)}), seed=seed)

    models = [Model(1), Model(2)]
    for step, model in enumerate(models):
        save(tmp_path / "saved", model, step=step, keep=2)
    result = command("export-checkpoint", tmp_path / "saved", tmp_path / "ckpt")
    assert result.code == 1
    assert "has embeddings ['first.collection.', 'second.collection.']; say which" in result.err
    options = ("--embedding", "second.collection.", "--step", 0)
    assert command("export-checkpoint", tmp_path / "saved", tmp_path / "ckpt", *options).code == 0
    assert_same(read_tensorflow(tmp_path / "ckpt"), models[0].second.retrieve_parameters())
    assert (
        "no checkpoint of step 9" in command("export-checkpoint", tmp_path / "saved", tmp_path / "c", "--step", 9).err
    )


def test_rows_that_hold_something_are_not_left_out(tmp_path: Path, saved: Path) -> None:
    for option, problem in (("user=49", "the table has 50 rows"), ("x=1", "there is no such table")):
        result = command("export-checkpoint", saved, tmp_path / "c", "--rows", option)
        assert result.code == 1
        assert problem in result.err
