"""Ops that take deduplication data apart and put it together again.

How many ids a batch has is not known from the config, so what a program sees of the data is one integer: the number
of the batch, which the layer keeps.  Its size is therefore 1 and its tuple mask [[0, 1]] for every config.
Source: the ops of tensorflow/core/tpu/ops/tpu_embedding_ops.cc.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tpuemb_torch.config import Config
from tpuemb_torch.ops.system import check_config
from tpuemb_torch.ops.tuple_masks import FLOAT, INTEGER, count, kinds, parse_tuple_mask
from tpuemb_torch.preprocessing import DeduplicationData

Serialized = bytes | Config

_INTEGER_TYPES = (torch.int32, torch.int64, torch.uint32, torch.uint64)
_FLOAT_TYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, eq=False)
class DeduplicationTuple:
    """What `merge_dedup_data` returns; recv and send take it in the place of the data it was split from.

    Attributes:
        integers: the integer elements, rank 1.
        floats: the float elements, rank 1.
        kinds: the type of each element in order, 0 integer and 1 float, int64 rank 1.
    """

    integers: Tensor
    floats: Tensor
    kinds: Tensor


def split_dedup_data(
    input: DeduplicationData | DeduplicationTuple,
    integer_type: torch.dtype,
    float_type: torch.dtype,
    tuple_mask: bytes,
    config: Serialized = b"",
) -> tuple[Tensor, Tensor]:
    """Integers and floats of deduplication data, each in their order.

    Args:
        input: from `xla_recv_tpu_embedding_deduplication_data` or `merge_dedup_data`.
        integer_type: torch.int32, int64, uint32 or uint64.
        float_type: torch.float16, bfloat16 or float32.
        tuple_mask: serialized TensorProto, int32 `[m, 2]`, rows (type, span) with type 0 integer and 1 float, its
            values in int_val.  With m = 0 both results are empty.
        config: the installed config, or empty.

    Returns:
        The integers and the floats, rank 1, with as many elements as the mask has of their type.

    Raises:
        ValueError, TypeError: for a wrong mask, one that does not describe the input, or a wrong type.
    """
    _check_types(integer_type, float_type)
    _check_config(config)
    rows = parse_tuple_mask(tuple_mask)
    if not isinstance(input, DeduplicationData | DeduplicationTuple):
        raise TypeError(f"input must be deduplication data, got {type(input).__name__}")
    if not rows:
        return torch.empty(0, dtype=integer_type), torch.empty(0, dtype=float_type)
    if isinstance(input, DeduplicationData):
        input = DeduplicationTuple(torch.tensor([input.batch]), torch.empty(0), torch.tensor([INTEGER]))
    # The counts first: a span may be too large to be written out.
    counts = [count(rows, INTEGER), count(rows, FLOAT)]
    if counts != [input.integers.numel(), input.floats.numel()] or not torch.equal(kinds(rows), input.kinds):
        raise ValueError(
            f"tuple_mask {[list(row) for row in rows]} describes {counts[0]} integers and "
            f"{counts[1]} floats, but the data has types {input.kinds.tolist()}, in this order"
        )
    return _converted(input.integers, integer_type), input.floats.to(float_type)


def merge_dedup_data(
    integer_tensor: Tensor, float_tensor: Tensor, tuple_mask: bytes, config: Serialized = b""
) -> DeduplicationTuple:
    """Puts together what `split_dedup_data` took apart.

    Args:
        integer_tensor: int32, int64, uint32 or uint64, rank 1.
        float_tensor: float16, bfloat16 or float32, rank 1.
        tuple_mask: as for `split_dedup_data`.
        config: the installed config, or empty.

    Raises:
        ValueError, TypeError: for a wrong mask, rank or dtype, or numbers of elements that are not the mask's.
    """
    _check_types(integer_tensor.dtype, float_tensor.dtype)
    _check_config(config)
    rows = parse_tuple_mask(tuple_mask)
    for name, tensor, kind in (("integer_tensor", integer_tensor, INTEGER), ("float_tensor", float_tensor, FLOAT)):
        if tensor.dim() != 1:
            raise ValueError(f"{name} has shape {list(tensor.shape)}; it must have rank 1")
        if tensor.numel() != count(rows, kind):
            raise ValueError(f"{name} has {tensor.numel()} elements, but tuple_mask describes {count(rows, kind)}")
    return DeduplicationTuple(integer_tensor.detach(), float_tensor.detach(), kinds(rows))


def compute_dedup_data_size(config: Serialized) -> Tensor:
    """Number of elements of deduplication data: int32 scalar, 1 (the number of the batch)."""
    check_config(config)
    return torch.tensor(1, dtype=torch.int32)


def compute_dedup_data_tuple_mask(config: Serialized) -> Tensor:
    """Tuple mask of deduplication data: int32 `[1, 2]`, one integer; see `tuple_masks.serialize_tuple_mask`."""
    check_config(config)
    return torch.tensor([[INTEGER, 1]], dtype=torch.int32)


def compute_dedup_data_size_v2(
    config: Serialized, embedding_partitions: object = b"", hbm_buffers_config: object = b"", tpu_topology: object = b""
) -> Tensor:
    """The first version; partitions, buffers and topology describe TPU hardware and are not used."""
    return compute_dedup_data_size(config)


def compute_dedup_data_tuple_mask_v2(
    config: Serialized, embedding_partitions: object = b"", hbm_buffers_config: object = b"", tpu_topology: object = b""
) -> Tensor:
    """The first version; partitions, buffers and topology describe TPU hardware and are not used."""
    return compute_dedup_data_tuple_mask(config)


def identified(data: DeduplicationData | DeduplicationTuple) -> DeduplicationData:
    """Deduplication data for recv and send: merged data names its batch, whose input the layer keeps.

    Raises:
        ValueError: for merged data that is not one integer.
    """
    if not isinstance(data, DeduplicationTuple):
        return data
    if data.kinds.tolist() != [INTEGER]:
        raise ValueError(
            f"merged deduplication data has {data.integers.numel()} integers and {data.floats.numel()} floats; "
            "recv and send need what compute_dedup_data_tuple_mask describes: one integer, the number of the batch"
        )
    return DeduplicationData(int(data.integers.item()), (), ())


def _check_types(integer_type: torch.dtype, float_type: torch.dtype) -> None:
    if integer_type not in _INTEGER_TYPES:
        raise TypeError(f"integers must be int32, int64, uint32 or uint64, got {integer_type}")
    if float_type not in _FLOAT_TYPES:
        raise TypeError(f"floats must be float16, bfloat16 or float32, got {float_type}")


def _check_config(config: Serialized) -> None:
    if config:
        check_config(config)


def _converted(integers: Tensor, dtype: torch.dtype) -> Tensor:
    limits = torch.iinfo(dtype)
    for index, value in enumerate(integers.tolist()):
        if not limits.min <= value <= limits.max:
            raise ValueError(f"integer element {index} is {value}, beyond {dtype}: ask for a wider integer_type")
    return integers.to(dtype)
