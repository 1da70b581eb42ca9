"""Statistics of a layer against loops over its input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import tpuemb_torch as tpuemb
from tests.statistics.plain import config_text, plain_stats, ragged

STRATEGIES = {"DIV_DEFAULT": "div", "MOD": "mod"}


@st.composite
def jobs(draw: st.DrawFn) -> dict[str, Any]:
    """Tables and some batches: bags by table, and the steps of the first table's sequence feature."""
    rows = {f"t{index}": draw(st.integers(1, 12)) for index in range(draw(st.integers(1, 4)))}
    batches = []
    for _ in range(draw(st.integers(0, 4))):
        size = draw(st.integers(0, 5))
        bags = {
            name: draw(st.lists(st.lists(st.integers(0, count - 1), max_size=5), min_size=size, max_size=size))
            for name, count in rows.items()
        }
        step = st.lists(st.integers(0, rows["t0"] - 1), max_size=1)
        steps = draw(st.lists(st.tuples(step, step), min_size=size, max_size=size))
        batches.append((bags, [list(pair) for pair in steps]))
    return {
        "rows": rows,
        "batches": batches,
        "strategy": draw(st.sampled_from(sorted(STRATEGIES))),
        "num_shards": draw(st.integers(1, 5)),
        "top_k": draw(st.integers(0, 6)),
    }


def sequence(steps: list[list[list[int]]]) -> tpuemb.Sparse:
    """Steps with at most one id each, as a sparse input of two axes."""
    places = [
        (sample, place, row) for sample, pair in enumerate(steps) for place, step in enumerate(pair) for row in step
    ]
    indices = torch.tensor([place[:2] for place in places], dtype=torch.int64).reshape(-1, 2)
    return tpuemb.Sparse(indices, torch.tensor([row for _, _, row in places], dtype=torch.int64), batch_size=len(steps))


@settings(deadline=None, max_examples=60)
@given(jobs(), st.booleans())
def test_every_number(job: dict[str, Any], ahead: bool) -> None:
    layer = tpuemb.TPUEmbedding(tpuemb.load_config(config_text(job["rows"], job["strategy"])), kernel="eager")
    layer.collect_stats(top_k=job["top_k"], num_shards=job["num_shards"])
    of_table: dict[str, list[list[list[int]]]] = {name: [] for name in job["rows"]}
    for bags, steps in job["batches"]:
        features: Any = {**{name: ragged(value) for name, value in bags.items()}, "more": sequence(steps)}
        layer(layer.preparation(features, deduplicate=True) if ahead else features)
        for name, value in bags.items():
            own_steps = [step for pair in steps for step in pair] if name == "t0" else []
            of_table[name].append(value + own_steps)
    options = (job["num_shards"], STRATEGIES[job["strategy"]], job["top_k"])
    stats = layer.stats()
    assert (stats.num_shards, stats.sharding_strategy, stats.world_size, stats.rank) == (*options[:2], 1, 0)
    expected = tuple(plain_stats(name, count, of_table[name], *options) for name, count in job["rows"].items())
    assert stats.tables == expected
    together = layer.stats(all_ranks=True)
    assert (together.tables, together.rank, together.ranks) == (expected, None, (stats,))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("num_shards", [1, 2, 3, 7, 16, 20])
def test_each_id_lies_in_the_shard_that_holds_its_row(strategy: str, num_shards: int) -> None:
    """One id after the other: the numbers of a batch of all rows but one show that row's shard."""
    rows = 16
    layer = tpuemb.TPUEmbedding(tpuemb.load_config(config_text({"t": rows}, strategy)), kernel="eager")
    for left_out in range(rows):
        layer.collect_stats(num_shards=num_shards)
        kept = [row for row in range(rows) if row != left_out]
        layer({"t": ragged([kept]), "more": sequence([[[], []]])})
        expected = plain_stats("t", rows, [[kept, [], []]], num_shards, STRATEGIES[strategy])
        assert layer.stats(reset=True).tables == (expected,)


def test_keyed_input_of_the_collection() -> None:
    """A KeyedJaggedTensor has a key per step, and every sample of every key is a bag."""
    rows = {"a": 6, "b": 9, "c": 5}
    collection = tpuemb.TPUEmbeddingBagCollection(tpuemb.load_config(config_text(rows)), kernel="eager")
    collection.collect_stats(num_shards=2)
    bags = {"a": [[5, 5], []], "more#0": [[1], [2]], "more#1": [[], [5]], "b": [[8, 0, 8], [1]], "c": [[], []]}
    kjt = KeyedJaggedTensor(
        keys=list(bags),
        values=torch.tensor([row for key in bags.values() for bag in key for row in bag]),
        lengths=torch.tensor([len(bag) for key in bags.values() for bag in key]),
    )
    collection(kjt)
    collection(kjt)
    per_table = {"a": bags["a"] + bags["more#0"] + bags["more#1"], "b": bags["b"], "c": bags["c"]}
    expected = tuple(plain_stats(name, rows[name], [per_table[name]] * 2, 2) for name in rows)
    assert collection.stats().tables == expected
    assert collection.stats().table("a").hot_ids == ((5, 6), (1, 2), (2, 2))


def test_many_ids() -> None:
    """A skewed batch larger than any chunk of the operations below."""
    generator = torch.Generator().manual_seed(1)
    rows = {"a": 5000, "b": 300}
    draws = {name: (torch.rand(400, 10, generator=generator) ** 4 * n).long() for name, n in rows.items()}
    layer = tpuemb.TPUEmbedding(tpuemb.load_config(config_text(rows, "MOD", batch=400)), kernel="eager")
    layer.collect_stats(num_shards=8, top_k=100)
    layer({**draws, "more": torch.full((400, 2), 4999)})
    bags = {name: values.tolist() for name, values in draws.items()}
    bags["a"] += [[4999]] * 800
    assert layer.stats().tables == tuple(plain_stats(n, rows[n], [bags[n]], 8, "mod", 100) for n in rows)
