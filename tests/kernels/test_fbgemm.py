"""kernel="fbgemm": FBGEMM's own fused update where it computes the same, refused by name where it does not."""

from __future__ import annotations

import pytest
import torch

import tpuemb_torch as tpuemb
from tests.kernels.test_kernel import table
from tpuemb_torch.kernels import StepSource, TableBatchedEmbedding, TablePart

SGD = "stochastic_gradient_descent {}"


def build(kernel: str, optimizer: str, dim: int = 8, extra: str = "") -> TableBatchedEmbedding:
    tables = [
        table("a", 30, dim, optimizer, 0.1, extra),
        table("b", 50, dim, optimizer, 0.1),
        table("c", 9, dim, optimizer, 0.3),
    ]
    parts = [TablePart.whole(t) for t in tables]
    return TableBatchedEmbedding(parts, [0, 0, 1, 2], torch.device("cpu"), 0, StepSource(0), kernel)


@pytest.mark.parametrize("optimizer", [SGD, "adagrad {}"])
@pytest.mark.parametrize("weighted", [False, True])
def test_it_gives_what_ours_gives(optimizer: str, weighted: bool) -> None:
    modules = [build(kernel, optimizer) for kernel in ("eager", "fbgemm")]
    for batch in (20, 0, 1, 7):
        ids = torch.cat([torch.randint(0, rows, (batch * 3,)) for rows in (30, 30, 50, 9)])
        gains = torch.rand(ids.numel()) if weighted else None
        gradient = torch.randn(batch, 32)
        outputs = [module(ids, torch.arange(0, ids.numel() + 1, 3), gains) for module in modules]
        assert torch.equal(*outputs)
        for out in outputs:
            out.backward(gradient)
        for ours, theirs in zip(modules[0].stored(), modules[1].stored(), strict=True):
            for name, values in ours.tensors.items():
                torch.testing.assert_close(theirs.tensors[name], values, rtol=1e-5, atol=1e-6)
        # From the same numbers again: roundings of a step must not add up.
        for ours, theirs in zip(modules[0].stored(), modules[1].stored(), strict=True):
            for name, values in ours.tensors.items():
                theirs.tensors[name].copy_(values)


@pytest.mark.parametrize(
    ("optimizer", "dim", "extra", "reason"),
    [
        ("adam { beta1: 0.9 }", 8, "", "no equal of adam"),
        (SGD, 8, "weight_decay_factor: 0.1", "decays"),
        (SGD, 8, "clipping_limits { upper { value: 1 } }", "does not clip weights"),
        (SGD, 8, "gradient_clipping_limits { upper { value: 1 } }", "each sample's gradient"),
        (SGD, 8, "gradient_accumulation_status: DISABLED", "always accumulates"),
        (SGD, 6, "", "multiples of 4, not 6"),
        (
            SGD,
            8,
            "simulated_quantization { enabled: true num_buckets: 4 clipping_limits "
            "{ lower { value: -1 } upper { value: 1 } } }",
            "quantization",
        ),
    ],
)
def test_what_it_computes_otherwise_is_refused(optimizer: str, dim: int, extra: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"table 'a'.*fbgemm.*{reason}.*use \"compiled\""):
        build("fbgemm", optimizer, dim, extra)


def test_an_empty_accumulator_is_refused_before_anything_is_stepped() -> None:
    module = build("fbgemm", "adagrad {}")
    module.stored()[2].tensors["accumulators"][4] = 0.0
    before = [stored.tensors["parameters"].clone() for stored in module.stored()]
    out = module(torch.tensor([1, 1, 1, 4]), torch.arange(5))
    with pytest.raises(ValueError, match=r"accumulators: they must be positive, got 0\.0"):
        out.sum().backward()
    assert torch.equal(module.stored()[2].tensors["parameters"], before[2])


def test_through_the_public_api() -> None:
    config = tpuemb.load_config("""
        mode: TRAINING num_hosts: 1 num_tensor_cores: 1
        table_descriptor { name: "t" vocabulary_size: 10 dimension: 4 optimization_parameters {
            learning_rate { dynamic { tag: 0 } } adagrad {} } }
        feature_descriptor { name: "f" table_id: 0 input_shape: 4 }""")
    results = []
    for kernel in ("eager", "fbgemm"):
        embedding = tpuemb.TPUEmbedding(config, kernel=kernel)
        for rate in (0.1, 0.7):
            out = embedding({"f": torch.tensor([1, 2, 2, 9])})["f"]
            embedding.set_learning_rates([rate])  # counts for the backward, not for the forward
            out.square().sum().backward()
        results.append(embedding.retrieve_parameters()["t"])
    for name, values in results[0].items():
        torch.testing.assert_close(results[1][name], values, rtol=1e-5, atol=1e-6)
