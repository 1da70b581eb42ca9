"""scripts/train_movielens.py: its parts on small files, and a run that is stopped and continued."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import tpuemb_torch as tpuemb

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "train_movielens.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_movielens", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def write_data(folder: Path, users: int = 6, films: int = 12, ratings: int = 10) -> Path:
    """Files of the same form: every user rates `ratings` films, in an order other than that of time."""
    generator = torch.Generator().manual_seed(3)
    inter = ["user_id:token\titem_id:token\trating:float\ttimestamp:float"]
    for user in range(1, users + 1):
        for place, film in enumerate(torch.randperm(films, generator=generator)[:ratings].tolist()):
            stars = 1 + (user + film) % 5
            inter.append(f"{user}\t{film + 1}\t{stars}\t{880000000 + 977 * ((7 * place + user) % ratings)}")
    lines = {
        "inter": inter,
        "user": ["user_id\tage\tgender\toccupation\tzip_code"]
        + [f"{u}\t{20 + u % 60}\t{'MF'[u % 2]}\t{('writer', 'other')[u % 2]}\t12345" for u in range(1, users + 1)],
        "item": ["item_id\tmovie_title\trelease_year\tclass"]
        + [f"{f}\tFilm {f}\t{1950 + f % 48}\t{('Drama War', 'Comedy', '')[f % 3]}" for f in range(1, films + 1)],
    }
    for name, text in lines.items():
        (folder / f"ml-100k.{name}").write_text("\n".join(text) + "\n")
    return folder


def test_auc_counts_pairs(script: ModuleType) -> None:
    score = torch.tensor([0.1, 0.4, 0.4, 0.9, 0.4, -2.0, 0.9])
    label = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0])
    pairs = [(p, n) for p in score[label == 1].tolist() for n in score[label == 0].tolist()]
    expected = sum(1.0 if p > n else 0.5 if p == n else 0.0 for p, n in pairs) / len(pairs)
    assert script.auc(score, label) == pytest.approx(expected, abs=1e-12)


def test_each_users_last_ratings_are_the_test(script: ModuleType, tmp_path: Path) -> None:
    data = script.read_movielens(write_data(tmp_path))
    times = {}
    for line in (tmp_path / "ml-100k.inter").read_text().splitlines()[1:]:
        user, item, _, timestamp = map(int, line.split("\t"))
        times[user, item] = timestamp
    at = torch.tensor([times[key] for key in zip(data.user.tolist(), data.item.tolist(), strict=True)])
    assert sorted([*data.train.tolist(), *data.test.tolist()]) == list(range(60))
    for user in range(1, 7):
        train, test = (at[part[data.user[part] == user]] for part in (data.train, data.test))
        assert (len(train), len(test)) == (8, 2)
        assert train.max() < test.min()


def test_features_are_those_of_the_files(script: ModuleType, tmp_path: Path) -> None:
    data = script.read_movielens(write_data(tmp_path))
    index = torch.tensor([5, 0, 33])
    features = script.features(data, index)
    genres = features["genres"]
    for place, rating in enumerate(index.tolist()):
        film, user = int(data.item[rating]), int(data.user[rating])
        names = [script.GENRES[i] for i in genres.ids[genres.row_splits[place] : genres.row_splits[place + 1]].tolist()]
        assert names == (("Drama War", "Comedy", "")[film % 3]).split()
        assert features["age"][place] == 20 + user
        assert features["gender"][place] == 1 + user % 2
        assert script.OCCUPATIONS[features["occupation"][place] - 1] == ("writer", "other")[user % 2]
    embedding = tpuemb.TPUEmbedding(tpuemb.load_config(ROOT / "configs" / "movielens.pbtxt"), {"genre": "mean"})
    assert {len(activation) for activation in embedding(features).values()} == {3}


def test_the_config_has_what_the_demo_shows() -> None:
    config = tpuemb.load_config(ROOT / "configs" / "movielens.pbtxt")
    algorithms = [table.optimizer.algorithm for table in config.tables]
    assert set(algorithms) == {"adagrad", "ftrl"}
    assert algorithms.count("ftrl") == 1
    assert config.num_learning_rates == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_stopped_run_continues_with_the_same_losses(tmp_path: Path) -> None:
    data = write_data(tmp_path, users=200, films=300, ratings=40)

    def train(*arguments: str) -> list[tuple[str, ...]]:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(SCRIPT)]
        done = subprocess.run(
            [*command, "--data", str(data), *arguments],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return re.findall(r"^epoch (\d+): loss (\S+), test AUC (\S+)", done.stdout, re.M)

    checkpoint = ("--checkpoint", str(tmp_path / "checkpoint"))
    whole = train("--epochs", "3")
    assert [epoch for epoch, *_ in whole] == ["1", "2", "3"]
    assert train("--epochs", "1", *checkpoint) == whole[:1]
    assert train("--epochs", "3", *checkpoint, "--resume") == whole[1:]
