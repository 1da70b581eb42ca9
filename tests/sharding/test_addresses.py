"""Addresses of rows: one for each row, by dimension, rank, group and row; placed ids find theirs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tpuemb_torch.sharding.addresses import RowAddresses, TableShard
from tpuemb_torch.sharding.placement import RowPlacement, shard_rows

RANKS = 4


@settings(max_examples=60, deadline=None)
@given(
    tables=st.lists(
        st.tuples(st.integers(1, 12), st.sampled_from([2, 8]), st.sampled_from(["all", "one", "node"]), st.booleans()),
        min_size=1,
        max_size=6,
    ),
    strategy=st.sampled_from(["div", "mod"]),
    seed=st.integers(0, 1000),
)
def test_every_row_has_its_own_address_in_its_owners_buffer(
    tables: list[tuple[int, int, str, bool]], strategy: str, seed: int
) -> None:
    """Tables of (rows, columns, ranks that hold it, whether it is in the second kernel group of its dimension)."""
    rng = np.random.default_rng(seed)
    shards: list[TableShard] = []
    filled: dict[tuple[int, int], int] = {}
    expected: dict[tuple[int, int], tuple[int, int, int, int]] = {}
    counts = []
    for number, (rows, columns, where, second) in enumerate(tables):
        node = 2 * int(rng.integers(2))
        ranks = {"all": range(RANKS), "one": [int(rng.integers(RANKS))], "node": range(node, node + 2)}[where]
        counts.append(len(ranks))
        for shard, rank in enumerate(ranks):
            group = 2 * (columns == 8) + second
            own = shard_rows(rows, len(ranks), shard, strategy)  # type: ignore[arg-type]
            first = filled.get((rank, group), 0)
            filled[rank, group] = first + len(own)
            shards.append(TableShard(f"t{number}", shard, rank, group, columns, first, len(own)))
            for local, row in enumerate(own):
                expected[number, row] = (columns, rank, group, first + local)
    order = sorted(range(len(tables)), key=lambda number: tables[number][1])
    addresses = RowAddresses(shards, [f"t{number}" for number in order])
    placement = RowPlacement(
        [tables[n][0] for n in order],
        [counts[n] for n in order],
        strategy,  # type: ignore[arg-type]
    )
    sizes = torch.tensor([tables[n][0] for n in order])
    ids = torch.cat([torch.arange(int(size)) for size in sizes])
    found = addresses.of(placement.place(ids, sizes), sizes).tolist()
    keys = [(number, row) for number in order for row in range(tables[number][0])]
    by_address = sorted(zip(found, (expected[key] for key in keys), strict=True))
    assert [address for address, _ in by_address] == list(range(sum(tables[n][0] for n in order)))
    assert [place for _, place in by_address] == sorted(expected.values())
    assert addresses.rows == len(ids)
    for address, (columns, rank, group, row) in by_address:
        block = int(np.searchsorted(addresses.starts, address, side="right")) - 1
        while addresses.blocks[block].rows == 0:
            block -= 1
        assert addresses.blocks[block][:3] == (columns, rank, group)
        assert address - addresses.starts[block] == row
    firsts = dict(zip(addresses.dimensions, addresses.first_of_dimension, strict=True))
    for columns in {table[1] for table in tables}:
        assert firsts[columns] == min(a for a, place in by_address if place[0] == columns)


def test_features_out_of_order_are_refused() -> None:
    shards = [TableShard("a", 0, 0, 0, 8, 0, 3), TableShard("b", 0, 0, 1, 2, 0, 3)]
    with pytest.raises(ValueError, match="ascending dimension"):
        RowAddresses(shards, ["a", "b"])
