"""The lookup and the order of its ids: by C++ beside a compiled step, by torch otherwise; the results are the same."""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from tpuemb_torch.kernels.native import floats, integers, load_library, source_of
from tpuemb_torch.preprocessing import SortedIds, sort_ids

_MOST = 1 << 32


class TorchLookup:
    """By torch operations, on any device."""

    @staticmethod
    def add_first_rows(ids: Tensor, bounds: Tensor, first_rows: Tensor) -> Tensor:
        """Rows of a buffer.

        Args:
            ids: int64 `[n]`, rows of each feature's table.
            bounds: int64 `[features + 1]`, where each feature's ids begin, and n.
            first_rows: int64 `[features]`, first row of each feature's table in the buffer.
        """
        return ids + torch.repeat_interleave(first_rows, bounds.diff(), output_size=ids.numel())

    @staticmethod
    def bags(offsets: Tensor, features: int, batch: int, count: int) -> Tensor:
        """int64 `[count]`: the row of the output that each id adds to.

        Args:
            offsets: int64 `[features * batch + 1]`, from 0 to count.
            features: number of features; bag (feature f, sample b) is row `b * features + f`.
            batch: number of samples.
            count: number of ids.
        """
        rows = torch.arange(batch, device=offsets.device)
        if features > 1:
            rows = (rows * features + torch.arange(features, device=offsets.device)[:, None]).reshape(-1)
        return torch.repeat_interleave(rows, offsets.diff(), output_size=count)

    @staticmethod
    def look_up(
        ids: Tensor, offsets: Tensor, gains: Tensor | None, weights: Tensor, features: int, batch: int
    ) -> Tensor:
        """Weighted sums of rows, float32 `[batch, features * dim]`.

        Args:
            ids: int64 `[n]`, rows of `weights`.
            offsets: int64 `[features * batch + 1]`, from 0 to n.
            gains: float32 `[n]` or None for 1.0 each.
            weights: float32 `[rows, dim]`.
            features: number of features; bags are feature-major.
            batch: number of samples.
        """
        dim = weights.shape[1]
        out = functional.embedding_bag(
            ids, weights, offsets, mode="sum", include_last_offset=True, per_sample_weights=gains
        )
        if features == 1:
            return out
        return out.view(features, batch, dim).transpose(0, 1).reshape(batch, features * dim).contiguous()

    @staticmethod
    def sort(ids: Tensor, limit: int) -> SortedIds:
        """Sorts ids, int64 `[n]`, each in `[0, limit)`."""
        return sort_ids(ids, limit)


class NativeLookup:
    """By C++, on the CPU."""

    @staticmethod
    def build() -> None:
        """Compiles it, if that was not done yet.

        Raises:
            BuildError: without a C++ compiler that works.
        """
        _library()

    @staticmethod
    def add_first_rows(ids: Tensor, bounds: Tensor, first_rows: Tensor) -> Tensor:
        """As `TorchLookup.add_first_rows`."""
        ids, bounds, first_rows = (integers(tensor) for tensor in (ids, bounds, first_rows))
        result = torch.empty_like(ids)
        _library().tpuemb_add_first_rows(
            *(_at(t) for t in (ids, bounds, first_rows)), *_numbers(first_rows.numel()), _at(result)
        )
        return result

    @staticmethod
    def bags(offsets: Tensor, features: int, batch: int, count: int) -> Tensor:
        """As `TorchLookup.bags`."""
        offsets = integers(offsets)
        result = torch.empty(count, dtype=torch.int64)
        _library().tpuemb_bags(_at(offsets), *_numbers(features, batch), _at(result))
        return result

    @staticmethod
    def look_up(
        ids: Tensor, offsets: Tensor, gains: Tensor | None, weights: Tensor, features: int, batch: int
    ) -> Tensor:
        """As `TorchLookup.look_up`."""
        ids, offsets, weights = integers(ids), integers(offsets), floats(weights)
        gains = None if gains is None else floats(gains)
        rows, dim = weights.shape
        result = torch.empty(batch, features * dim, dtype=torch.float32)
        at = (_at(ids), _at(offsets), None if gains is None else _at(gains), _at(weights))
        outside = _library().tpuemb_look_up(*at, *_numbers(rows, dim, features, batch), _at(result))
        if outside:
            raise IndexError(f"{outside} of {ids.numel()} ids are not in [0, {rows}), the rows of their tables")
        return result

    @staticmethod
    def sort(ids: Tensor, limit: int) -> SortedIds:
        """As `TorchLookup.sort`."""
        n = ids.numel()
        if limit > _MOST or n >= _MOST:
            return sort_ids(ids, limit)
        ids = integers(ids)
        scratch, order, rows = (torch.empty(size, dtype=torch.int64) for size in (2 * n, n, n))
        starts = torch.empty(n + 1, dtype=torch.int64)
        arguments = (*_numbers(n, limit), *(_at(t) for t in (scratch, rows, starts, order)))
        distinct = _library().tpuemb_sort(_at(ids), *arguments)
        return SortedIds(rows[:distinct], starts[: distinct + 1], order)


@cache
def _library() -> ctypes.CDLL:
    library = load_library(source_of("lookup.cpp"), "the lookup")
    library.tpuemb_sort.restype = library.tpuemb_look_up.restype = ctypes.c_int64
    return library


def _at(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _numbers(*values: int) -> tuple[ctypes.c_int64, ...]:
    """The values and the number of threads."""
    return tuple(ctypes.c_int64(value) for value in (*values, torch.get_num_threads()))
