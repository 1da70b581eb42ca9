"""The communication model against what ranks hand to the collectives, and against what their sockets send."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist

import tpuemb_torch as tpuemb
from tests.distributed.traffic_counter import Call, Counter, sent_by_sockets, sockets_tell
from tests.ranks import run_ranks
from tpuemb_torch.kernels import group_key
from tpuemb_torch.planning import Plan, make_plan
from tpuemb_torch.planning.collectives import PHASES, Collective
from tpuemb_torch.planning.traffic import traffic
from tpuemb_torch.sharding.placement import Strategy, shard_rows

BATCH = 24
#: Rows (some divide by no number of ranks, one has fewer than them), columns, optimizer.
TABLES = {
    "words": (101, 12, "adagrad {}"),
    "items": (40, 12, "stochastic_gradient_descent {}"),
    "days": (2, 24, "adagrad {}"),
    "users": (977, 24, "ftrl { lr_power: -0.5 l1: 0.01 l2: 0.02 }"),
}
#: Table, and shape of a sample's bags.
FEATURES = {
    "query": ("words", ()),
    "title": ("words", ()),
    "item": ("items", ()),
    "history": ("items", (3,)),
    "day": ("days", ()),
    "user": ("users", ()),
}
ROWS, TABLE, COLUMNS, NODE = "row_wise", "table_wise", "column_wise", "table_row_wise"
POOLED, DISTINCT = "pooled", "distinct"


class Case(NamedTuple):
    """Kinds of sharding and exchanges in the order of the tables, or one for all."""

    shardings: str | tuple[str, ...]
    exchanges: str | tuple[str, ...]
    strategy: str
    weighted: bool

    def plan(self, world: int, local: int) -> Plan:
        shardings, exchanges = (
            dict.fromkeys(TABLES, given) if isinstance(given, str) else dict(zip(TABLES, given, strict=True))
            for given in (self.shardings, self.exchanges)
        )
        return make_plan(config_of(self.strategy), world, local, shardings, exchange=exchanges)


#: By number of ranks, and of each node.
CASES = {
    (2, 2): [
        Case(ROWS, POOLED, "DIV_DEFAULT", False),
        Case(TABLE, POOLED, "MOD", True),
        Case(COLUMNS, POOLED, "DIV_DEFAULT", False),
        Case(ROWS, DISTINCT, "MOD", True),
        Case((ROWS, TABLE, COLUMNS, ROWS), (POOLED, POOLED, POOLED, DISTINCT), "MOD", False),
    ],
    (3, 3): [
        Case(ROWS, POOLED, "MOD", True),
        Case(TABLE, DISTINCT, "DIV_DEFAULT", True),
        Case(NODE, POOLED, "DIV_DEFAULT", False),
        Case((ROWS, ROWS, TABLE, TABLE), (DISTINCT, POOLED, DISTINCT, POOLED), "DIV_DEFAULT", True),
    ],
    (4, 2): [
        Case(ROWS, DISTINCT, "DIV_DEFAULT", False),
        Case(NODE, POOLED, "MOD", True),
        Case(NODE, DISTINCT, "MOD", False),
        Case(COLUMNS, POOLED, "DIV_DEFAULT", True),
        Case((NODE, TABLE, COLUMNS, ROWS), POOLED, "DIV_DEFAULT", True),
        Case((NODE, NODE, TABLE, ROWS), (DISTINCT, POOLED, DISTINCT, POOLED), "DIV_DEFAULT", False),
    ],
}


class Found(NamedTuple):
    """What one rank counted of a case.

    Attributes:
        calls: collectives of a step.
        sent: bytes that its sockets sent in another, but for its agreement.
        protocol: collectives of a step of `TPUEmbedding`.
    """

    calls: list[Call]
    sent: int
    protocol: list[Call]


def config_of(strategy: str) -> tpuemb.Config:
    text = f"mode: TRAINING num_hosts: 1 num_tensor_cores: 1 sharding_strategy: {strategy}\n"
    for name, (rows, columns, optimizer) in TABLES.items():
        text += (
            f'table_descriptor {{ name: "{name}" vocabulary_size: {rows} dimension: {columns} '
            f"optimization_parameters {{ learning_rate {{ dynamic {{ tag: 0 }} }} {optimizer} }} }}\n"
        )
    for name, (table, shape) in FEATURES.items():
        shapes = " ".join(f"input_shape: {size}" for size in (BATCH, *shape))
        text += f'feature_descriptor {{ name: "{name}" table_id: {list(TABLES).index(table)} {shapes} }}\n'
    return tpuemb.load_config(text)


def batch_of(rank: int, weighted: bool) -> dict[str, tpuemb.Ragged]:
    """Bags of 0 to 4 ids, some of them twice; the first rank has a whole batch, the others have fewer samples."""
    rng = np.random.default_rng(rank)
    features = {}
    for name, (table, shape) in FEATURES.items():
        bags = (BATCH - 5 * rank) * int(np.prod(shape))
        lengths = rng.integers(0, 5, bags)
        ids = torch.tensor(rng.integers(0, TABLES[table][0], int(lengths.sum())))
        splits = torch.tensor(np.concatenate([[0], lengths.cumsum()]))
        features[name] = tpuemb.Ragged(splits, ids, torch.ones(len(ids)) if weighted and rank == 0 else None)
    return features


def numbers(plan: Plan, strategy: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Ids and distinct rows of the batches of all ranks, by table: `[ranks, shards]`."""
    ids: dict[str, Any] = {}
    distinct: dict[str, Any] = {}
    for planned in plan.tables:
        name = planned.table.name
        batches = [
            np.concatenate([batch_of(rank, False)[f].ids for f, (table, _) in FEATURES.items() if table == name])
            for rank in range(plan.world_size)
        ]
        shards = len(planned.ranks) if planned.by_rows else 1
        kind: Strategy = "mod" if strategy == "MOD" else "div"
        rows = [shard_rows(planned.table.vocabulary_size, shards, shard, kind) for shard in range(shards)]
        ids[name] = [[np.isin(own, of).sum() for of in rows] for own in batches]
        distinct[name] = [[np.isin(np.unique(own), of).sum() for of in rows] for own in batches]
    return ids, distinct


