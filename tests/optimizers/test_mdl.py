"""mdl_adagrad_light: everything but training works; training is refused unless it is asked for by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import tpuemb_torch as tpuemb
from tests.ranks import run_ranks
from tpuemb_torch import ops
from tpuemb_torch.ops import system
from tpuemb_torch.optimizers import apply_step, create_rule, reference_step
from tpuemb_torch.optimizers.step import StepNumbers
from tpuemb_torch.report import describe

MDL = """mdl_adagrad_light { lr_power: -0.5 mdl_benefit_rampup_coeff: 2 min_servable_mdl_benefit: 0.1
    mdl_min_weight: 0.2 max_event_benefit: 0.5 max_total_benefit: 1 l2: 0.01 }"""
EXPERIMENTAL = {"mdl_adagrad_light"}
SLOTS = ["parameters", "accumulators", "weights", "benefits"]
IDS = {"f": torch.tensor([0, 3, 3, 5]), "g": torch.tensor([1, 1, 0, 2])}


def config(mode: str = "TRAINING", optimizer: str = MDL) -> tpuemb.Config:
    return tpuemb.load_config(f"""
        mode: {mode} num_hosts: 1 num_tensor_cores: 1
        table_descriptor {{ name: "plain" vocabulary_size: 6 dimension: 4 optimization_parameters {{
            learning_rate {{ constant: 0.1 }} adagrad {{}} }} }}
        table_descriptor {{ name: "mdl" vocabulary_size: 7 dimension: 4 optimization_parameters {{
            learning_rate {{ constant: 0.1 }} {optimizer} }} }}
        feature_descriptor {{ name: "f" table_id: 0 input_shape: 4 }}
        feature_descriptor {{ name: "g" table_id: 1 input_shape: 4 }}""")


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(torch.equal(a[table][slot], b[table][slot]) for table in a for slot in a[table])


@pytest.mark.parametrize("mode", ["unspecified", "train", "training", "backward_pass_only"])
def test_enqueue_for_training_is_refused(mode: str) -> None:
    embedding = tpuemb.TPUEmbedding(config())
    with pytest.raises(NotImplementedError, match=r"'mdl' .*no public text .*experimental=\{\"mdl_adagrad_light\"\}"):
        embedding.enqueue(IDS, mode)
    embedding.enqueue(IDS, "inference")
    assert [a.shape for a in embedding.recv_activations()] == [(4, 4), (4, 4)]
    with pytest.raises(RuntimeError, match="no batch to receive"):  # the refused one was not queued
        embedding.recv_activations()


def test_forward_in_training_is_refused_and_inference_works() -> None:
    embedding = tpuemb.TPUEmbedding(config())
    before = embedding.retrieve_parameters()
    with pytest.raises(NotImplementedError, match="'mdl' has the optimizer mdl_adagrad_light, which does not train"):
        embedding(IDS)
    with torch.no_grad():
        looked_up = embedding(IDS)
    out = embedding.eval()(IDS)
    for values in (looked_up, out):
        assert not any(v.requires_grad for v in values.values())
        assert torch.equal(values["g"], before["mdl"]["parameters"][IDS["g"]])
    assert same(before, embedding.retrieve_parameters())
    inference = tpuemb.TPUEmbedding(config("INFERENCE"))
    assert torch.equal(inference(IDS)["g"], before["mdl"]["parameters"][IDS["g"]])


def test_the_collection_by_itself() -> None:
    collection = tpuemb.TPUEmbeddingBagCollection(config())
    batch = KeyedJaggedTensor(["f", "g"], torch.cat([IDS["f"], IDS["g"]]), lengths=torch.ones(8, dtype=torch.int64))
    with pytest.raises(NotImplementedError, match="experimental"):
        collection(batch)
    assert not collection.eval()(batch).values().requires_grad  # so that no backward can reach the table
    trained = tpuemb.TPUEmbeddingBagCollection(config(), experimental=EXPERIMENTAL)
    trained(batch).values().sum().backward()


def test_load_retrieve_and_checkpoints(tmp_path: Path) -> None:
    embedding = tpuemb.TPUEmbedding(config())
    initial = embedding.retrieve_parameters()["mdl"]
    assert list(initial) == SLOTS
    assert [initial[slot].unique().tolist() for slot in SLOTS[1:]] == [[pytest.approx(0.1)], [0.0], [0.0]]
    values = {slot: torch.rand(7, 4) for slot in SLOTS}
    embedding.load_parameters({"mdl": values})
    tpuemb.checkpoint.save(tmp_path, embedding)
    other = tpuemb.TPUEmbedding(config(), seed=1)
    tpuemb.checkpoint.load(tmp_path, other)
    assert same({"mdl": values}, {"mdl": other.retrieve_parameters()["mdl"]})


def test_load_and_retrieve_ops() -> None:
    embedding = ops.configure_tpu_embedding(config())
    try:
        values = [torch.rand(7, 4) for _ in SLOTS]
        ops.load_tpu_embedding_mdl_adagrad_light_parameters(*values, num_shards=1, shard_id=0, table_name="mdl")
        retrieved = ops.retrieve_tpu_embedding_mdl_adagrad_light_parameters(1, 0, table_name="mdl")
        assert retrieved._fields == tuple(SLOTS)
        assert all(torch.equal(a, b) for a, b in zip(retrieved, values, strict=True))
        assert embedding is system.current()
    finally:
        system._installed = None


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"adam"}, "'adam' is not experimental; what is: mdl_adagrad_light"),
        (["mdl_adagrad_light", "mdl"], "'mdl' is not experimental"),
        ("mdl_adagrad_light", r"give a set of names, \{'mdl_adagrad_light'\}"),
    ],
)
def test_unknown_experiments_are_refused(names: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tpuemb.TPUEmbedding(config(), experimental=names)


def test_experiments_change_nothing_where_no_table_needs_them() -> None:
    tpuemb.TPUEmbedding(config(optimizer="lion {}"), experimental=EXPERIMENTAL)(IDS)


def test_training_on_request_follows_the_approximation() -> None:
    embedding = tpuemb.TPUEmbedding(config(), experimental=EXPERIMENTAL)
    optimizer = embedding.config.tables[1].optimizer
    rng = np.random.default_rng(0)
    values = {slot: rng.uniform(0.1, 1.0, (7, 4)).astype(np.float32) for slot in SLOTS}
    embedding.load_parameters({"mdl": values})
    gradient = torch.tensor(rng.normal(size=(4, 4)), dtype=torch.float32)
    embedding.enqueue(IDS)
    embedding.recv_activations()
    embedding.send_gradients([None, gradient])
    state = embedding.retrieve_parameters()["mdl"]
    summed = np.zeros((7, 4))
    np.add.at(summed, IDS["g"].numpy(), gradient.numpy())
    rows = [0, 1, 2]
    lr = float(np.float32(0.1))
    expected = reference_step(
        optimizer, *(x[rows] for x in (values["parameters"], summed)), lr, *(values[s][rows] for s in SLOTS[1:])
    )
    for slot, new in zip(SLOTS, expected, strict=True):
        np.testing.assert_allclose(state[slot][rows].numpy(), new, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(state[slot][3:].numpy(), values[slot][3:])


def test_the_formula_by_hand() -> None:
    """a = 0.25 + 0.75 * 0.75 ... by hand: lr 0.5, power -0.5, no l2."""
    optimizer = config(optimizer=MDL.replace("l2: 0.01", "")).tables[1].optimizer
    w, g, a, v, b = 0.4, 0.6, 0.64, 1.0, 0.3  # new a: 1, rate 0.5
    event = 0.6 * 0.4 - 0.5 * 0.5 * 0.36  # 0.15
    weight = 1.0 - 0.5 * 0.6  # 0.7
    benefit = 0.3 + event
    shown = 1 / (1 + np.exp(-2.0 * (benefit - np.float32(0.1))))
    expected = [weight * shown, 1.0, weight, benefit]
    new = apply_step(
        create_rule(optimizer), StepNumbers(torch.tensor(0.5)), *(torch.tensor([[x]]) for x in (w, g, a, v, b))
    )
    np.testing.assert_allclose([x.item() for x in new], expected, rtol=1e-6)
    # Bounds: an event's benefit, the total, and the least that is shown.
    new = apply_step(
        create_rule(optimizer), StepNumbers(torch.tensor(0.5)), *(torch.tensor([[x]]) for x in (9.0, g, a, v, 0.9))
    )
    assert new[3].item() == 1.0
    new = apply_step(
        create_rule(optimizer), StepNumbers(torch.tensor(0.5)), *(torch.tensor([[x]]) for x in (-9.0, g, a, v, 0.0))
    )
    np.testing.assert_allclose([new[3].item(), new[0].item()], [-0.5, weight / (1 + np.exp(1.2))], rtol=1e-6)
    new = apply_step(
        create_rule(optimizer), StepNumbers(torch.tensor(0.5)), *(torch.tensor([[x]]) for x in (-9.0, g, a, v, -1.0))
    )
    np.testing.assert_allclose([new[3].item(), new[0].item()], [-1.0, weight * 0.2], rtol=1e-6)


def test_no_gradient_so_far_moves_nothing() -> None:
    """Accumulator 0 and gradient 0: lr * 0^-0.5 would be infinite."""
    optimizer = config().tables[1].optimizer
    zeros = [torch.zeros(1, 1)] * 2
    state = (torch.tensor([[0.4]]), zeros[0], zeros[1], torch.tensor([[1.0]]), torch.tensor([[0.3]]))
    _, *slots = apply_step(create_rule(optimizer), StepNumbers(torch.tensor(0.5)), *state)
    assert [slot.item() for slot in slots] == [0.0, 1.0, pytest.approx(0.3)]
    arrays = [x.double().numpy() for x in state]
    _, *double = reference_step(optimizer, arrays[0], arrays[1], 0.5, *arrays[2:])
    assert [slot.item() for slot in double] == [0.0, 1.0, pytest.approx(0.3)]


def test_inspect_says_so() -> None:
    (note,) = describe(config())["notes"]
    assert "mdl_adagrad_light does not train" in note and note.endswith(": mdl")


def sharded(rank: int, world: int) -> Any:
    embedding = tpuemb.shard(tpuemb.TPUEmbedding(config()), "row_wise")
    before = embedding.retrieve_parameters()
    for attempt in (lambda: embedding(IDS), lambda: embedding.enqueue(IDS), lambda: embedding.collection(_kjt())):
        with pytest.raises(NotImplementedError, match="experimental"):
            attempt()
    # Also where the batch of one rank would be refused: no rank waits for another.
    with pytest.raises(NotImplementedError, match="experimental"):
        embedding(IDS if rank == 0 else {"f": torch.tensor([99] * 4), "g": IDS["g"]})
    out = embedding.eval()(IDS)
    assert torch.equal(out["g"], before["mdl"]["parameters"][IDS["g"]])
    assert not embedding.collection(_kjt()).wait().values().requires_grad
    trained = tpuemb.shard(tpuemb.TPUEmbedding(config(), experimental=EXPERIMENTAL), "row_wise")
    sum(v.sum() for v in trained(IDS).values()).backward()
    return {slot: t.numpy() for slot, t in trained.retrieve_parameters()["mdl"].items()}


def _kjt() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["f", "g"], torch.cat([IDS["f"], IDS["g"]]), lengths=torch.ones(8, dtype=torch.int64))


def test_sharded() -> None:
    results = run_ranks(2, sharded)
    one = tpuemb.TPUEmbedding(config(), experimental=EXPERIMENTAL)
    twice = {name: torch.cat([ids, ids]) for name, ids in IDS.items()}
    sum(v.sum() for v in one(twice).values()).backward()
    for state in results:
        for slot, expected in one.retrieve_parameters()["mdl"].items():
            np.testing.assert_allclose(state[slot], expected.numpy(), rtol=1e-5, atol=1e-6)
