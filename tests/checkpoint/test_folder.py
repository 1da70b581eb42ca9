"""The folder: which checkpoints stay, which one is loaded, what is refused."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.cases import layer, numbered, same_tables
from tpuemb_torch.checkpoint import CheckpointError, files, folder, load, reading, save, steps, writing


def test_the_last_ones_stay(tmp_path: Path) -> None:
    embedding = layer()
    values = {}
    for step in (10, 20, 30, 20, 40):
        values[step] = numbered(embedding, step)
        save(tmp_path, embedding, step=step, extra=step, keep=3)
    assert steps(tmp_path) == [40, 20, 30]
    assert len(list(tmp_path.glob("step-*"))) == 3
    for step in (None, 40, 30, 20):
        assert load(tmp_path, embedding, step=step) == (step or 40)
        assert same_tables(embedding.retrieve_parameters(), values[step or 40])
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 10 in .*: it has steps \[40, 20, 30\]"):
        load(tmp_path, embedding, step=10)
    save(tmp_path, embedding, step=50)
    assert steps(tmp_path) == [50]


def test_one_that_someone_removed_is_not_offered(tmp_path: Path) -> None:
    embedding = layer()
    for step in (1, 2):
        save(tmp_path, embedding, step=step, keep=2)
    (older,) = tmp_path.glob("step-1-*")
    older.rename(tmp_path / "elsewhere")
    assert steps(tmp_path) == [2]
    load(tmp_path, embedding)
    with pytest.raises(CheckpointError, match=r"latest names step-1-[0-9a-f]{8}, which is not there"):
        load(tmp_path, embedding, step=1)


def test_wrong_arguments_and_folders(tmp_path: Path) -> None:
    embedding = layer()
    with pytest.raises(ValueError, match="step -1 is negative"):
        save(tmp_path, embedding, step=-1)
    with pytest.raises(ValueError, match="keep=0: at least"):
        save(tmp_path, embedding, keep=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write checkpoint"):
        save(tmp_path / "file", embedding)
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        steps(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file"]


def test_a_damaged_list_loses_no_checkpoint(tmp_path: Path) -> None:
    embedding = layer()
    save(tmp_path, embedding, step=1)
    (tmp_path / "latest").write_text("")
    save(tmp_path, embedding, step=2)
    assert len(list(tmp_path.glob("step-1-*"))) == 1
    load(tmp_path, embedding)


def test_a_format_of_the_future_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    embedding = layer()
    with monkeypatch.context() as patch:
        patch.setattr(folder, "FORMATS", {3: "sha256"})
        save(tmp_path, embedding)
    with pytest.raises(CheckpointError, match=r"has format 3, this version reads \[1, 2\]"):
        load(tmp_path, embedding)


def test_a_disk_that_is_full_leaves_what_there_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    embedding = layer()
    expected = numbered(embedding, 1.0)
    save(tmp_path, embedding, step=1)
    numbered(embedding, 2.0)
    for name in ("__0_0.distcp", ".metadata.tmp", "extra.pt", "checkpoint.json", "latest"):
        with monkeypatch.context() as patch:
            files_are_full(patch, name)
            with pytest.raises(
                CheckpointError, match=r"cannot write checkpoint .*: (rank 0: )?\[Errno 28\] No space left on device$"
            ):
                save(tmp_path, embedding, step=2)
        load(tmp_path, embedding)
        assert same_tables(embedding.retrieve_parameters(), expected)
        assert list(tmp_path.glob(".step*")) == []


def files_are_full(patch: pytest.MonkeyPatch, name: str) -> None:
    """Writing to files of a name fails."""
    full = OSError(28, "No space left on device")
    digested, plain = files._DigestedFile, files.write_file

    class Full(digested):
        def write(self, data: Any) -> int:
            if str(self.raw.name).endswith(name):
                raise full
            return super().write(data)

    def write_file(path: Path, data: bytes) -> None:
        if path.name.startswith(name):
            raise full
        plain(path, data)

    patch.setattr(files, "_DigestedFile", Full)
    patch.setattr(writing, "write_file", write_file)
    patch.setattr(folder, "write_file", write_file)


def test_bars_count_every_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bars: list[Bar] = []

    def bytes_bar(what: str, total: int, rank: int = 0) -> Bar:
        bars.append(Bar(what, total))
        return bars[-1]

    for module in (files, reading, writing):
        monkeypatch.setattr(module, "bytes_bar", bytes_bar)
    embedding = layer()
    save(tmp_path, embedding)
    load(tmp_path, embedding)
    saving, verifying, loading = bars
    size = 2 * 4 * (9 * 4 + 3 * 4)
    assert saving.what.startswith("saving checkpoint step-0-") and saving.total == size <= saving.count
    assert verifying.total == verifying.count > size
    assert loading.total == loading.count == size


class Bar(nullcontext[None]):
    """Stands for a progress bar."""

    def __init__(self, what: str, total: int) -> None:
        super().__init__(None)
        self.what, self.total, self.count = what, total, 0

    def __enter__(self) -> Any:
        return self

    def update(self, count: int) -> None:
        self.count += count
