"""Trains a DLRM on MovieLens-100k: torchrun --nproc_per_node=2 scripts/train_movielens.py

The embedding layer comes from a TPUEmbeddingConfiguration alone (configs/movielens.pbtxt). TorchRec's
DistributedModelParallel shards it over the processes and keeps copies of the dense network in step.
Task: will a user rate a film 4 or better? The last fifth of the ratings, by time, is the test.
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
    """MovieLens-100k; the first `train` of `[ratings]` are for training."""

    user: Tensor
    item: Tensor
    label: Tensor
    train: int
    age: Tensor  # by user
    gender: Tensor
    occupation: Tensor
    genre_splits: Tensor  # by item: row splits into `genre_ids`
    genre_ids: Tensor
    dense: Tensor  # [ratings, 2]: release year and popularity of the item


def read_movielens(folder: Path) -> Ratings:
    """Reads the atomic files `ml-100k.{inter,user,item}`."""

    def rows(name: str) -> list[list[str]]:
        lines = (folder / f"ml-100k.{name}").read_text().splitlines()
        return [line.split("\t") for line in lines[1:]]

    ratings = np.array([[int(value) for value in row] for row in rows("inter")])
    ratings = ratings[np.argsort(ratings[:, 3], kind="stable")]
    user, item = torch.from_numpy(ratings[:, 0].copy()), torch.from_numpy(ratings[:, 1].copy())
    train = int(0.8 * len(ratings))
    users, items = int(user.max()) + 1, int(item.max()) + 1
    age, gender, occupation = (torch.zeros(users, dtype=torch.int64) for _ in range(3))
    for number, years, sex, job, _ in rows("user"):
        age[int(number)], gender[int(number)], occupation[int(number)] = (
            int(years),
            1 + (sex == "F"),
            OCCUPATIONS.index(job) + 1,
        )
    genres: list[list[int]] = [[] for _ in range(items)]
    year = torch.full((items,), 1995.0)
    for number, _, released, kinds in rows("item"):
        genres[int(number)] = [GENRES.index(kind) for kind in kinds.split()]
        year[int(number)] = float(released) if released.isdigit() else 1995.0
    # Of the training part only.
    popularity = torch.bincount(item[:train], minlength=items).log1p()
    return Ratings(
        user=user,
        item=item,
        label=torch.from_numpy((ratings[:, 2] >= 4).astype(np.float32)),
        train=train,
        age=age,
        gender=gender,
        occupation=occupation,
        genre_splits=torch.tensor([0, *np.cumsum([len(kinds) for kinds in genres])]),
        genre_ids=torch.tensor([kind for kinds in genres for kind in kinds]),
        dense=torch.stack([(year[item] - 1990) / 10, popularity[item] / 6], dim=1),
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
    mean_rank = counts.cumsum(0) - (counts - 1) / 2
    positive = label > 0.5
    n_pos, n_neg = int(positive.sum()), int((~positive).sum())
    return float((mean_rank[inverse][positive].double().sum() - n_pos * (n_pos + 1) / 2) / (n_pos * n_neg))


def bias_only_auc(data: Ratings, epochs: int) -> float:
    """Test AUC of logit = b + b_user + b_item, trained on the same ratings: what the DLRM must beat."""
    torch.manual_seed(0)
    user, item = nn.Embedding(len(data.age), 1), nn.Embedding(int(data.item.max()) + 1, 1)
    bias = nn.Parameter(torch.zeros(1))
    for table in (user, item):
        nn.init.zeros_(table.weight)
    optimizer = torch.optim.Adagrad([*user.parameters(), *item.parameters(), bias], lr=0.1)

    def logit(index: Tensor) -> Tensor:
        return (bias + user(data.user[index]) + item(data.item[index])).squeeze(1)

    for _ in range(epochs):
        for index in torch.randperm(data.train).split(1024):
            optimizer.zero_grad()
            binary_cross_entropy_with_logits(logit(index), data.label[index]).backward()
            optimizer.step()
    test = torch.arange(data.train, len(data.label))
    with torch.no_grad():
        return auc(logit(test), data.label[test])


def gathered(values: Tensor) -> Tensor:
    """The concatenation of all ranks' values."""
    parts: list[Tensor | None] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, values)
    return torch.cat([part for part in parts if part is not None])


