"""Batches prepared ahead: in data-loading workers, pickled, sorted; what a layer takes and what it refuses."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

import tpuemb_torch as tpuemb
from tests.distributed.cases import COMBINERS, config_text, gradient, make_batch
from tpuemb_torch.preprocessing import SortedIds, sort_ids

RATES = [0.2, 0.3]


def layer(optimizer: str = "adagrad", combiners: dict[str, str] | None = None) -> tpuemb.TPUEmbedding:
    emb = tpuemb.TPUEmbedding(config_text(optimizer), COMBINERS if combiners is None else combiners)
    emb.set_learning_rates(RATES)
    return emb


class Batches(Dataset[Any]):
    """Prepared in the worker."""

    def __init__(self, prepare: Any) -> None:
        self.prepare = prepare

    def __len__(self) -> int:
        return 3

    def __getitem__(self, step: int) -> Any:
        return self.prepare(make_batch(6, step), deduplicate=True)


def step(emb: tpuemb.TPUEmbedding, features: Any, seed: int) -> list[torch.Tensor]:
    emb.enqueue(features)
    received = emb.recv_activations()
    names = [f.name for f in emb.config.features]
    emb.send_gradients([gradient(n, a.shape, seed) for n, a in zip(names, received, strict=True)], RATES)
    return received


def numbers(emb: tpuemb.TPUEmbedding) -> list[torch.Tensor]:
    return [t for slots in emb.retrieve_parameters().values() for t in slots.values()]


def test_workers_prepare_and_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    emb, other = layer(), layer()
    sorts: list[int] = []
    loader = DataLoader(Batches(emb.preparation), batch_size=None, num_workers=1, multiprocessing_context="forkserver")
    ready = list(loader)
    counted, sort = (lambda *args, **options: sorts.append(1) or sort(*args, **options)), torch.sort
    monkeypatch.setattr(torch, "sort", counted)
    found = [step(emb, batch, seed) for seed, batch in enumerate(ready)]
    assert not sorts
    wanted = [step(other, make_batch(6, seed), seed) for seed in range(3)]
    assert sorts
    for a, b in zip(found, wanted, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(numbers(emb), numbers(other), strict=True))


def test_recv_and_send_reuse_the_deduplication(monkeypatch: pytest.MonkeyPatch) -> None:
    emb = layer()
    sorts: list[int] = []
    counted, sort = (lambda *args, **options: sorts.append(1) or sort(*args, **options)), torch.sort
    monkeypatch.setattr(torch, "sort", counted)
    emb.enqueue(make_batch(6, 0))
    data = emb.recv_deduplication_data()
    assert len(sorts) == 1
    again = emb.recv_deduplication_data()
    assert again.batch == data.batch
    received = emb.recv_activations(data)
    emb.send_gradients([torch.ones_like(a) for a in received], RATES, data)
    assert len(sorts) == 1


def test_the_module_takes_them_too() -> None:
    emb, other = layer(), layer()
    batch = pickle.loads(pickle.dumps(emb.preparation(make_batch(6, 1), deduplicate=True))).to("cpu")
    out, wanted = emb(batch), other(make_batch(6, 1))
    assert all(torch.equal(out[name], wanted[name]) for name in wanted)
    sum(v.cos().sum() for v in out.values()).backward()
    sum(v.cos().sum() for v in wanted.values()).backward()
    assert all(torch.equal(a, b) for a, b in zip(numbers(emb), numbers(other), strict=True))
    assert {t.device.type for t in (batch.to("meta").input.ids, batch.to("meta").input.ordered.rows)} == {"meta"}


def test_another_layer_refuses_them() -> None:
    batch = layer().preparation(make_batch(6, 1))
    for other in (layer(combiners={"user": "sum"}), layer("sgd")):
        before = numbers(other)
        with pytest.raises(tpuemb.InputError, match="prepared for another config or other combiners"):
            other(batch)
        with pytest.raises(tpuemb.InputError, match="prepared for another config"):
            other.enqueue(batch)
        with pytest.raises(RuntimeError, match="no batch to receive"):
            other.recv_activations()
        assert all(torch.equal(a, b) for a, b in zip(before, numbers(other), strict=True))


def test_masks() -> None:
    emb = layer()
    features = make_batch(6, 4)
    masks = emb.masks(features)
    assert list(masks) == ["viewer", "friends", "history", "grid", "flag"]
    lengths = features["history"].row_splits.diff()
    assert torch.equal(masks["history"], torch.arange(3) < lengths[:, None])
    assert torch.equal(masks["friends"], features["friends"].row_splits.diff() > 0)
    assert masks["viewer"].all() and masks["grid"].all() and masks["grid"].shape == (6, 2)
    out = emb(features)["history"]
    assert not out[~masks["history"]].any()
    assert out[masks["history"]].abs().sum(1).all()
    # A sparse sequence with a hole, and an id that the policy drops.
    emb = tpuemb.TPUEmbedding(config_text("sgd"), COMBINERS, id_policy="drop")
    holes = {**features, "history": tpuemb.Sparse(torch.tensor([[0, 0], [0, 2], [3, 1]]), torch.tensor([1, 2, 7]))}
    assert emb.masks(emb.preparation(holes))["history"].nonzero().tolist() == [[0, 0], [0, 2]]


@given(
    st.lists(st.integers(0, 30), max_size=40),
    st.lists(st.integers(1, 30), unique=True, max_size=3),
)
@settings(deadline=None)
def test_sorted_ids_split_by_runs(ids: list[int], cuts: list[int]) -> None:
    first_rows = [0, *sorted(cuts)]
    run = [max(r for r, first in enumerate(first_rows) if first <= row) for row in ids]
    lookup = torch.tensor([row for _, row in sorted(zip(run, ids, strict=True), key=lambda p: p[0])], dtype=torch.int64)
    whole = sort_ids(lookup, 31)
    assert torch.equal(whole.rows[whole.inverse()], lookup)
    begin = 0
    for number, (first, part) in enumerate(zip(first_rows, whole.split(first_rows), strict=True)):
        own = lookup[begin : begin + run.count(number)] - first
        wanted = sort_ids(own, 31)
        for name in SortedIds.__dataclass_fields__:
            assert torch.equal(getattr(part, name), getattr(wanted, name)), name
        begin += run.count(number)


def test_fast_paths_equal_the_general_one() -> None:
    """One id each, and KeyedJaggedTensors, need no look at each feature; other inputs do."""
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    text = """mode: TRAINING num_hosts: 1 num_tensor_cores: 1
    table_descriptor { name: "a" vocabulary_size: 9 dimension: 3 optimization_parameters {
        learning_rate { constant: 1 } stochastic_gradient_descent {} } }
    table_descriptor { name: "b" vocabulary_size: 7 dimension: 2 optimization_parameters {
        learning_rate { constant: 1 } adagrad {} } }
    feature_descriptor { name: "x" table_id: 0 input_shape: 4 }
    feature_descriptor { name: "y" table_id: 1 input_shape: 4 }
    feature_descriptor { name: "z" table_id: 0 input_shape: 4 }
    """
    emb = tpuemb.TPUEmbedding(text, ["mean", "sqrtn"])
    rng = np.random.default_rng(0)
    ids = {name: torch.tensor(rng.integers(0, 7, 5)) for name in "xyz"}
    splits = torch.arange(6)
    wanted = emb({name: tpuemb.Ragged(splits, values) for name, values in ids.items()})
    for form in (ids, list(ids.values()), tuple(ids.values()), {k: ids[k].int() for k in "zyx"}):
        assert all(torch.equal(emb(form)[name], wanted[name]) for name in wanted)
    # Another form for one of them takes the way that looks at each feature.
    mixed = {**ids, "y": tpuemb.Ragged(splits, ids["y"])}
    assert all(torch.equal(emb(mixed)[name], wanted[name]) for name in wanted)
    lengths = {name: torch.tensor(rng.integers(0, 4, 5)) for name in "xyz"}
    bags = {name: torch.tensor(rng.integers(0, 7, int(n.sum()))) for name, n in lengths.items()}
    weights = {name: torch.rand(values.numel()) for name, values in bags.items()}
    wanted = emb({n: tpuemb.Ragged(torch.cat([splits[:1], lengths[n].cumsum(0)]), bags[n], weights[n]) for n in "xyz"})
    kjt = KeyedJaggedTensor(
        keys=list("zxy"),
        values=torch.cat([bags[n] for n in "zxy"]),
        weights=torch.cat([weights[n] for n in "zxy"]),
        lengths=torch.cat([lengths[n] for n in "zxy"]),
    )
    assert all(torch.equal(emb(kjt)[name], wanted[name]) for name in wanted)
    parts = {n: tpuemb.Ragged(torch.cat([splits[:1], lengths[n].cumsum(0)]), bags[n], weights[n]) for n in "xyz"}
    double = tpuemb.Ragged(parts["y"].row_splits.int(), parts["y"].ids.int(), parts["y"].weights.double())
    assert all(torch.equal(emb({**parts, "y": double})[name], wanted[name]) for name in wanted)
    for change, message in (
        ({"row_splits": parts["y"].row_splits + 1}, r"feature 'y': row_splits\[0\] is 1"),
        ({"row_splits": parts["y"].row_splits.flip(0)}, "feature 'y': row_splits"),
        ({"row_splits": parts["y"].row_splits[:3]}, "feature 'y': row_splits ends at|has 2 rows"),
        ({"ids": parts["y"].ids[1:]}, "feature 'y': row_splits ends at"),
        ({"weights": parts["y"].weights[1:]}, "feature 'y': .* weights for"),
        ({"weights": parts["y"].weights * float("nan")}, "feature 'y': weight 0 is nan"),
        ({"ids": parts["y"].ids + 7}, "feature 'y': id"),
    ):
        with pytest.raises(tpuemb.InputError, match=message):
            emb({**parts, "y": dataclasses.replace(parts["y"], **change)})
    bad = {**ids, "y": torch.tensor([0, 1, 7, 2, 3])}
    with pytest.raises(tpuemb.InputError, match="feature 'y': id 7 at position 2 is outside table 'b'"):
        emb(bad)
    for broken, message in (
        ({**ids, "y": ids["y"][:3]}, "has 3 samples, but feature"),
        ({**ids, "y": ids["y"].float()}, "must be int32 or int64"),
        ({**ids, "w": ids["y"]}, "unknown features"),
        ({"x": ids["x"], "y": ids["y"]}, "missing features"),
    ):
        with pytest.raises(tpuemb.InputError, match=message):
            emb(broken)
