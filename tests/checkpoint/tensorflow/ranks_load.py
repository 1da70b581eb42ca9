"""What ranks run in test_commands.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tpuemb_torch as tpuemb
from tpuemb_torch.checkpoint import load


def load_and_retrieve(rank: int, world: int, config: bytes, path: Path) -> dict[str, Any]:
    embedding = tpuemb.shard(tpuemb.TPUEmbedding(tpuemb.load_config(config), seed=3), "row_wise")
    load(path, embedding)
    tables = embedding.retrieve_parameters()
    return {table: {slot: value.numpy() for slot, value in slots.items()} for table, slots in tables.items()}