@torch.no_grad()
def evaluate(model: nn.Module, data: Ratings, batch: int) -> float:
    """Test AUC; every rank scores a part of each batch."""
    model.eval()
    scores, labels = [], []
    for index in torch.arange(data.train, len(data.label)).split(batch):
        own = index[dist.get_rank() :: dist.get_world_size()]
        scores.append(model(data.dense[own], features(data, own)))
        labels.append(data.label[own])
    model.train()
    return auc(gathered(torch.cat(scores)), gathered(torch.cat(labels)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    root = Path(__file__).resolve().parent.parent
    parser.add_argument("--config", type=Path, default=root / "configs" / "movielens.pbtxt")
    parser.add_argument("--data", type=Path, help="folder with ml-100k.inter, .user and .item")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--warmup-steps", type=int, default=100)
    parser.add_argument("--learning-rate", type=float, default=0.05, help="of tag 0, after the warm-up")
    parser.add_argument("--scale", type=float, default=0.04)
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
    batch = config.features[0].input_shape[0] * world

    torch.manual_seed(0)
    embedding = tpuemb.TPUEmbedding(config, combiners={"genre": "mean"})
    # Initial values are not part of the config. Small ones, so that users never seen in training add no noise.
    initial = embedding.retrieve_parameters()
    embedding.load_parameters({name: {"parameters": arguments.scale * state["parameters"]} for name, state in initial.items()})
    model = DistributedModelParallel(
        tpuemb.models.DLRM(embedding, dense_features=data.dense.shape[1]),
        device=torch.device("cpu"),
        sharders=tpuemb.sharders(),
    )
    # The tables' optimizers are part of the backward pass; this one has the dense parameters only.
    dense_parameters = [p for name, p in model.named_parameters() if "embedding" not in name]
    optimizer = torch.optim.Adam(dense_parameters, lr=0.001)

    step, first_epoch = 0, 0
    if arguments.resume:
        extra = tpuemb.checkpoint.load(arguments.checkpoint, model)
        optimizer.load_state_dict(extra["optimizer"])
        step, first_epoch = extra["step"], extra["epoch"]
    if rank == 0:
        baseline = bias_only_auc(data, max(arguments.epochs, 5))
        print(f"{data.train} ratings to train, {len(data.label) - data.train} to test, {world} processes")
        print(f"bias-only baseline: test AUC {baseline:.4f}")

    for epoch in range(first_epoch, arguments.epochs):
        order = torch.randperm(data.train, generator=torch.Generator().manual_seed(epoch))
        total, start = torch.zeros(()), time.perf_counter()
        bar = tqdm(order.split(batch), desc=f"epoch {epoch + 1}", disable=rank != 0, leave=False)
        for index in bar:
            own = index[rank::world]
            step += 1
            model.module.embedding.set_learning_rates(
                [arguments.learning_rate * min(1.0, step / arguments.warmup_steps)]
            )
            # Table gradients are summed over the ranks, so the loss is this rank's share of the batch's mean.
            # DistributedDataParallel averages dense gradients instead: half the size, which Adam does not notice.
            logit = model(data.dense[own], features(data, own))
            loss = binary_cross_entropy_with_logits(logit, data.label[own], reduction="sum") / len(index)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach() * len(index)
            bar.set_postfix(loss=f"{loss.item() * world:.4f}")
        seconds = time.perf_counter() - start
        dist.all_reduce(total)
        score = evaluate(model, data, batch)
        if rank == 0:
            print(
                f"epoch {epoch + 1}: loss {float(total) / data.train:.4f}, test AUC {score:.4f} "
                f"(bias-only {baseline:.4f}), {data.train / seconds:,.0f} examples/s"
            )
        if arguments.checkpoint is not None:
            extra = {"optimizer": optimizer.state_dict(), "step": step, "epoch": epoch + 1}
            tpuemb.checkpoint.save(arguments.checkpoint, model, step=step, extra=extra)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
