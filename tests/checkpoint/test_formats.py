"""Checkpoints of earlier versions, and checkpoints read by other tools."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import tpuemb_torch as tpuemb
from tests.checkpoint.cases import Model, data_folder, same_tables
from tests.distributed import cases
from tpuemb_torch.checkpoint import load, save, tables

FORMAT_1 = Path(__file__).parents[1] / "data" / "checkpoints" / "format-1"


def test_the_first_format_loads() -> None:
    """Saved on two ranks, MOD row-wise, after a step; the same step is made again here."""
    config = tpuemb.load_config(cases.config_text("ftrl", "MOD"))
    embedding = tpuemb.TPUEmbedding(config, cases.COMBINERS, seed=5)
    embedding.set_learning_rates([0.1, 0.2])
    expected = embedding.retrieve_parameters()
    restored = tpuemb.TPUEmbedding(config, cases.COMBINERS, seed=6)
    assert load(FORMAT_1, restored) == {"epoch": 3}
    batch = cases.concatenate([cases.make_batch(4, seed=rank) for rank in range(2)])
    sum(value.square().sum() for value in embedding(batch).values()).backward()
    found, trained = restored.retrieve_parameters(), embedding.retrieve_parameters()
    for table, slots in trained.items():
        for slot, value in slots.items():
            torch.testing.assert_close(found[table][slot], value, rtol=1e-5, atol=1e-6)
            assert not torch.equal(found[table][slot], expected[table][slot])


def test_other_tools_read_logical_tables(tmp_path: Path) -> None:
    model = Model(1)
    save(tmp_path / "ours", model)
    dcp_to_torch_save(data_folder(tmp_path / "ours"), tmp_path / "model.pt")
    plain = torch.load(tmp_path / "model.pt")
    expected = model.embedding.retrieve_parameters()
    for table, slots in expected.items():
        for slot, value in slots.items():
            assert torch.equal(plain[f"embedding.collection.{table}/{slot}"], value)
    assert torch.equal(plain["dense/over.weight"], model.over.weight)
    one = {"embedding.collection.user/linears": torch.empty(23, 8)}
    dcp.load(one, checkpoint_id=data_folder(tmp_path / "ours"), no_dist=True)
    assert torch.equal(one["embedding.collection.user/linears"], expected["user"]["linears"])


def test_a_table_in_many_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = Model(1), Model(2)
    monkeypatch.setattr(tables, "CHUNK_BYTES", 3 * 8 * 4)
    save(tmp_path, model)
    metadata = dcp.FileSystemReader(data_folder(tmp_path)).read_metadata()
    chunks = metadata.state_dict_metadata["embedding.collection.user/parameters"].chunks
    assert [(c.offsets[0], c.sizes[0]) for c in chunks] == [(r, min(3, 23 - r)) for r in range(0, 23, 3)]
    load(tmp_path, other)
    assert same_tables(model.embedding.retrieve_parameters(), other.embedding.retrieve_parameters())
