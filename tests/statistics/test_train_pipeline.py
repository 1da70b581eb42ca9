"""TrainPipeline: each batch counts once, also one that is looked up again after a drain."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tpuemb_torch as tpuemb
from tests.distributed.cases import COMBINERS, config_text, make_batch

STEPS = 4


class Model(torch.nn.Module):
    def __init__(self, pipelined: bool) -> None:
        super().__init__()
        text = config_text("adagrad") + f"pipeline_execution_with_tensor_core: {str(pipelined).lower()}"
        self.embedding = tpuemb.TPUEmbedding(tpuemb.load_config(text), COMBINERS, kernel="eager")

    def forward(self, batch: dict[str, Any]) -> tuple[Tensor, None]:
        return torch.stack([value.sum() for value in self.embedding(batch["features"]).values()]), None


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("drained", [False, True])
def test_each_batch_counts_once(pipelined: bool, drained: bool) -> None:
    model = Model(pipelined)
    model.embedding.set_learning_rates([0.1, 0.1])
    model.embedding.collect_stats()
    pipeline = tpuemb.TrainPipeline(model, None)
    batches = [make_batch(6, step) for step in range(STEPS)]
    iterator = iter([{"features": batch} for batch in batches])
    for _ in batches:
        pipeline.progress(iterator)
        if drained:
            model.embedding.retrieve_parameters()
    pipeline.close()
    expected = Model(pipelined).embedding
    expected.collect_stats()
    with torch.no_grad():
        for batch in batches:
            expected(batch)
    assert model.embedding.stats() == expected.stats()
    assert expected.stats().table("user").batches == STEPS
