"""`async_save`: the values of the moment of the call, errors that are not lost, one save at a time."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from tests.checkpoint.cases import Model, layer, numbered, same_tables
from tpuemb_torch.checkpoint import CheckpointError, async_save, load, save, steps, store


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Writing in the background begins when this is set."""
    go, write = threading.Event(), store.write

    def wait_and_write(*args: object) -> None:
        assert go.wait(20)
        write(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(store, "write", wait_and_write)
    return go


def test_the_snapshot_is_written_and_training_does_not_wait(tmp_path: Path, held: threading.Event) -> None:
    model, other = Model(1), Model(2)
    model.embedding.set_learning_rates([0.1, 0.2])
    expected, weight = model.embedding.retrieve_parameters(), model.over.weight.detach().clone()
    extra = {"state": torch.ones(2)}
    future = async_save(tmp_path, model, step=1, extra=extra)
    numbered(model.embedding, 0.5)
    model.embedding.set_learning_rates([0.3, 0.4])
    with torch.no_grad():
        model.over.weight.zero_()
    extra["state"].zero_()
    assert not future.done()
    with pytest.raises(CheckpointError, match="no checkpoint"):
        steps(tmp_path)
    held.set()
    future.result()
    assert torch.equal(load(tmp_path, other)["state"], torch.ones(2))
    assert same_tables(other.embedding.retrieve_parameters(), expected)
    assert torch.equal(other.over.weight, weight)
    assert other.embedding.collection.steps.rates.tolist() == torch.tensor([0.1, 0.2]).tolist()


def test_a_load_waits_for_the_save(tmp_path: Path, held: threading.Event) -> None:
    embedding, other = layer(), layer()
    expected = numbered(embedding, 1.0)
    async_save(tmp_path, embedding, step=1)
    threading.Timer(0.2, held.set).start()
    load(tmp_path, other)
    assert same_tables(other.retrieve_parameters(), expected)


def test_an_error_comes_with_the_future_or_with_the_next_call(tmp_path: Path, held: threading.Event) -> None:
    embedding = layer()
    future = async_save(tmp_path, embedding, step=1)
    (partial,) = tmp_path.glob(".step-1-*.partial")
    partial.rmdir()
    partial.write_text("in the way")
    held.set()
    with pytest.raises(CheckpointError, match="cannot write checkpoint"):
        future.result()
    with pytest.raises(CheckpointError, match="an earlier async_save failed: cannot write"):
        save(tmp_path, embedding, step=2)
    partial.unlink()
    save(tmp_path, embedding, step=2)
    assert steps(tmp_path) == [2]
