"""What people do with modules: copy, pickle, move, save and load state dicts, build on "meta"."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

import tpuemb_torch as tpuemb
from tests.distributed.cases import COMBINERS, config_text, make_batch
from tests.embedding.test_steps import RATES, same, snapshot


def layer(kernel: str = "eager", **options: Any) -> tpuemb.TPUEmbedding:
    embedding = tpuemb.TPUEmbedding(tpuemb.load_config(config_text("adam")), COMBINERS, kernel=kernel, **options)
    embedding.set_learning_rates(RATES)
    return embedding


def train(embedding: tpuemb.TPUEmbedding, seed: int = 0) -> None:
    sum(value.square().sum() for value in embedding(make_batch(6, seed)).values()).backward()


def by_torch_save(embedding: tpuemb.TPUEmbedding) -> tpuemb.TPUEmbedding:
    buffer = io.BytesIO()
    torch.save(embedding, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, by_torch_save, lambda e: pickle.loads(pickle.dumps(e))])
@pytest.mark.parametrize("kernel", ["eager", "compiled"])
def test_a_copy_trains_by_itself(duplicate: Any, kernel: str) -> None:
    embedding = layer(kernel)
    if kernel == "eager":
        train(embedding)
    before = snapshot(embedding)
    other = duplicate(embedding)
    assert same(before, snapshot(other))
    if kernel == "compiled":
        return  # that it trains is for the slow tests
    train(other, 1)
    assert same(before, snapshot(embedding))
    assert not same(before, snapshot(other))
    train(embedding, 1)
    assert same(snapshot(embedding), snapshot(other))
    # Parameters are still views of what is trained.
    for name, parameter in other.named_parameters():
        table = name.split(".")[-2]
        assert torch.equal(parameter, snapshot(other)[table]["parameters"])


@pytest.mark.parametrize("assign", [False, True])
def test_state_dicts_carry_the_weights(assign: bool) -> None:
    embedding, other = layer(seed=1), layer(seed=2)
    train(embedding)
    state = {name: value.clone() for name, value in embedding.state_dict().items()}
    assert set(state) == {f"collection.embedding_bags.{name}.weight" for name in ("user", "item", "tiny")}
    other.load_state_dict(state, assign=assign)
    for table, slots in snapshot(embedding).items():
        assert torch.equal(slots["parameters"], snapshot(other)[table]["parameters"])
    train(other)
    assert torch.equal(
        other.state_dict()["collection.embedding_bags.user.weight"], snapshot(other)["user"]["parameters"]
    )


@pytest.mark.parametrize("use_buffers", [False, True])
def test_averaged_models_average(use_buffers: bool) -> None:
    embedding = layer()
    averaged = AveragedModel(embedding, use_buffers=use_buffers)
    seen = []
    for step in range(3):
        train(embedding, step)
        averaged.update_parameters(embedding)
        seen.append(snapshot(embedding)["user"]["parameters"])
    assert not torch.equal(seen[0], seen[2])
    torch.testing.assert_close(snapshot(averaged.module)["user"]["parameters"], torch.stack(seen).mean(0))
    assert not list(embedding.buffers())


def test_tables_stay_float32() -> None:
    embedding = layer()
    for change in (embedding.half, embedding.double, embedding.bfloat16):
        with pytest.raises(TypeError, match="float32"):
            change()
    embedding.to(torch.float32).to("cpu").float()
    train(embedding)


def test_meta() -> None:
    embedding = layer(device="meta", seed=3)
    for use in (lambda: embedding(make_batch(6, 0)), embedding.retrieve_parameters):
        with pytest.raises(RuntimeError, match='on device "meta": shard the layer'):
            use()
    embedding.to_empty(device="cpu")
    embedding.collection.reset_parameters()
    assert same(snapshot(embedding), snapshot(layer(seed=3)))
    train(embedding)


def test_configs_and_inputs_pickle() -> None:
    config = tpuemb.load_config(config_text("ftrl"))
    assert pickle.loads(pickle.dumps(config)) == config
    assert hash(config) == hash(pickle.loads(pickle.dumps(config)))
    ragged = pickle.loads(pickle.dumps(make_batch(6, 0)["friends"]))
    assert torch.equal(ragged.ids, make_batch(6, 0)["friends"].ids)


def test_numpy_gradients_and_list_ids() -> None:
    embedding, other = layer(), layer()
    batch = make_batch(6, 0)
    embedding.enqueue({**batch, "viewer": batch["viewer"].tolist()})
    other.enqueue(batch)
    gradients = [torch.ones_like(a) for a in embedding.recv_activations()]
    other.recv_activations()
    embedding.send_gradients([g.numpy() for g in gradients], RATES)
    other.send_gradients(gradients, torch.tensor(RATES))
    assert same(snapshot(embedding), snapshot(other))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "ftrl", "adam", "adam_non_lazy"])
def test_the_compiled_kernel_equals_the_eager_one(optimizer: str) -> None:
    config = tpuemb.load_config(config_text(optimizer))
    eager, compiled = (tpuemb.TPUEmbedding(config, COMBINERS, kernel=kernel) for kernel in ("eager", "compiled"))
    compilations = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for step, size in enumerate((6, 1, 11, 3)):
        for embedding in (eager, compiled):
            embedding.set_learning_rates([0.1 / (step + 1), 0.2])
            sum(v.square().sum() for v in embedding(make_batch(size, step)).values()).backward()
        if step == 0:
            compilations = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        for table, slots in snapshot(eager).items():
            for slot, value in slots.items():
                torch.testing.assert_close(snapshot(compiled)[table][slot], value, rtol=1e-5, atol=1e-6)
    # One compilation served all sizes and rates.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compilations


def test_tracing_is_refused_by_name() -> None:
    model = torch.nn.Sequential(tpuemb.TPUEmbedding(config_text("sgd")))
    with pytest.raises(TypeError, match=r"cannot be traced.*tpuemb_torch\.TrainPipeline"):
        torch.fx.symbolic_trace(model)
