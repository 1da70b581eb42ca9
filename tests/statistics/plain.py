"""Statistics computed with Python loops, and the layer that they are compared with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

import tpuemb_torch as tpuemb
from tpuemb_torch.sharding import shard_rows

#: Bags of ids, table by table.
Batch = dict[str, list[list[int]]]


def config_text(rows: dict[str, int], strategy: str = "DIV_DEFAULT", directory: str = "", batch: int = 4) -> str:
    """A table of each size, each with a feature of its name; the first has a second one, `more`, of two steps.

    Dimensions alternate, so that neighbours in the config are not neighbours in the kernel.
    """
    tables = "".join(
        f'table_descriptor {{ name: "{name}" vocabulary_size: {size} dimension: {4 + 4 * (index % 2)} '
        "optimization_parameters { adagrad {} learning_rate { constant: 0.1 } } }\n"
        for index, (name, size) in enumerate(rows.items())
    )
    features = "".join(
        f'feature_descriptor {{ name: "{name}" table_id: {index} input_shape: {batch} }}\n'
        for index, name in enumerate(rows)
    )
    return f"""mode: TRAINING num_hosts: 1 num_tensor_cores: 1 sharding_strategy: {strategy}
    profile_data_directory: "{directory}"
    {tables} {features}
    feature_descriptor {{ name: "more" table_id: 0 input_shape: {batch} input_shape: 2 }}
    """


def ragged(bags: Sequence[Sequence[int]]) -> tpuemb.Ragged:
    """Bags as an input."""
    lengths = torch.tensor([len(bag) for bag in bags], dtype=torch.int64)
    splits = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return tpuemb.Ragged(splits, torch.tensor([row for bag in bags for row in bag], dtype=torch.int64))


def plain_stats(
    table: str,
    rows: int,
    batches: Sequence[Sequence[Sequence[int]]],
    num_shards: int = 1,
    strategy: str = "div",
    top_k: int = 10,
) -> tpuemb.TableStats:
    """The statistics of a table from the bags of each batch, one id at a time."""
    shard_of = {}
    for shard in range(num_shards):
        for row in shard_rows(rows, num_shards, shard, strategy):  # type: ignore[arg-type]
            shard_of[row] = shard
    total: Counter[int] = Counter()
    distinct, max_distinct, shard_ids, shard_distinct, bags, empty = 0, 0, 0, 0, 0, 0
    for batch in batches:
        seen: Counter[int] = Counter()
        per_shard: Counter[int] = Counter()
        for bag in batch:
            bags += 1
            empty += not bag
            for row in bag:
                seen[row] += 1
                per_shard[shard_of[row]] += 1
        total += seen
        distinct += len(seen)
        max_distinct = max(max_distinct, len(seen))
        shard_ids = max([shard_ids, *per_shard.values()])
        shard_distinct = max([shard_distinct, *Counter(shard_of[row] for row in seen).values()])
    return tpuemb.TableStats(
        name=table,
        vocabulary_size=rows,
        batches=len(batches),
        ids=sum(total.values()),
        distinct_ids=distinct,
        max_distinct_ids=max_distinct,
        touched_rows=len(total),
        bags=bags,
        empty_bags=empty,
        max_ids_per_shard=shard_ids,
        max_distinct_ids_per_shard=shard_distinct,
        hot_ids=tuple(sorted(total.items(), key=lambda item: (-item[1], item[0]))[:top_k]),
    )
