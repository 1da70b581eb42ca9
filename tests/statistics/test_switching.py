"""On, off, from zero: and what statistics must not change."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import tpuemb_torch as tpuemb
from tests.distributed.cases import COMBINERS, RATES, config_text, make_batch, to_numpy, train
from tests.statistics.plain import config_text as plain_config
from tests.statistics.plain import plain_stats, ragged


def layer(**options: Any) -> tpuemb.TPUEmbedding:
    return tpuemb.TPUEmbedding(tpuemb.load_config(plain_config({"t": 10, "u": 4}, **options)), kernel="eager")


def batch(*bags: list[int]) -> dict[str, Any]:
    count = len(bags)
    return {"t": ragged(bags), "u": torch.zeros(count, dtype=torch.int64), "more": torch.full((count, 2), 9)}


def ids(embedding: tpuemb.TPUEmbedding) -> tuple[int, int]:
    return embedding.stats().tables[0].batches, embedding.stats().tables[0].ids


def test_off_by_default() -> None:
    embedding = layer()
    embedding(batch([1]))
    with pytest.raises(RuntimeError, match=r"call collect_stats\(\) before"):
        embedding.stats()
    with pytest.raises(RuntimeError, match=r"call collect_stats\(\) before"):
        embedding.stats(all_ranks=True)


def test_nothing_looked_up_yet() -> None:
    embedding = layer()
    embedding.collect_stats()
    assert embedding.stats().tables == (plain_stats("t", 10, []), plain_stats("u", 4, []))
    assert embedding.stats(all_ranks=True).tables == embedding.stats().tables
    assert embedding.stats().pooling_factors() == {}
    assert embedding.stats().table("t").pooling_factor == embedding.stats().table("t").mean_distinct_ids == 0.0


def test_stop_goes_on_and_reset() -> None:
    embedding = layer()
    embedding.collect_stats()
    embedding(batch([1, 2]))
    assert ids(embedding) == (1, 4)
    embedding.collect_stats(False)
    embedding(batch([1, 2]))
    assert ids(embedding) == (1, 4)
    embedding.collect_stats(top_k=1)  # goes on, with another number of hot ids
    embedding(batch([1, 2, 3]))
    assert ids(embedding) == (2, 9)
    assert embedding.stats().table("t").hot_ids == ((9, 4),)
    before = embedding.stats(reset=True)
    assert before.table("t").ids == 9
    assert embedding.stats().tables == (plain_stats("t", 10, []), plain_stats("u", 4, []))
    embedding(batch([3]))
    assert embedding.stats().table("t") == plain_stats("t", 10, [[[3], [9], [9]]], top_k=1)


def test_another_number_of_shards_starts_from_zero() -> None:
    embedding = layer()
    embedding.collect_stats()
    embedding(batch([1, 2]))
    embedding.collect_stats(num_shards=1)  # as before: one process
    assert ids(embedding) == (1, 4)
    embedding.collect_stats(num_shards=3)
    assert ids(embedding) == (0, 0)
    assert embedding.stats().num_shards == 3


@pytest.mark.parametrize(("option", "value"), [("top_k", -1), ("num_shards", 0), ("num_shards", -2)])
def test_wrong_options(option: str, value: int) -> None:
    embedding = layer()
    with pytest.raises(ValueError, match=f"{option}={value}"):
        embedding.collect_stats(**{option: value})  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="collect_stats"):
        embedding.stats()


def test_a_profile_data_directory_switches_on() -> None:
    embedding = layer(directory="/profiles")
    embedding(batch([1], [2]))
    assert embedding.stats().table("t").ids == 6
    embedding.collect_stats(False)
    embedding(batch([1], [2]))
    assert embedding.stats().table("t").ids == 6


def test_a_malformed_batch_does_not_count() -> None:
    embedding = layer()
    embedding.collect_stats()
    with pytest.raises(tpuemb.InputError, match="id 10"):
        embedding(batch([10]))
    assert ids(embedding) == (0, 0)


def test_dropped_ids_do_not_count_and_clamped_ones_do() -> None:
    config = tpuemb.load_config(plain_config({"t": 10, "u": 4}))
    for policy, expected in (("drop", [[3], [], [9], [9], [9], [9]]), ("clamp", [[3, 9], [0], [9], [9], [9], [9]])):
        embedding = tpuemb.TPUEmbedding(config, kernel="eager", id_policy=policy)
        embedding.collect_stats()
        embedding(batch([3, 70], [-1]))
        assert embedding.stats().table("t") == plain_stats("t", 10, [expected])


def test_what_pads_a_batch_is_no_bag() -> None:
    """Features of different sizes share a stride: the shorter one is padded with empty samples."""
    text = plain_config({"t": 10, "u": 4}) + 'feature_descriptor { name: "long" table_id: 1 input_shape: 8 }'
    embedding = tpuemb.TPUEmbedding(tpuemb.load_config(text), kernel="eager")
    embedding.collect_stats()
    features = {**batch([1], [], [2], [3, 4]), "long": torch.arange(8) % 4}
    embedding(features)
    table = embedding.stats().table("t")
    assert (table.bags, table.empty_bags, table.ids) == (12, 1, 12)
    assert embedding.stats().table("u").bags == 12
    assert embedding.stats().pooling_factors() == {"t": 1.0, "u": 1.0}


def test_under_inference_mode() -> None:
    embedding = layer()
    embedding.collect_stats()
    with torch.inference_mode():
        embedding(batch([1]))
    embedding(batch([1]))
    with torch.inference_mode():
        embedding(batch([2]))
        inside = embedding.stats()
    assert inside == embedding.stats()
    assert inside.table("t").hot_ids == ((9, 6), (1, 2), (2, 1))


@pytest.mark.parametrize("mode", ["training", "inference", "backward_pass_only"])
def test_each_batch_of_the_step_protocol_counts_once(mode: str) -> None:
    embedding = layer()
    embedding.collect_stats()
    embedding.enqueue(batch([1], [2]), mode)
    assert ids(embedding) == (0, 0)
    if mode != "backward_pass_only":
        embedding.recv_deduplication_data()
        embedding.recv_activations()
    if mode != "inference":
        embedding.send_gradients([None, None, None])
    assert ids(embedding) == (1, 6)


def test_a_copy_counts_by_itself() -> None:
    embedding = layer()
    embedding.collect_stats(top_k=3, num_shards=2)
    embedding(batch([1]))
    for duplicate in (copy.deepcopy(embedding), pickle.loads(pickle.dumps(embedding))):
        assert duplicate.stats() == embedding.stats()
        duplicate(batch([1]))
        assert (ids(duplicate), ids(embedding)) == ((2, 6), (1, 3))


def test_the_state_dict_is_the_same() -> None:
    embedding = layer()
    keys = list(embedding.state_dict())
    embedding.collect_stats()
    embedding(batch([1]))
    assert list(embedding.state_dict()) == keys


@pytest.mark.parametrize("optimizer", ["adagrad", "adam_non_lazy"])
def test_the_numbers_of_training_are_the_same(optimizer: str) -> None:
    """Bit by bit, although the step takes over the ids that the statistics have sorted."""
    results = []
    for on in (False, True):
        embedding = tpuemb.TPUEmbedding(tpuemb.load_config(config_text(optimizer)), COMBINERS, kernel="eager")
        embedding.collect_stats(on)
        sizes = (6, 0, 9)
        batches = [make_batch(size, seed) for seed, size in enumerate(sizes)]
        seen = train(embedding, batches, [[size * 100 + seed] for seed, size in enumerate(sizes)])
        results.append((seen, to_numpy(embedding.retrieve_parameters())))
        if on:
            assert embedding.stats().table("user").batches == len(RATES)
    (seen_off, state_off), (seen_on, state_on) = results
    for off, on in zip(seen_off, seen_on, strict=True):
        assert {name: value.tobytes() for name, value in off.items()} == {n: v.tobytes() for n, v in on.items()}
    for table, slots in state_off.items():
        assert {slot: value.tobytes() for slot, value in slots.items()} == {
            slot: value.tobytes() for slot, value in state_on[table].items()
        }


def test_a_step_takes_over_the_sorted_ids() -> None:
    embedding = layer()
    features = batch([3, 1, 3], [2])
    expected = embedding.preparation(features, deduplicate=True).input.ordered
    assert expected is not None
    prepared = embedding.preparation(features).input
    assert embedding.collection.start(prepared).ordered is None
    embedding.collect_stats()
    ordered = embedding.collection.start(prepared).ordered
    for name in ("rows", "starts", "order"):
        assert torch.equal(getattr(ordered, name), getattr(expected, name))
    # A batch that comes sorted stays as it is.
    ahead = embedding.preparation(features, deduplicate=True).input
    assert embedding.collection.start(ahead).ordered is ahead.ordered
