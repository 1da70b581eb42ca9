"""DIV and MOD arithmetic, and where blocks of rows meet."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from tpuemb_torch.sharding.exchange import overlap
from tpuemb_torch.sharding.placement import RowPlacement, padded_rows, shard_rows


def test_every_row_is_in_one_shard_and_sizes_are_balanced() -> None:
    for strategy in ("div", "mod"):
        for vocabulary in range(1, 41):
            for shards in range(1, vocabulary + 3):
                parts = [shard_rows(vocabulary, shards, s, strategy) for s in range(shards)]
                assert sorted(row for part in parts for row in part) == list(range(vocabulary))
                quotient, remainder = divmod(vocabulary, shards)
                assert [len(part) for part in parts] == [quotient + (s < remainder) for s in range(shards)]


def test_known_shards() -> None:
    # V=10, n=4: DIV blocks [0-2], [3-5], [6-7], [8-9]; MOD every fourth row.
    assert [list(shard_rows(10, 4, s, "div")) for s in range(4)] == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]
    assert [list(shard_rows(10, 4, s, "mod")) for s in range(4)] == [[0, 4, 8], [1, 5, 9], [2, 6], [3, 7]]


def test_placed_ids_land_in_their_shard_at_their_place() -> None:
    for strategy in ("div", "mod"):
        for vocabulary in range(1, 41):
            for shards in range(1, vocabulary + 3):
                ids = torch.arange(vocabulary)
                placement = RowPlacement([vocabulary, vocabulary], [shards, 1], strategy)
                both = placement.place(torch.cat([ids, ids]), torch.tensor([vocabulary, vocabulary]))
                placed, kept = both[:vocabulary], both[vocabulary:]
                assert torch.equal(kept, ids)  # the table of the second key is not cut by rows
                block = padded_rows(vocabulary, shards) // shards
                for row, where in enumerate(placed.tolist()):
                    shard, local = divmod(where, block)
                    assert shard_rows(vocabulary, shards, shard, strategy)[local] == row


def test_placement_of_very_large_tables() -> None:
    vocabulary = 2**40 + 3
    ids = torch.tensor([0, 1, 2**39, vocabulary - 1])
    for strategy in ("div", "mod"):
        placed = RowPlacement([vocabulary], [7], strategy).place(ids, torch.tensor([4]))
        block = padded_rows(vocabulary, 7) // 7
        for row, where in zip(ids.tolist(), placed.tolist(), strict=True):
            shard, local = divmod(where, block)
            assert shard_rows(vocabulary, 7, shard, strategy)[local] == row


@given(
    a=st.tuples(st.integers(0, 20), st.integers(0, 40), st.integers(1, 6)),
    b=st.tuples(st.integers(0, 20), st.integers(0, 40), st.integers(1, 6)),
)
def test_overlap_of_ranges(a: tuple[int, int, int], b: tuple[int, int, int]) -> None:
    first, second = range(*a), range(*b)
    common = sorted(set(first) & set(second))
    found = overlap(first, second)
    if found is None:
        assert not common
    else:
        assert list(first[found[0]]) == common
        assert list(second[found[1]]) == common
