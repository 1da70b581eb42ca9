"""Loading some of a checkpoint: some tables, an INFERENCE config, tables that grew, shrank or were numbered anew."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import tpuemb_torch as tpuemb
from tests.checkpoint.cases import Model, Tables, layer, numbered, same_tables
from tests.distributed.cases import COMBINERS, config_text
from tests.ranks import run_ranks
from tpuemb_torch.checkpoint import CheckpointError, load, save


def test_some_tables(tmp_path: Path) -> None:
    model, other = Model(1), Model(2)
    model.embedding.set_learning_rates([0.1, 0.2])
    save(tmp_path, model, extra="all")
    before, weight = other.embedding.retrieve_parameters(), other.over.weight.detach().clone()
    assert load(tmp_path, other, tables=["item", "tiny"]) == "all"
    found, saved = other.embedding.retrieve_parameters(), model.embedding.retrieve_parameters()
    assert same_tables(found, {"user": before["user"], "item": saved["item"], "tiny": saved["tiny"]})
    assert torch.equal(other.over.weight, weight)
    assert other.embedding.collection.steps.rates is None


def test_some_tables_of_another_model(tmp_path: Path) -> None:
    """A model with other tables besides, under another name."""
    model, other = Model(1), layer(rows=23, dimension=8)
    save(tmp_path, model)
    text = config_text("ftrl").replace('"item"', '"new"').replace("vocabulary_size: 2 ", "vocabulary_size: 3 ")
    grown = tpuemb.TPUEmbedding(tpuemb.load_config(text), seed=3)
    with pytest.raises(CheckpointError, match=r"table 'item': saved with .* the model has None; name the tables"):
        load(tmp_path, grown)
    load(tmp_path, grown, tables=["user"])
    assert torch.equal(grown.retrieve_parameters()["user"]["linears"], retrieved(model)["user"]["linears"])
    with pytest.raises(CheckpointError, match=r"table 'tiny': saved with 2 rows, the model has 3 .*rule file"):
        load(tmp_path, grown, tables=["tiny"])
    with pytest.raises(CheckpointError, match=r"table 'new'.*saved with .* None"):
        load(tmp_path, grown, tables=["new"])
    with pytest.raises(CheckpointError, match=r"tables names \['t2'\], but the model has"):
        load(tmp_path, other, tables=["t2"])
    with pytest.raises(CheckpointError, match=r"must be a sequence of names, got the string 'user'"):
        load(tmp_path, grown, tables="user")


def retrieved(model: Model) -> Tables:
    return model.embedding.retrieve_parameters()


def test_the_layer_alone_takes_the_tables_of_a_whole_model(tmp_path: Path) -> None:
    model = Model(1)
    save(tmp_path, model, extra=1)
    alone = tpuemb.TPUEmbedding(tpuemb.load_config(config_text("ftrl")), COMBINERS, seed=2)
    assert load(tmp_path, alone) == 1
    assert same_tables(alone.retrieve_parameters(), retrieved(model))
    bare = tpuemb.TPUEmbeddingBagCollection(tpuemb.load_config(config_text("ftrl")), COMBINERS, seed=2)
    load(tmp_path, bare)
    save(tmp_path / "bare", bare)
    again = tpuemb.TPUEmbedding(tpuemb.load_config(config_text("ftrl")), COMBINERS, seed=4)
    load(tmp_path / "bare", again)
    assert same_tables(again.retrieve_parameters(), retrieved(model))


def test_an_inference_config_takes_the_weights(tmp_path: Path) -> None:
    trained, served = layer(optimizer="adam {}"), layer(optimizer="stochastic_gradient_descent {}", mode="INFERENCE")
    expected = numbered(trained, 1.0)
    save(tmp_path, trained)
    load(tmp_path, served)
    found = served.retrieve_parameters()
    assert all(torch.equal(found[t]["parameters"], expected[t]["parameters"]) for t in expected)
    same = layer(optimizer="adam {}", mode="INFERENCE")
    load(tmp_path, same)
    assert same_tables(same.retrieve_parameters(), expected)
    with pytest.raises(CheckpointError, match=r"'adam'.*'stochastic_gradient_descent'"):
        load(tmp_path, layer(optimizer="stochastic_gradient_descent {}"))
    with pytest.raises(CheckpointError, match=r"\(3, 4, 'adam'\), the model has \(3, 5, 'adam'\)"):
        load(tmp_path, layer(optimizer="adam {}", dimension=5, mode="INFERENCE"))


def write_rules(folder: Path, text: str) -> Path:
    (folder / "rules.yaml").write_text(text)
    return folder / "rules.yaml"


@pytest.mark.parametrize("sizes", [(9, 13), (13, 9)])
def test_rows_that_are_new_keep_what_the_model_has(tmp_path: Path, sizes: tuple[int, int]) -> None:
    saved, rows = sizes
    first, second = layer(saved), layer(rows)
    before, after = numbered(first, 1.0), numbered(second, 1000.0)
    save(tmp_path / "run", first)
    kind = "grow" if rows > saved else "shrink"
    rules = write_rules(tmp_path, f"tables:\n  t: {{rule: {kind}, from: {saved}, to: {rows}}}")
    with pytest.raises(CheckpointError, match=f"'t': saved with {saved} rows, the model has {rows} "):
        load(tmp_path / "run", second)
    assert same_tables(second.retrieve_parameters(), after)
    load(tmp_path / "run", second, rules=rules)
    found = second.retrieve_parameters()
    common = min(sizes)
    for slot, value in found["t"].items():
        assert torch.equal(value[:common], before["t"][slot][:common])
        assert torch.equal(value[common:], after["t"][slot][common:])
    assert same_tables({"other": found["other"]}, {"other": before["other"]})


MAP = [3, -1, 0, 8, 8, 1, -1, 2, 4, 5, 7]


def load_mapped(rank: int, world: int, path: str, plan: str) -> dict[str, dict[str, np.ndarray]]:
    embedding = layer(len(MAP))
    numbered(embedding, 1000.0)
    if world > 1:
        embedding = tpuemb.shard(embedding, plan)
    load(f"{path}/run", embedding, rules=f"{path}/rules.yaml")
    tables = embedding.retrieve_parameters()
    return {table: {slot: value.numpy() for slot, value in slots.items()} for table, slots in tables.items()}


@pytest.mark.parametrize("ending", ["txt", "npy"])
def test_rows_that_were_numbered_anew(tmp_path: Path, ending: str) -> None:
    first = layer(9)
    before, other = numbered(first, 1.0), numbered(layer(len(MAP)), 1000.0)
    save(tmp_path / "run", first)
    if ending == "txt":
        (tmp_path / "map.txt").write_text("\n".join(map(str, MAP)))
    else:
        np.save(tmp_path / "map.npy", np.array(MAP, dtype=np.int32))
    write_rules(tmp_path, f"tables:\n  t: {{rule: map, from: 9, to: {len(MAP)}, file: map.{ending}}}")
    results = [load_mapped(0, 1, str(tmp_path), "")]
    if ending == "npy":
        for plan in ("row_wise", "column_wise"):
            results += run_ranks(2, load_mapped, str(tmp_path), plan)
    for found in results:
        for slot, value in found["t"].items():
            for row, saved in enumerate(MAP):
                expected = other["t"][slot][row] if saved < 0 else before["t"][slot][saved]
                np.testing.assert_array_equal(value[row], expected.numpy())


GOOD = "rule: map, from: 9, to: 3, file: map.txt"


@pytest.mark.parametrize(
    ("text", "numbers", "message"),
    [
        ("tables: {u: {rule: grow, from: 1, to: 2}}", "", r"the rule file names \['u'\], but the model has"),
        ("tables: {t: {rule: grow, from: 8, to: 13}}", "", "from 8 to 13 rows, but it was saved with 9 and the model"),
        ("tables: {t: {rule: grow, from: 9, to: 12}}", "", "from 9 to 12 rows, but it was saved with 9 and the model"),
        ("tables: {t: {rule: shrink, from: 9, to: 13}}", "", "shrink from 9 to 13 rows is none"),
        ("tables: {t: {rule: drop, from: 9, to: 13}}", "", "table 't': rule 'drop' is not one of grow, shrink, map"),
        ("tables: {t: {rule: [grow], from: 9, to: 13}}", "", r"rule \['grow'\] is not one of"),
        ("tables: {t: {rule: grow, from: 9}}", "", "grow takes from, rule, to; got rule, from"),
        ("tables: {t: {rule: grow, from: 9, to: many}}", "", "'to' is 'many', it must be a number of rows"),
        ("{t: {rule: grow, from: 9, to: 13}}", "", "under the one key 'tables'"),
        ("tables: {t: {rule: grow", "", "is not YAML"),
        (f"tables: {{t: {{{GOOD}}}}}", "1\n2", r"map .*map.txt has int64 of shape \[2\], it must have 3 integers"),
        (f"tables: {{t: {{{GOOD}}}}}", "1\n2\n9", "has rows from 1 to 9; saved rows are 0 to 8"),
        (f"tables: {{t: {{{GOOD}}}}}", "1\n2\n-2", "has rows from -2 to 2"),
        (f"tables: {{t: {{{GOOD}}}}}", "1\n2\nx", "map .*map.txt cannot be read"),
        (f"tables: {{t: {{{GOOD}}}}}", "", "map .*map.txt"),
    ],
)
def test_rules_that_do_not_fit_change_nothing(tmp_path: Path, text: str, numbers: str, message: str) -> None:
    save(tmp_path / "run", layer(9))
    (tmp_path / "map.txt").write_text(numbers)
    embedding = layer(13)
    before = numbered(embedding, 1.0)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "run", embedding, rules=write_rules(tmp_path, text))
    with pytest.raises(CheckpointError, match="cannot be read"):
        load(tmp_path / "run", embedding, rules=tmp_path / "none.yaml")
    assert same_tables(embedding.retrieve_parameters(), before)
