"""Trains a DLRM on MovieLens-100k: torchrun --nproc_per_node=2 scripts/train_movielens.py

The embedding layer comes from a TPUEmbeddingConfiguration alone (configs/movielens.pbtxt). TorchRec's
DistributedModelParallel shards it over the processes and keeps the copies of the dense network in step.
Task: will a user rate a film 4 or better? Split by time: the last fifth of each user's ratings is the test. (With one
cut for all, seven in ten test ratings would be of users that have none in training.)
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from importlib import util
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.distributed import DistributedModelParallel
from tqdm import tqdm

import tpuemb_torch as tpuemb

DENSE_LEARNING_RATE = 0.002
OCCUPATIONS = (
    "administrator artist doctor educator engineer entertainment executive healthcare homemaker lawyer librarian "
    "marketing none other programmer retired salesman scientist student technician writer"
).split()
GENRES = (
    "unknown Action Adventure Animation Children's Comedy Crime Documentary Drama Fantasy Film-Noir Horror Musical "
    "Mystery Romance Sci-Fi Thriller War Western"
).split()


@dataclass
class Ratings:
    """MovieLens-100k as tensors: one entry per rating, unless said otherwise."""

    user: Tensor
    item: Tensor
    label: Tensor  # float32: 1 for a rating of 4 or 5
    dense: Tensor  # [ratings, 4]: age of the user, release year, time of day as a point on a circle
    train: Tensor  # numbers of the ratings to train on
    test: Tensor
    age: Tensor  # by user
    gender: Tensor
    occupation: Tensor
    genre_splits: Tensor  # by item: row splits into genre_ids
    genre_ids: Tensor


def read_movielens(folder: Path) -> Ratings:
    """Reads the tab-separated files `ml-100k.inter`, `.user` and `.item`."""

    def rows(name: str) -> list[list[str]]:
        lines = (folder / f"ml-100k.{name}").read_text(encoding="utf-8").splitlines()
        return [line.split("\t") for line in lines[1:]]

    ratings = np.array([[int(value) for value in row] for row in rows("inter")])
    ratings = ratings[np.lexsort((ratings[:, 3], ratings[:, 0]))]  # by user, then by time
    user, item = torch.tensor(ratings[:, 0]), torch.tensor(ratings[:, 1])
    per_user = torch.bincount(user)
    place = torch.arange(len(user)) - (per_user.cumsum(0) - per_user)[user]
    is_test = place >= (0.8 * per_user[user]).floor()

    age, gender, occupation = (torch.zeros(len(per_user), dtype=torch.int64) for _ in range(3))
    for number, years, sex, job, _ in rows("user"):
        row = int(number)
        age[row], gender[row], occupation[row] = int(years), 1 + (sex == "F"), 1 + OCCUPATIONS.index(job)
    genres: list[list[int]] = [[] for _ in range(int(item.max()) + 1)]
    year = torch.full((len(genres),), 1995.0)
    for number, _, released, kinds in rows("item"):
        genres[int(number)] = [GENRES.index(kind) for kind in kinds.split()]
        year[int(number)] = float(released) if released.isdigit() else 1995.0
    hour = torch.tensor(ratings[:, 3] % 86400 / 86400 * 2 * np.pi, dtype=torch.float32)
    return Ratings(
        user=user,
        item=item,
        label=torch.tensor(ratings[:, 2] >= 4, dtype=torch.float32),
        dense=torch.stack([(age[user] - 35) / 15, (year[item] - 1985) / 15, hour.sin(), hour.cos()], dim=1),
        train=torch.nonzero(~is_test).flatten(),
        test=torch.nonzero(is_test).flatten(),
        age=age,
        gender=gender,
        occupation=occupation,
        genre_splits=torch.tensor([0, *np.cumsum([len(kinds) for kinds in genres])]),
        genre_ids=torch.tensor([kind for kinds in genres for kind in kinds]),
    )


def features(data: Ratings, index: Tensor) -> dict[str, object]:
    """The embedding layer's inputs for some ratings: one id each, but several genres a film."""
    user, item = data.user[index], data.item[index]
    counts = data.genre_splits.diff()[item]
    splits = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    place = torch.arange(int(splits[-1])) + torch.repeat_interleave(data.genre_splits[item] - splits[:-1], counts)
    return {
        "user": user,
        "item": item,
        "age": data.age[user],
        "gender": data.gender[user],
        "occupation": data.occupation[user],
        "genres": tpuemb.Ragged(splits, data.genre_ids[place]),
        "item_bias": item,
        "user_bias": user,
    }


def auc(score: Tensor, label: Tensor) -> float:
    """Area under the ROC curve, from ranks; ties count half."""
    _, inverse, counts = torch.unique(score, return_inverse=True, return_counts=True)
    mean_rank = (counts.cumsum(0) - (counts - 1) / 2).double()
    positive = label > 0.5
    n_pos, n_neg = int(positive.sum()), int((~positive).sum())
    return float((mean_rank[inverse][positive].sum() - n_pos * (n_pos + 1) / 2) / (n_pos * n_neg))


