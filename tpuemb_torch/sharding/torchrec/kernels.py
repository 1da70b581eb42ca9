"""Our kernel where TorchRec would build FBGEMM's: `TableBatchedEmbedding` under its sharded lookups."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.batched_embedding_kernel import BaseBatchedEmbeddingBag, EmbeddingFusedOptimizer
from torchrec.distributed.composable.table_batched_embedding_slice import TableBatchedEmbeddingSlice
from torchrec.distributed.embedding_lookup import GroupedPooledEmbeddingsLookup
from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo
from torchrec.distributed.embedding_types import (
    GroupedEmbeddingConfig,
    ShardedEmbeddingTable,
)
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingSharding
from torchrec.distributed.sharding.twrw_sharding import TwRwPooledEmbeddingSharding
from torchrec.distributed.types import (
    ShardingEnv,
    ShardingType,
)
from torchrec.optim.fused import EmptyFusedOptimizer, FusedOptimizerModule

from tpuemb_torch.collection import TPUEmbeddingBagCollection
from tpuemb_torch.fused_weights import NoticesClipping
from tpuemb_torch.kernels import StepInputs, TableBatchedEmbedding, TablePart
from tpuemb_torch.sharding.placement import shard_rows


def row_shard_of(sharding: Any, rank: int) -> tuple[int, int] | None:
    """A rank's shard, and how many there are, of tables that a sharding cuts by rows; None for other tables."""
    if isinstance(sharding, NodeRowWiseSharding):
        return rank % sharding._local_size, sharding._local_size
    if isinstance(sharding, RwPooledEmbeddingSharding):
        return rank, sharding._world_size
    return None


def table_parts(
    config: GroupedEmbeddingConfig, collection: TPUEmbeddingBagCollection, row_shard: tuple[int, int] | None
) -> list[TablePart]:
    """What a rank holds of the tables of one of TorchRec's groups; see `row_shard_of`."""
    tables = {collection.bag_names[table.name]: table for table in collection.config.tables}
    strategy = collection.config.sharding_strategy
    parts = []
    for local in config.embedding_tables:
        table = tables[local.name]
        rows = range(table.vocabulary_size)
        if row_shard is not None:
            shard, shards = row_shard
            rows = shard_rows(table.vocabulary_size, shards, shard, strategy)
        assert local.local_metadata is not None
        first_column = local.local_metadata.shard_offsets[1]
        parts.append(TablePart(table, rows, range(first_column, first_column + local.local_cols)))
    return parts


class FusedSlice(NoticesClipping, TableBatchedEmbeddingSlice):  # type: ignore[misc]
    """TorchRec's weight of a table on this rank."""


class TableOptimizer(EmbeddingFusedOptimizer):
    """TorchRec's fused optimizer of a kernel, whose "lr" is not that of any table."""

    _scheduled = False

    def step(self, closure: Any = None) -> None:
        """Refuses a rate, and warns, once, of a scheduler, whose multiples of 0 would be ignored without a word."""
        super().step(closure)
        if not self._scheduled and any("initial_lr" in group for group in self.param_groups):  # torch's schedulers do
            self._scheduled = True
            names = sorted({part.table.name for part in self._emb_module.parts})
            warnings.warn(
                f"tables {names}: a learning-rate scheduler was given their fused optimizer and has no effect on them. "
                "Their rates are in their configuration; schedulers drive dynamic ones through "
                "tpuemb_torch.LearningRates, and other parameters through the optimizer of those alone",
                stacklevel=2,
            )