def count(rank: int, world: int, local: int, cases: Sequence[Case]) -> list[Found]:
    os.environ.update(LOCAL_WORLD_SIZE=str(local), LOCAL_RANK=str(rank % local))
    agreement = _bytes_sent(lambda: dist.all_reduce(torch.zeros(4 + 2 + 4, dtype=torch.int64), op=dist.ReduceOp.MAX))
    found = []
    for case in cases:
        embedding = tpuemb.shard(tpuemb.TPUEmbedding(config_of(case.strategy)), case.plan(world, local))
        batch = batch_of(rank, case.weighted)
        embedding.set_learning_rates([0.1])
        counter, protocol = Counter(), Counter()
        with counter.counting():
            _step(embedding, batch, counter)
        sent = _bytes_sent(lambda e=embedding, b=batch: _step(e, b, Counter())) - agreement
        with protocol.counting():
            embedding.enqueue(batch)
            activations = embedding.recv_activations()
            embedding.send_gradients([torch.ones_like(a) for a in activations], [0.1])
        found.append(Found(counter.calls, sent, protocol.calls))
    return found


def _step(embedding: tpuemb.TPUEmbedding, batch: Mapping[str, Any], counter: Counter) -> None:
    """A step, phase by phase."""
    collection: Any = embedding.collection
    counter.phase = "input dist"
    context = collection.create_context()
    arrived = collection.input_dist(context, embedding.preparation(batch).input).wait().wait()
    counter.phase = "output dist"
    out = collection.compute_and_output_dist(context, arrived).wait().values()
    counter.phase = "backward"
    out.backward(torch.ones_like(out))


def _bytes_sent(step: Any) -> int:
    """Bytes that the sockets send during a step."""

    def settled() -> int:
        """Waits for the last messages."""
        found, last = sent_by_sockets(), -1
        while found != last:
            time.sleep(0.05)
            found, last = sent_by_sockets(), found
        return found

    if not sockets_tell():
        return -1
    dist.barrier()
    before = settled()
    step()
    return settled() - before


def check_calls(collectives: Sequence[Collective], found: Sequence[Sequence[Call]]) -> None:
    """Each call and the bytes given to it; and of all-to-alls what travels, and messages, by phase."""
    for rank, calls in enumerate(found):
        modelled = [(c.phase, c.operation, c.handed[rank]) for c in collectives]
        counted = [("agreement" if c.operation == "all_reduce" else c.phase, c.operation, c.handed) for c in calls]
        assert sorted(modelled) == sorted(counted)
        for phase in PHASES:
            own = [c for c in collectives if c.phase == phase and c.operation == "all_to_all"]
            seen = [c for c in calls if c.phase == phase and c.operation == "all_to_all"]
            assert sum(c.sent[rank] for c in own) == sum(c.sent for c in seen)
            assert sum(c.received[rank] for c in own) == sum(c.received for c in seen)
            assert sum(c.messages[rank] for c in own) == sum(c.messages for c in seen)


def check_bytes(collectives: Sequence[Collective], calls: Sequence[Call], rank: int, sent: int) -> None:
    """What the sockets sent beside the agreement is, to the byte, what the model says, and gloo's headers.

    Three headers of 48 bytes for each message: the sender is ready, the receiver is, here it comes.  All-to-alls send
    empty messages too; rings cut theirs in two.  (An agreement is too small to be cut alike for all ranks.)
    """
    direct = sum(call.size - 1 for call in calls if call.operation == "all_to_all")
    rings = [c for c in collectives if c.operation in ("reduce_scatter", "all_gather")]
    messages = direct + 2 * sum(c.messages[rank] for c in rings)
    assert sent == sum(c.sent[rank] for c in collectives if c.phase != "agreement") + 144 * messages


@pytest.mark.parametrize(("world", "local"), CASES)
def test_model_and_count_agree(world: int, local: int) -> None:
    cases = CASES[world, local]
    for case, found in zip(cases, zip(*run_ranks(world, count, local, cases), strict=True), strict=True):
        plan, tables = case.plan(world, local), config_of(case.strategy).tables
        ids, distinct = numbers(plan, case.strategy)
        model = partial(
            traffic,
            plan,
            weighted=case.weighted,
            ids=ids,
            distinct=distinct,
            kernel_groups={table.name: group_key(table.optimizer, table.dimension) for table in tables},
            learning_rates=1,
            backend="gloo",
        )
        check_calls(model(), [own.calls for own in found])
        for rank, own in enumerate(found):
            whole = [(c.operation, c.handed[rank]) for c in model(step_protocol=True)]
            assert sorted(whole) == sorted((call.operation, call.handed) for call in own.protocol)
            if sockets_tell():
                check_bytes(model(), own.calls, rank, own.sent)
