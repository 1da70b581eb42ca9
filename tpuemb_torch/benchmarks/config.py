"""`bench_config`: how long loading, validating and planning of configurations take."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from tpuemb_torch.config import load_config
from tpuemb_torch.planning import make_plan
from tpuemb_torch.protos import tpu_embedding_configuration_pb2 as configuration_pb2


def configuration(tables: int) -> bytes:
    """A serialized configuration: tables of 1,000 to 1,000,000 rows, one feature each."""
    proto = configuration_pb2.TPUEmbeddingConfiguration(mode="TRAINING", num_hosts=1, num_tensor_cores=1)
    for index in range(tables):
        table = proto.table_descriptor.add(
            name=f"t{index}", vocabulary_size=10 ** (3 + index % 4), dimension=(16, 32, 64, 128)[index % 4]
        )
        table.optimization_parameters.learning_rate.constant = 0.01
        table.optimization_parameters.adagrad.SetInParent()
        proto.feature_descriptor.add(name=f"f{index}", table_id=index, input_shape=[1024])
    return proto.SerializeToString()


def bench_config(tables: Sequence[int], ranks: Sequence[int], repeats: int = 3) -> dict[str, Any]:
    """Measures loading (with validation), writing and planning.

    Args:
        tables: numbers of tables.
        ranks: numbers of ranks to plan for.
        repeats: the fastest of as many is taken.

    Returns:
        `{"rows": [{"tables", "ranks", "load_s", "write_s", "plan_s"}, ...]}`, ready for JSON.
    """
    rows = []
    for count in tables:
        serialized = configuration(count)
        load = min(_seconds(partial(load_config, serialized)) for _ in range(repeats))
        config = load_config(serialized)
        write = min(_seconds(config.serialize) for _ in range(repeats))
        for world in ranks:
            plan = _seconds(partial(make_plan, config, world, local_world_size=min(world, 8)))
            rows.append({"tables": count, "ranks": world, "load_s": load, "write_s": write, "plan_s": plan})
    return {"rows": rows}


def _seconds(call: Any) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def print_config_times(result: dict[str, Any], console: Console) -> None:
    """Prints what `bench_config` returned."""
    table = Table(title="Configurations: seconds")
    for heading in ("tables", "ranks", "load and validate", "write", "plan"):
        table.add_column(heading, justify="right")
    for row in result["rows"]:
        times = (f"{row['load_s']:.3f}", f"{row['write_s']:.3f}", f"{row['plan_s']:.2f}")
        table.add_row(f"{row['tables']:,}", f"{row['ranks']:,}", *times)
    console.print(table)
