"""On a CUDA device: the formulas through Triton give what they give on the CPU."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.test_compiled import BAG, BATCH, ROWS, rates
from tests.kernels.test_compiled import optimizers as optimizers_of
from tests.kernels.test_kernel import table
from tests.optimizers.cases import CASES, Case, state
from tpuemb_torch.kernels import StepSource, TableBatchedEmbedding, TablePart

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("kernel", ["eager", "compiled", "auto"])
@pytest.mark.parametrize("dim", [1, 3, 64])
def test_every_rule(case: Case, kernel: str, dim: int) -> None:
    from dataclasses import replace

    import numpy as np

    rng = np.random.default_rng(dim)
    parts = [
        TablePart.whole(replace(table(f"t{i}", ROWS, dim, "adagrad {}"), optimizer=optimizer))
        for i, optimizer in enumerate(optimizers_of(case))
    ]
    steps = StepSource(2)
    steps.set_rates(rates(case).tolist())
    cpu = TableBatchedEmbedding(parts, [0, 1, 2], torch.device("cpu"), 0, steps, "eager")
    gpu = TableBatchedEmbedding(parts, [0, 1, 2], torch.device("cuda"), 0, steps, kernel)
    for on_cpu, on_gpu in zip(cpu.stored(), gpu.stored(), strict=True):
        w, _, slots = state(case, rng, (ROWS, dim))
        for name, value in zip(on_cpu.tensors, (w, *slots), strict=True):
            start = torch.from_numpy(np.broadcast_to(value, (ROWS, dim)).astype(np.float32))
            on_cpu.tensors[name].copy_(start)
            on_gpu.tensors[name].copy_(start)
    ids = torch.from_numpy(rng.integers(0, ROWS - 8, 3 * BATCH * BAG))
    offsets, gains = torch.arange(0, ids.numel() + 1, BAG), torch.rand(ids.numel())
    gradient = torch.randn(BATCH, 3 * dim)
    outputs = [cpu(ids, offsets, gains), gpu(ids.cuda(), offsets.cuda(), gains.cuda())]
    torch.testing.assert_close(outputs[1].cpu(), outputs[0], rtol=1e-5, atol=1e-6)
    outputs[0].backward(gradient)
    outputs[1].backward(gradient.cuda())
    for on_cpu, on_gpu in zip(cpu.stored(), gpu.stored(), strict=True):
        for name, values in on_cpu.tensors.items():
            torch.testing.assert_close(on_gpu.tensors[name].cpu(), values, rtol=2e-5, atol=2e-5, equal_nan=True)
