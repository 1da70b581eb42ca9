"""The step protocol: order, modes, refusals that change nothing; load and retrieve; the autograd path's rules."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import tpuemb_torch as tpuemb
from tests.distributed.cases import COMBINERS, config_text, make_batch
from tpuemb_torch.step_protocol import QUEUE_LIMIT

RATES = (0.1, 0.2)


@pytest.fixture
def embedding() -> tpuemb.TPUEmbedding:
    return tpuemb.TPUEmbedding(tpuemb.load_config(config_text("adam")), COMBINERS, seed=1)


def snapshot(embedding: tpuemb.TPUEmbedding) -> dict[str, Any]:
    return embedding.retrieve_parameters()


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(torch.equal(a[table][slot], b[table][slot]) for table in a for slot in a[table])


def test_what_is_done_to_received_activations_stays_there(embedding: tpuemb.TPUEmbedding) -> None:
    other = tpuemb.TPUEmbedding(embedding.config, COMBINERS, seed=1)
    for layer in (embedding, other):
        layer.enqueue(make_batch(6, 0))
        activations = layer.recv_activations()
        gradients = [torch.ones_like(a) for a in activations]
        if layer is other:
            for activation in activations:
                activation.zero_()
        layer.send_gradients(gradients, RATES)
    assert same(snapshot(embedding), snapshot(other))
    embedding.set_learning_rates(RATES)
    torch.relu_(embedding(make_batch(6, 0))["viewer"]).sum().backward()


def test_batches_are_served_first_in_first_out(embedding: tpuemb.TPUEmbedding) -> None:
    batches = [make_batch(6, seed) for seed in range(3)]
    expected = [[v.detach() for v in embedding(batch).values()] for batch in batches]
    for batch in batches:
        embedding.enqueue(batch)
    for activations in expected:
        assert all(torch.equal(a, e) for a, e in zip(embedding.recv_activations(), activations, strict=True))
    for _ in batches:
        embedding.send_gradients([torch.ones_like(e) for e in expected[0]], RATES)
    with pytest.raises(RuntimeError, match="no training batch waits"):
        embedding.send_gradients([None] * 5, RATES)
    with pytest.raises(RuntimeError, match="no batch to receive"):
        embedding.recv_activations()


def test_send_before_recv_is_refused(embedding: tpuemb.TPUEmbedding) -> None:
    embedding.enqueue(make_batch(6, 0))
    with pytest.raises(RuntimeError, match="recv first"):
        embedding.send_gradients([None] * 5, RATES)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda g: g[:4], ValueError, "4 gradients given, but recv returned 5"),
        (lambda g: [*g, g[0]], ValueError, "6 gradients given"),
        (lambda g: g[0], TypeError, "must be a sequence of 5"),
        (lambda g: [g[0][:5], *g[1:]], ValueError, r"'viewer' has shape \[5, 8\], its activation \[6, 8\]"),
        (lambda g: [g[0].double(), *g[1:]], TypeError, "'viewer' must be float32, got torch.float64"),
        (lambda g: [*g[:4], 3.0], TypeError, "'flag' must be a tensor or None, got float"),
    ],
)
def test_wrong_gradients_change_nothing(
    embedding: tpuemb.TPUEmbedding, change: Any, error: type[Exception], message: str
) -> None:
    embedding.enqueue(make_batch(6, 0))
    gradients = [torch.ones_like(a) for a in embedding.recv_activations()]
    before = snapshot(embedding)
    with pytest.raises(error, match=message):
        embedding.send_gradients(change(gradients), RATES)
    assert same(before, snapshot(embedding))
    embedding.send_gradients(gradients, RATES)  # the batch still waits for the right ones
    assert not same(before, snapshot(embedding))


@pytest.mark.parametrize(
    ("rates", "error", "message"),
    [
        ([], ValueError, "0 learning rates given, but the config has 2"),
        ([0.1], ValueError, "1 learning rates given"),
        ([0.1, 0.2, 0.3], ValueError, "3 learning rates given"),
        ([0.1, float("nan")], ValueError, "tag 1 is nan"),
        ([0.1, 1e39], ValueError, "tag 1 is 1e\\+39: it must be finite as a float32"),
        (0.1, TypeError, "must be a sequence of 2 scalars, got float"),
        ([torch.ones(1), 0.1], ValueError, r"tag 0 must be a scalar \(rank 0\), got shape \[1\]"),
        ([torch.tensor(1), 0.1], TypeError, "tag 0 must be float32, got torch.int64"),
        ([torch.tensor(0.1).double(), 0.1], TypeError, "tag 0 must be float32, got torch.float64"),
        (["0.1", 0.1], TypeError, "tag 0 must be a number, got str"),
    ],
)
def test_wrong_rates_change_nothing(
    embedding: tpuemb.TPUEmbedding, rates: Any, error: type[Exception], message: str
) -> None:
    embedding.enqueue(make_batch(6, 0))
    gradients = [torch.ones_like(a) for a in embedding.recv_activations()]
    before = snapshot(embedding)
    with pytest.raises(error, match=message):
        embedding.send_gradients(gradients, rates)
    with pytest.raises(error, match=message):
        embedding.set_learning_rates(rates)
    assert same(before, snapshot(embedding))
    embedding.send_gradients(gradients, RATES)


def test_none_is_a_zero_gradient_that_is_applied(embedding: tpuemb.TPUEmbedding) -> None:
    other = tpuemb.TPUEmbedding(embedding.config, COMBINERS, seed=1)
    for layer, zeros in ((embedding, None), (other, 0)):
        for _ in range(2):
            layer.enqueue(make_batch(6, 0))
            activations = layer.recv_activations()
            layer.send_gradients([torch.ones_like(a) for a in activations], RATES)
        layer.enqueue(make_batch(6, 0))
        activations = layer.recv_activations()
        layer.send_gradients([None if zeros is None else torch.zeros_like(a) for a in activations], RATES)
    assert same(snapshot(embedding), snapshot(other))
    # Momentum decays: a zero gradient is a step.
    moved = snapshot(embedding)
    embedding.enqueue(make_batch(6, 0))
    embedding.recv_activations()
    embedding.send_gradients([None] * 5, RATES)
    assert not same(moved, snapshot(embedding))


def test_an_inference_batch_between_training_batches(embedding: tpuemb.TPUEmbedding) -> None:
    other = tpuemb.TPUEmbedding(embedding.config, COMBINERS, seed=1)
    embedding.enqueue(make_batch(6, 0), mode="train")
    embedding.enqueue(make_batch(4, 1), mode="inference")
    first = embedding.recv_activations()
    embedding.recv_activations()
    embedding.send_gradients([torch.ones_like(a) for a in first], RATES)
    with pytest.raises(RuntimeError, match="no training batch waits"):
        embedding.send_gradients([None] * 5, RATES)
    other.enqueue(make_batch(6, 0))
    other.send_gradients([torch.ones_like(a) for a in other.recv_activations()], RATES)
    assert same(snapshot(embedding), snapshot(other))


def test_backward_pass_only(embedding: tpuemb.TPUEmbedding) -> None:
    other = tpuemb.TPUEmbedding(embedding.config, COMBINERS, seed=1)
    shapes = [a.shape for a in embedding(make_batch(6, 0)).values()]
    embedding.enqueue(make_batch(6, 0), mode="backward_pass_only")
    with pytest.raises(RuntimeError, match="no batch to receive"):
        embedding.recv_activations()
    embedding.send_gradients([torch.ones(shape) for shape in shapes], RATES)
    other.enqueue(make_batch(6, 0))
    other.send_gradients([torch.ones_like(a) for a in other.recv_activations()], RATES)
    assert same(snapshot(embedding), snapshot(other))


def test_modes(embedding: tpuemb.TPUEmbedding) -> None:
    with pytest.raises(ValueError, match="mode 'predict' is not one of"):
        embedding.enqueue(make_batch(6, 0), mode="predict")
    inference = tpuemb.TPUEmbedding(
        tpuemb.load_config(config_text("adam").replace("mode: TRAINING", "mode: INFERENCE")), COMBINERS
    )
    for mode in ("train", "training", "backward_pass_only"):
        with pytest.raises(ValueError, match="INFERENCE"):
            inference.enqueue(make_batch(6, 0), mode=mode)
    inference.enqueue(make_batch(6, 0))
    inference.recv_activations()
    assert not any(out.requires_grad for out in inference(make_batch(6, 0)).values())


def test_the_queue_is_bounded(embedding: tpuemb.TPUEmbedding) -> None:
    for _ in range(QUEUE_LIMIT):
        embedding.enqueue(make_batch(1, 0))
    with pytest.raises(RuntimeError, match=f"{QUEUE_LIMIT} batches are waiting"):
        embedding.enqueue(make_batch(1, 0))


def test_deduplication_data_makes_the_activations_and_knows_its_batch(embedding: tpuemb.TPUEmbedding) -> None:
    embedding.enqueue(make_batch(6, 0))
    embedding.enqueue(make_batch(6, 1))
    data = embedding.recv_deduplication_data()
    ((indices, weights),) = data.cores
    (rows,) = data.rows
    assert indices.dtype == torch.uint32 and weights.dtype == torch.float32
    assert indices.dim() == weights.dim() == 1
    assert len(torch.unique(rows, dim=0)) == len(rows)
    # Distinct rows, indexed and weighted, summed per bag: feature by feature in the config's order.
    tables = list(embedding.retrieve_parameters().values())
    activations = embedding.recv_activations(data)
    bags = torch.repeat_interleave(torch.arange(data.lengths[0].numel()), data.lengths[0])
    first_bag = 0
    for feature, activation in zip(embedding.config.features, activations, strict=True):
        count = activation.numel() // feature.table.dimension
        mine = (bags >= first_bag) & (bags < first_bag + count)
        table, ids = rows[indices.long()[mine]].t()
        assert (table == feature.table_id).all()
        gathered = tables[feature.table_id]["parameters"][ids] * weights[mine, None]
        summed = torch.zeros(count, feature.table.dimension).index_add_(0, bags[mine] - first_bag, gathered)
        torch.testing.assert_close(summed.view_as(activation), activation)
        first_bag += count
    with pytest.raises(
        ValueError, match=f"deduplication data of batch {data.batch} given to the recv of batch {data.batch + 1}"
    ):
        embedding.recv_activations(data)
    with pytest.raises(TypeError, match="must be DeduplicationData"):
        embedding.recv_activations(3)  # type: ignore[arg-type]
    embedding.recv_activations()
    gradients = [torch.ones_like(a) for a in activations]
    embedding.send_gradients(gradients, RATES, data)
    before = snapshot(embedding)
    with pytest.raises(ValueError, match=f"batch {data.batch} given to the send of batch {data.batch + 1}"):
        embedding.send_gradients(gradients, RATES, data)
    assert same(before, snapshot(embedding))


def test_backward_without_rates_is_refused() -> None:
    embedding = tpuemb.TPUEmbedding(tpuemb.load_config(config_text("sgd")), COMBINERS)
    before = snapshot(embedding)
    with pytest.raises(RuntimeError, match="call set_learning_rates"):
        sum(v.sum() for v in embedding(make_batch(6, 0)).values()).backward()
    assert same(before, snapshot(embedding))


def test_no_update_without_training(embedding: tpuemb.TPUEmbedding) -> None:
    embedding.set_learning_rates(RATES)
    before = snapshot(embedding)
    embedding.eval()
    assert not any(v.requires_grad for v in embedding(make_batch(6, 0)).values())
    embedding.train()
    with torch.no_grad():
        assert not any(v.requires_grad for v in embedding(make_batch(6, 0)).values())
    assert same(before, snapshot(embedding))


def test_other_optimizers_cannot_move_the_tables(embedding: tpuemb.TPUEmbedding) -> None:
    embedding.set_learning_rates(RATES)
    assert not any(p.requires_grad for p in embedding.parameters())
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
    embedding.set_learning_rates([0.0, 0.0])
    weights = snapshot(embedding)["user"]["parameters"]
    embedding(make_batch(6, 0))["viewer"].sum().backward()
    after_backward = snapshot(embedding)
    optimizer.step()
    assert same(after_backward, snapshot(embedding))
    assert weights.shape == (23, 8)


def test_load_and_retrieve_shards(embedding: tpuemb.TPUEmbedding) -> None:
    whole = embedding.retrieve_parameters()
    parts = [embedding.retrieve_parameters(["user"], 4, shard)["user"] for shard in range(4)]
    assert [len(p["parameters"]) for p in parts] == [6, 6, 6, 5]
    for slot in ("parameters", "momenta", "velocities"):
        assert torch.equal(torch.cat([p[slot] for p in parts]), whole["user"][slot])
    embedding.load_parameters({"user": {"momenta": torch.full((6, 8), 7.0)}}, num_shards=4, shard_id=1)
    now = embedding.retrieve_parameters()
    assert torch.equal(now["user"]["momenta"][6:12], torch.full((6, 8), 7.0))
    assert torch.equal(now["user"]["momenta"][:6], whole["user"]["momenta"][:6])
    assert torch.equal(now["user"]["parameters"], whole["user"]["parameters"])
    # What is retrieved is a copy.
    now["user"]["parameters"].zero_()
    assert torch.equal(embedding.retrieve_parameters()["user"]["parameters"], whole["user"]["parameters"])


@pytest.mark.parametrize(
    ("parameters", "shards", "message"),
    [
        ({"nobody": {"parameters": torch.zeros(1)}}, (1, 0), "no table 'nobody'"),
        ({"user": {"accumulators": torch.zeros(23, 8)}}, (1, 0), "no slot 'accumulators'; it has parameters, momenta"),
        ({"user": {"parameters": torch.zeros(22, 8)}}, (1, 0), r"shape \[22, 8\], but shard 0 of 1.*\[23, 8\]"),
        ({"user": {"parameters": torch.zeros(23, 8)}}, (2, 0), r"shard 0 of 2.*\[12, 8\]"),
        ({"user": {"parameters": torch.zeros(23, 8)}}, (1, 1), r"shard_id must be in \[0, 1\)"),
        ({"user": {"parameters": torch.zeros(23, 8)}}, (0, 0), "num_shards must be at least 1"),
        ({"tiny": {"parameters": torch.zeros(0, 4)}}, (3, 2), "shard 2 of 3 would have no rows"),
        ({"user": {"parameters": torch.zeros(23, 8).long()}}, (1, 0), "must be float32"),
    ],
)
def test_wrong_parameters_write_nothing(
    embedding: tpuemb.TPUEmbedding, parameters: Any, shards: tuple[int, int], message: str
) -> None:
    before = snapshot(embedding)
    good = {"item": {"parameters": torch.ones(7, 4)}} if shards == (1, 0) else {}
    with pytest.raises((ValueError, TypeError), match=message):
        embedding.load_parameters({**good, **parameters}, *shards)
    assert same(before, snapshot(embedding))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"combiners": ["sum"]}, "1 combiners for 3 tables"),
        ({"combiners": "mean"}, "one per table"),
        ({"combiners": {"user": "max"}}, "'user': combiner 'max' is not one of sum, mean, sqrtn"),
        ({"combiners": {"nobody": "sum"}}, r"unknown tables \['nobody'\]"),
        ({"kernel": "compiled2"}, "kernel 'compiled2' is not available"),
        ({"id_policy": "ignore"}, "id_policy='ignore'"),
        ({"gradient_reduction": "max"}, "gradient_reduction='max'"),
    ],
)
def test_wrong_options(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tpuemb.TPUEmbedding(tpuemb.load_config(config_text("sgd")), **options)


def test_table_layout_rows_are_sample_major() -> None:
    config = tpuemb.load_config("""
        mode: TRAINING num_hosts: 1 num_tensor_cores: 1 batch_size_per_tensor_core: 4
        table_descriptor { name: "one" vocabulary_size: 9 dimension: 2 num_features: 1 optimization_parameters {
            learning_rate { constant: 1 } stochastic_gradient_descent {} } }
        table_descriptor { name: "three" vocabulary_size: 9 dimension: 2 num_features: 3 optimization_parameters {
            learning_rate { constant: 1 } stochastic_gradient_descent {} } }""")
    assert config.layout == "table" and config.output_shapes == ((4, 2), (12, 2))
    embedding = tpuemb.TPUEmbedding(config)
    embedding.load_parameters({"three": {"parameters": torch.arange(9.0)[:, None].expand(9, 2)}})
    rng = np.random.default_rng(0)
    slots = [torch.from_numpy(rng.integers(0, 9, 4)) for _ in range(3)]
    rows = torch.stack(slots, dim=1).reshape(-1)  # row b * num_features + f
    one = torch.arange(4)
    by_rows = embedding({"one": one, "three": rows})["three"]
    assert torch.equal(by_rows[:, 0], rows.float())
    by_slots = embedding({"one": one, "three": slots})["three"]
    assert torch.equal(by_slots, by_rows)
    mixed = [
        slots[0],
        tpuemb.Ragged(torch.arange(5), slots[1]),
        tpuemb.Sparse(torch.stack([torch.arange(4), torch.zeros(4, dtype=torch.int64)], dim=1), slots[2]),
    ]
    assert torch.equal(embedding([one, mixed])["three"], by_rows)
    with pytest.raises(tpuemb.InputError, match="'three': 2 inputs, but the table has num_features 3"):
        embedding({"one": one, "three": slots[:2]})


def test_sequences_of_many_steps_are_one_run_of_columns() -> None:
    config = tpuemb.load_config("""
        mode: TRAINING num_hosts: 1 num_tensor_cores: 1
        table_descriptor { name: "t" vocabulary_size: 50 dimension: 4 optimization_parameters {
            learning_rate { constant: 1 } stochastic_gradient_descent {} } }
        feature_descriptor { name: "seq" table_id: 0 input_shape: 8 input_shape: 200 }
        feature_descriptor { name: "bag" table_id: 0 input_shape: 8 }""")
    embedding = tpuemb.TPUEmbedding(config)
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 50, (8, 200)))
    out = embedding({"seq": ids, "bag": ids[:, :3]})
    table = embedding.retrieve_parameters()["t"]["parameters"]
    assert torch.equal(out["seq"], table[ids])
    torch.testing.assert_close(out["bag"], table[ids[:, :3]].sum(1))
