"""The distinct exchange as one of TorchRec's shardings: its input dist, lookup and output dist."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.embedding_sharding import EmbeddingShardingContext
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingSharding
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingSharding
from torchrec.distributed.types import Awaitable, NoWait, ShardingType, ShardMetadata
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tpuemb_torch.collection import TPUEmbeddingBagCollection
from tpuemb_torch.kernels import group_runs
from tpuemb_torch.kernels.constants import Constant
from tpuemb_torch.kernels.lookup import NativeLookup, TorchLookup
from tpuemb_torch.preprocessing import SortedIds
from tpuemb_torch.sharding.addresses import RowAddresses, TableShard
from tpuemb_torch.sharding.distinct import ExchangeLayout, LookupFunctions, PoolRows, ReturnRows, RowExchange
from tpuemb_torch.sharding.torchrec.kernels import FusedLookups, NodeRowWiseSharding, row_shard_of, table_parts


@dataclass(eq=False)
class RequestedRows:
    """A batch after the input dist: what is asked of this rank, and what it needs to pool its own bags.

    Attributes:
        exchange: what travels.
        asked: int64 `[n]` per own block, rows of its buffer.
        ordered: the batch's ids, sorted, per dimension.
        offsets: int64 `[features * batch + 1]` per dimension.
        gains: float32 `[n]` per dimension, or None for 1.0 each.
    """

    exchange: RowExchange
    asked: list[Tensor]
    ordered: list[SortedIds]
    offsets: list[Tensor]
    gains: list[Tensor | None]

    def variable_stride_per_key(self) -> bool:
        """TorchRec asks: there is one batch size."""
        return False

    def record_stream(self, stream: torch.Stream) -> None:
        """Keeps the memory until a CUDA stream is done with it."""
        tensors = [*self.asked, *self.offsets, *(gains for gains in self.gains if gains is not None)]
        for ids in self.ordered:
            tensors += [ids.rows, ids.starts, ids.order]
        for tensor in tensors:
            tensor.record_stream(stream)


@dataclass(eq=False)
class FoundRows:
    """Rows that were asked of this rank, float32 `[n, dimension]` per own block, and the batch they are for."""

    rows: list[Tensor]
    requested: RequestedRows


class DistinctLookups(FusedLookups):
    """The lookup of rows that ranks ask for."""

    layout: ExchangeLayout

    def forward(self, requested: RequestedRows) -> FoundRows:
        """Looks the rows up; the backward steps them."""
        asked = [requested.asked[block] for block in self.layout.block_of_group]
        counts = [requested.exchange.asked[:, block].tolist() for block in self.layout.block_of_group]
        found: list[Tensor] = []
        for module in self._emb_modules:
            first, kernel = len(found), module.emb_module
            last = first + len(kernel.groups)
            found += kernel.look_up_rows(asked[first:last], counts[first:last])
        return FoundRows([found[block.group] for block in self.layout.own], requested)

    def functions(self) -> LookupFunctions:
        """What sorts and pools on this rank: C++ once a kernel's step is."""
        kernels = [module.emb_module for module in self._emb_modules]
        native = any(group.step.lookup is NativeLookup for kernel in kernels for group in kernel.table_groups())
        return NativeLookup if native else TorchLookup

    @property
    def handle(self) -> Tensor:
        """An empty tensor that requires grad."""
        return self._dummy_embs_tensor


class DistinctInputDist(nn.Module):
    """Distinct rows of the batch to the ranks that hold them."""

    def __init__(self, layout: ExchangeLayout, group: dist.ProcessGroup, lookups: DistinctLookups) -> None:
        super().__init__()
        self._layout = layout
        self._group = group
        self._functions = lookups.functions
        self._starts = Constant(layout.addresses.starts, torch.int64)

    def forward(self, features: KeyedJaggedTensor) -> Awaitable[Awaitable[RequestedRows]]:
        """Sorts the ids and starts to tell each rank how many rows it will be asked for."""
        layout, batch = self._layout, features.stride()
        addresses = layout.addresses
        lengths, values, weights = features.lengths(), features.values(), features.weights_or_none()
        count = sum(addresses.features)
        ids_per_feature = lengths.view(count, batch).sum(1)
        ids = addresses.of(values, ids_per_feature)
        ordered = self._functions().sort(ids, addresses.rows)
        starts = self._starts.on(ids.device)
        bounds = torch.searchsorted(ordered.rows, starts)
        wanted = bounds.diff()
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        own_offsets, own_gains, first, begin = [], [], 0, 0
        own_ids = _ids_per_dimension(ids_per_feature, addresses.features, ids.numel())
        for number, numel in zip(addresses.features, own_ids, strict=True):
            bags = offsets[first * batch : (first + number) * batch + 1]
            own_offsets.append(bags - begin if begin else bags)
            own_gains.append(None if weights is None else weights[begin : begin + numel])
            first, begin = first + number, begin + numel
        rows = ordered.rows - torch.repeat_interleave(starts[:-1], wanted, output_size=ordered.rows.numel())
        by_dimension = ordered.split(addresses.first_of_dimension)
        return _CountsUnderWay(
            layout, self._group, wanted, rows.to(layout.id_dtype), (by_dimension, own_offsets, own_gains)
        )


def _ids_per_dimension(ids_per_feature: Tensor, features: Sequence[int], total: int) -> list[int]:
    """Numbers of ids of each dimension's features; only several dimensions make the host wait for the device, once."""
    if len(features) == 1:
        return [total]
    sums: list[int] = torch.stack([run.sum() for run in ids_per_feature.split(list(features))]).tolist()
    return sums


