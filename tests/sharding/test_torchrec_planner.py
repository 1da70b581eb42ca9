"""TorchRec's own planner over our collection: it counts slots, and what it proposes can be had."""

from __future__ import annotations

import pytest
from torch import nn
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import ShardingOption

import tpuemb_torch as tpuemb

ROWS, COLUMNS = 1000, 8


def options(optimizer: str) -> list[ShardingOption]:
    config = f"""mode: TRAINING num_hosts: 1 num_tensor_cores: 1
        table_descriptor {{ name: "t" vocabulary_size: {ROWS} dimension: {COLUMNS} optimization_parameters {{
            learning_rate {{ constant: 0.5 }} {optimizer} }} }}
        feature_descriptor {{ name: "f" table_id: 0 input_shape: 4 }}"""
    model = nn.ModuleDict({"embedding": tpuemb.TPUEmbeddingBagCollection(config, device="meta")})
    return EmbeddingEnumerator(Topology(world_size=2, compute_device="cpu"), batch_size=4).enumerate(
        model, tpuemb.sharders()
    )


@pytest.mark.parametrize(
    ("optimizer", "slots"),
    [("stochastic_gradient_descent {}", 0), ("adagrad {}", 1), ("adam {}", 2), ("centered_rms_prop {}", 2)],
)
def test_slots_are_counted(optimizer: str, slots: int) -> None:
    """Two at most: it knows no optimizer with more."""

    def stored(found: list[ShardingOption]) -> list[int]:
        return [sum(shard.storage.ddr for shard in option.shards if shard.storage) for option in found]

    for own, plain in zip(stored(options(optimizer)), stored(options("stochastic_gradient_descent {}")), strict=True):
        assert own - plain == slots * ROWS * COLUMNS * 4


def test_every_proposal_is_one_of_ours() -> None:
    assert {(option.sharding_type, option.compute_kernel) for option in options("adagrad {}")} == {
        ("row_wise", "fused"),
        ("table_wise", "fused"),
        ("column_wise", "fused"),
    }