class FusedTables(BaseBatchedEmbeddingBag[Tensor], FusedOptimizerModule):
    """TorchRec's wrapper of a kernel, around a `TableBatchedEmbedding`."""

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        collection: TPUEmbeddingBagCollection,
        steps: Callable[[], StepInputs],
        row_shard: tuple[int, int] | None,
        pg: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        super().__init__(config, pg, device, None)
        self._emb_module = TableBatchedEmbedding(
            table_parts(config, collection, row_shard),
            self._feature_table_map,
            device,
            collection.seed,
            steps,
            collection.kernel_kind,
        )
        self._optim = TableOptimizer(config, self._emb_module, pg)

    @property
    def emb_module(self) -> TableBatchedEmbedding:
        return self._emb_module

    @property
    def fused_optimizer(self) -> EmbeddingFusedOptimizer:
        return self._optim

    @property
    def _param_per_table(self) -> dict[str, TableBatchedEmbeddingSlice]:
        """One flat slice per table, over all its parts on this rank (several if column-wise)."""
        kernel = self._emb_module
        weights, state = kernel.split_embedding_weights(), kernel.get_optimizer_state()
        slices: dict[str, TableBatchedEmbeddingSlice] = {}
        stored = [
            (group.flat("parameters"), first * group.dim, part)
            for group in kernel.table_groups()
            for first, part in zip(group.first_rows, group.parts, strict=False)
        ]
        names = [table.name for table in self._config.embedding_tables]
        places = [(name, *place) for name, place in zip(names, stored, strict=True)]
        for name, data, start, part in places:
            if name in slices:
                continue
            parts = [(s, p) for n, d, s, p in places if n == name and d is data]
            last, last_part = parts[-1]
            end = last + len(last_part.rows) * len(last_part.columns)
            weight = FusedSlice(
                data=data, start_offset=start, end_offset=end, num_embeddings=-1, embedding_dim=len(part.columns)
            )
            weight._in_backward_optimizers = [
                EmbeddingFusedOptimizer(
                    config=self._config,
                    emb_module=kernel,
                    pg=self._pg,
                    create_for_table=name,
                    param_weight_for_table=weight,
                    embedding_weights_by_table=weights,
                    all_optimizer_states=state,
                )
            ]
            slices[name] = weight
        return slices

    @_param_per_table.setter
    def _param_per_table(self, value: dict[str, Any]) -> None:
        """The base class assigns an empty dict before there are tables."""

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        yield from ()

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        for name, weight in self.named_split_embedding_weights(prefix, recurse, remove_duplicate):
            parameter = nn.Parameter(weight)
            parameter._in_backward_optimizers = [EmptyFusedOptimizer()]  # type: ignore[attr-defined]
            yield name, parameter


class FusedLookups(GroupedPooledEmbeddingsLookup):
    """TorchRec's lookup of one sharding type, with our kernels.

    `row_shard` is this rank's shard, and how many there are, of tables that are cut by rows; None for other tables.
    """

    def __init__(
        self,
        collection: TPUEmbeddingBagCollection,
        steps: Callable[[], StepInputs],
        row_shard: tuple[int, int] | None,
        grouped_configs: list[GroupedEmbeddingConfig],
        device: torch.device,
        pg: dist.ProcessGroup,
        env: ShardingEnv,
    ) -> None:
        # The base class builds the kernels in its constructor.
        object.__setattr__(self, "_build", (collection, steps, row_shard))
        super().__init__(grouped_configs=grouped_configs, device=device, pg=pg, env=env)
        object.__delattr__(self, "_build")
        self.step_inputs = steps

    def _create_embedding_kernel(
        self,
        config: GroupedEmbeddingConfig,
        device: torch.device | None,
        pg: dist.ProcessGroup | None,
        sharding_type: ShardingType | None,
        env: ShardingEnv | None,
    ) -> FusedTables:
        assert pg is not None and device is not None
        collection, steps, row_shard = object.__getattribute__(self, "_build")
        return FusedTables(config, collection, steps, row_shard, pg, device)


class NodeRowWiseSharding(TwRwPooledEmbeddingSharding):
    """TorchRec's table-row-wise sharding, whose sharded tensors have the stored rows (its own have the padded ones)."""

    def _shard(self, sharding_infos: list[EmbeddingShardingInfo]) -> list[list[ShardedEmbeddingTable]]:
        tables_per_rank = super()._shard(sharding_infos)
        for table in (table for tables in tables_per_rank for table in tables):
            assert table.global_metadata is not None
            rows = sum(shard.shard_sizes[0] for shard in table.global_metadata.shards_metadata)
            table.global_metadata.size = torch.Size([rows, table.embedding_dim])
        return tables_per_rank