class _CountsUnderWay(Awaitable[Awaitable[RequestedRows]]):
    def __init__(
        self, layout: ExchangeLayout, group: dist.ProcessGroup, wanted: Tensor, rows: Tensor, batch: tuple[Any, ...]
    ) -> None:
        super().__init__()
        self._layout, self._group, self._wanted, self._rows, self._batch = layout, group, wanted, rows, batch
        ranks, own = len(layout.blocks_of), len(layout.own)
        to_ranks = wanted if layout.in_order else wanted[layout.order.on(wanted.device)]
        self._asked = wanted.new_empty(ranks * own)
        self._work = dist.all_to_all_single(
            self._asked, to_ranks.contiguous(), [own] * ranks, layout.blocks_of, group=group, async_op=True
        )

    def _wait_impl(self) -> Awaitable[RequestedRows]:
        assert self._work is not None
        self._work.wait()
        asked = self._asked.view(len(self._layout.blocks_of), len(self._layout.own))
        exchange = RowExchange(self._layout, self._wanted, asked, self._group, self._rows.device)
        return _IdsUnderWay(exchange, self._rows, self._batch)


class _IdsUnderWay(Awaitable[RequestedRows]):
    def __init__(self, exchange: RowExchange, rows: Tensor, batch: tuple[Any, ...]) -> None:
        super().__init__()
        self._exchange, self._batch = exchange, batch
        self._arriving, self._work = exchange.send_ids(rows)

    def _wait_impl(self) -> RequestedRows:
        self._work.wait()
        return RequestedRows(self._exchange, self._exchange.received_ids(self._arriving), *self._batch)


class DistinctOutputDist(nn.Module):
    """Rows to the ranks that asked for them, which pool their bags."""

    def __init__(self, layout: ExchangeLayout, lookups: DistinctLookups) -> None:
        super().__init__()
        self._features = layout.addresses.features
        self._functions = lookups.functions
        self._handle, self._step_inputs = lookups.handle, lookups.step_inputs

    def forward(self, found: FoundRows, context: EmbeddingShardingContext | None = None) -> Awaitable[Tensor]:
        """float32 `[batch, sum of the features' dims]`, features as the sharding has them."""
        batch = found.requested
        rows = ReturnRows.apply(self._handle, batch.exchange, self._step_inputs, *found.rows)
        functions = self._functions()
        pooled = [
            PoolRows.apply(*parts, functions)
            for parts in zip(rows, batch.ordered, batch.offsets, batch.gains, self._features, strict=True)
        ]
        return NoWait(pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=1))


class DistinctSharding:
    """What makes a sharding of TorchRec exchange distinct rows; its features come by ascending dimension."""

    layout: ExchangeLayout
    lookups: DistinctLookups
    _env: Any
    _grouped_embedding_configs_per_rank: Any

    def prepare(self, collection: TPUEmbeddingBagCollection, lookups: DistinctLookups) -> None:
        """Lays the exchange out; the dists are made after it."""
        table_of = {key.name: key.table for key in collection.keys}
        addresses = RowAddresses(self._shards(collection), [table_of[name] for name in self.feature_names()])
        lookups.layout = self.layout = ExchangeLayout(addresses, self._env.rank, self._env.world_size)
        self.lookups = lookups

    def _shards(self, collection: TPUEmbeddingBagCollection) -> list[TableShard]:
        shards = []
        for rank, configs in enumerate(self._grouped_embedding_configs_per_rank):
            cut, group = row_shard_of(self, rank), 0
            for config in configs:
                parts = table_parts(config, collection, cut)
                for run in group_runs(parts, collection.kernel_kind):
                    first_row = 0
                    for part in (parts[number] for number in run):
                        place = (0 if cut is None else cut[0], rank, group, len(part.columns))
                        shards.append(TableShard(part.table.name, *place, first_row, len(part.rows)))
                        first_row += len(part.rows)
                    group += 1
        return shards

    def create_input_dist(self, device: torch.device | None = None) -> DistinctInputDist:
        """TorchRec's hook."""
        return DistinctInputDist(self.layout, self._env.process_group, self.lookups)

    def create_output_dist(self, device: torch.device | None = None) -> DistinctOutputDist:
        """TorchRec's hook."""
        return DistinctOutputDist(self.layout, self.lookups)

    def _by_dimension(self, values: Sequence[Any]) -> list[Any]:
        dimensions: list[int] = super().embedding_dims()  # type: ignore[misc]
        return [values[feature] for feature in sorted(range(len(dimensions)), key=dimensions.__getitem__)]

    def feature_names(self) -> list[str]:
        """Keys, by ascending dimension, as in the other lists."""
        return self._by_dimension(super().feature_names())  # type: ignore[misc]

    def embedding_names(self) -> list[str]:
        """Names of the output's runs of columns."""
        return self._by_dimension(super().embedding_names())  # type: ignore[misc]

    def embedding_dims(self) -> list[int]:
        """Their widths."""
        return self._by_dimension(super().embedding_dims())  # type: ignore[misc]

    def embedding_shard_metadata(self) -> list[ShardMetadata | None]:
        """Their shards."""
        return self._by_dimension(super().embedding_shard_metadata())  # type: ignore[misc]


class DistinctRowWiseSharding(DistinctSharding, RwPooledEmbeddingSharding):
    """Row-wise."""


class DistinctTableWiseSharding(DistinctSharding, TwPooledEmbeddingSharding):
    """Table-wise."""


class DistinctNodeRowWiseSharding(DistinctSharding, NodeRowWiseSharding):
    """Table-row-wise."""


#: By TorchRec's kind of sharding; column-wise has none.
DISTINCT_SHARDINGS: dict[str, Any] = {
    ShardingType.ROW_WISE.value: DistinctRowWiseSharding,
    ShardingType.TABLE_WISE.value: DistinctTableWiseSharding,
    ShardingType.TABLE_ROW_WISE.value: DistinctNodeRowWiseSharding,
}