def bias_only_auc(data: Ratings, epochs: int = 8) -> float:
    """Test AUC of logit = b + b_user + b_item, trained on the same ratings: what the DLRM must beat."""
    user, item = nn.Embedding(len(data.age), 1), nn.Embedding(len(data.genre_splits) - 1, 1)
    bias = nn.Parameter(torch.zeros(1))
    nn.init.zeros_(user.weight)
    nn.init.zeros_(item.weight)
    optimizer = torch.optim.Adam([*user.parameters(), *item.parameters(), bias], lr=0.02)

    def logit(index: Tensor) -> Tensor:
        return (bias + user(data.user[index]) + item(data.item[index])).squeeze(1)

    for epoch in range(epochs):
        for index in shuffled(data.train, epoch).split(1024):
            optimizer.zero_grad()
            binary_cross_entropy_with_logits(logit(index), data.label[index]).backward()
            optimizer.step()
    with torch.no_grad():
        return auc(logit(data.test), data.label[data.test])


def shuffled(index: Tensor, epoch: int) -> Tensor:
    """The same order on every rank, and after a restart."""
    return index[torch.randperm(len(index), generator=torch.Generator().manual_seed(epoch))]


@torch.no_grad()
def evaluate(model: nn.Module, data: Ratings, batch: int) -> float:
    """Test AUC; each rank scores its part of each batch."""
    model.eval()
    own = [index[dist.get_rank() :: dist.get_world_size()] for index in data.test.split(batch)]
    scores = torch.cat([model(data.dense[index], features(data, index)) for index in own])
    model.train()
    parts: list[tuple[Tensor, Tensor]] = [(scores, data.label)] * dist.get_world_size()
    dist.all_gather_object(parts, (scores, data.label[torch.cat(own)]))
    return auc(torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts]))


def main() -> None:
    root = Path(__file__).resolve().parent.parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=root / "configs" / "movielens.pbtxt")
    parser.add_argument("--data", type=Path, help="folder with ml-100k.inter, .user and .item")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument(
        "--learning-rate", type=float, default=0.05, help="highest rate of tag 0, reached after the warm-up"
    )
    parser.add_argument("--warmup-steps", type=int, default=100)
    parser.add_argument("--checkpoint", type=Path, help="folder to save to after each epoch")
    parser.add_argument("--resume", action="store_true", help="continue from --checkpoint")
    arguments = parser.parse_args()
    if arguments.resume and arguments.checkpoint is None:
        parser.error("--resume needs --checkpoint")
    if arguments.data is None:
        package = util.find_spec("recbole")
        if package is None or package.origin is None:
            parser.error("MovieLens-100k not found: pip install --no-deps recbole==1.2.1, or give --data")
        arguments.data = Path(package.origin).parent / "dataset_example" / "ml-100k"

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data = read_movielens(arguments.data)
    config = tpuemb.load_config(arguments.config)
    batch = config.batch_size_per_tensor_core * config.num_tensor_cores

    torch.manual_seed(0)
    embedding = tpuemb.TPUEmbedding(config, combiners={"genre": "mean"})
    # Initial weights are not part of the config; so few ratings train best from small ones.
    embedding.load_parameters(
        {t.name: {"parameters": 0.01 * torch.randn(t.vocabulary_size, t.dimension)} for t in config.tables}
    )
    model = DistributedModelParallel(
        tpuemb.models.DLRM(embedding, dense_features=data.dense.shape[1], vectors_in_top=True),
        device=torch.device("cpu"),
        sharders=tpuemb.sharders(),
    )
    # The tables' optimizers are part of the backward pass; this one has the dense parameters only.
    dense = [parameter for name, parameter in model.named_parameters() if "embedding" not in name]
    optimizer = torch.optim.Adam(dense, lr=DENSE_LEARNING_RATE)

    step, first_epoch = 0, 0
    if arguments.resume:
        extra = tpuemb.checkpoint.load(arguments.checkpoint, model)
        optimizer.load_state_dict(extra["optimizer"])
        step, first_epoch = extra["step"], extra["epoch"]
    baseline = bias_only_auc(data) if rank == 0 else 0.0
    if rank == 0:
        print(f"{len(data.train):,} ratings to train, {len(data.test):,} to test, {world} processes")
        print(f"bias-only baseline: test AUC {baseline:.4f}", flush=True)

    for epoch in range(first_epoch, arguments.epochs):
        total, start = torch.zeros(()), time.perf_counter()
        batches = shuffled(data.train, epoch).split(batch)
        bar = tqdm(batches, desc=f"epoch {epoch + 1}", disable=rank != 0, leave=False, mininterval=0.5)
        for index in bar:
            own = index[rank::world]
            step += 1
            schedule = min(step / arguments.warmup_steps, (arguments.warmup_steps / step) ** 0.5)
            model.module.embedding.set_learning_rates([arguments.learning_rate * schedule])
            optimizer.param_groups[0]["lr"] = DENSE_LEARNING_RATE * schedule
            logit = model(data.dense[own], features(data, own))
            # Gradients of a row are summed over samples and ranks, as on TPU, so the loss is a sum too. Dense gradients
            # are averaged over ranks instead, which leaves the steps of Adam as they are.
            loss = binary_cross_entropy_with_logits(logit, data.label[own], reduction="sum")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
            bar.set_postfix(loss=f"{loss.item() / max(len(own), 1):.4f}", refresh=False)
        seconds = time.perf_counter() - start
        dist.all_reduce(total)
        score = evaluate(model, data, batch)
        if rank == 0:
            print(
                f"epoch {epoch + 1}: loss {float(total) / len(data.train):.4f}, test AUC {score:.4f} "
                f"(bias-only {baseline:.4f}), {len(data.train) / seconds:,.0f} examples/s",
                flush=True,
            )
        if arguments.checkpoint is not None:
            extra = {"optimizer": optimizer.state_dict(), "step": step, "epoch": epoch + 1}
            tpuemb.checkpoint.save(arguments.checkpoint, model, step=step, extra=extra)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
