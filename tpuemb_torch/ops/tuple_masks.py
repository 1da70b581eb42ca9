"""Tuple masks: which elements of deduplication data are integers and which are floats, in order.

A mask is a serialized TensorProto, int32 `[m, 2]`, whose rows (type, span) are a run-length description: type 0 is
integer, 1 is float.  Its values stand in `int_val`; `tensor_content`, which numpy helpers write, is not accepted.
Sources: tensorflow/core/framework/tensor.proto; SplitDedupData in tensorflow/core/tpu/ops/tpu_embedding_ops.cc.
"""

from __future__ import annotations

from typing import Any

import torch
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from torch import Tensor

INTEGER, FLOAT = 0, 1
_DT_INT32 = 3


def _tensor_proto() -> Any:
    """The message class of the part of TensorProto that a mask needs; other fields are unknown fields."""
    fields = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="tuple_mask.proto", package="tpuemb_torch", syntax="proto3")
    dim = file.message_type.add(name="Dim")
    dim.field.add(name="size", number=1, type=fields.TYPE_INT64, label=fields.LABEL_OPTIONAL)
    shape = file.message_type.add(name="Shape")
    shape.field.add(
        name="dim", number=2, type=fields.TYPE_MESSAGE, type_name=".tpuemb_torch.Dim", label=fields.LABEL_REPEATED
    )
    tensor = file.message_type.add(name="Tensor")
    tensor.field.add(name="dtype", number=1, type=fields.TYPE_INT32, label=fields.LABEL_OPTIONAL)
    tensor.field.add(
        name="tensor_shape",
        number=2,
        type=fields.TYPE_MESSAGE,
        type_name=".tpuemb_torch.Shape",
        label=fields.LABEL_OPTIONAL,
    )
    tensor.field.add(name="tensor_content", number=4, type=fields.TYPE_BYTES, label=fields.LABEL_OPTIONAL)
    tensor.field.add(name="int_val", number=7, type=fields.TYPE_INT32, label=fields.LABEL_REPEATED)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tpuemb_torch.Tensor"))


_TensorProto = _tensor_proto()


def serialize_tuple_mask(mask: Tensor) -> bytes:
    """The TensorProto of a mask.

    Args:
        mask: integer `[m, 2]`, rows (type, span).
    """
    message = _TensorProto(dtype=_DT_INT32, int_val=mask.reshape(-1).tolist())
    for size in mask.shape:
        message.tensor_shape.dim.add(size=size)
    serialized: bytes = message.SerializeToString()
    return serialized


def parse_tuple_mask(serialized: bytes) -> list[tuple[int, int]]:
    """Rows (type, span) of a serialized mask; none if its first axis is empty, whatever its rank.

    Raises:
        TypeError: if it is not bytes.
        ValueError: if it is not such a TensorProto, with what was expected.
    """
    if not isinstance(serialized, bytes):
        raise TypeError(f"tuple_mask must be a serialized TensorProto (bytes), got {type(serialized).__name__}")
    message = _TensorProto()
    try:
        message.ParseFromString(serialized)
    except DecodeError as error:
        raise ValueError(
            f"tuple_mask is not a serialized TensorProto ({len(serialized)} bytes do not parse)"
        ) from error
    shape = [dim.size for dim in message.tensor_shape.dim]
    if not shape:
        raise ValueError("tuple_mask is a scalar or has no shape; its shape must be [m, 2]")
    if shape[0] == 0:
        return []
    if message.dtype != _DT_INT32:
        raise ValueError(f"tuple_mask has data type {message.dtype}; it must be DT_INT32 ({_DT_INT32})")
    if len(shape) != 2 or shape[1] != 2 or shape[0] < 0:
        raise ValueError(f"tuple_mask has shape {shape}; it must be [m, 2], rows (type, span)")
    if message.tensor_content:
        raise ValueError("tuple_mask holds its values in tensor_content; they must be written as int_val")
    values = list(message.int_val)
    if len(values) != 2 * shape[0]:
        raise ValueError(f"tuple_mask of shape {shape} has {len(values)} int_val; it must have {2 * shape[0]}")
    rows = list(zip(values[::2], values[1::2], strict=True))
    for index, (kind, span) in enumerate(rows):
        if kind not in (INTEGER, FLOAT):
            raise ValueError(f"tuple_mask[{index}] has type {kind}; it must be 0 (integer) or 1 (float)")
        if span < 0:
            raise ValueError(f"tuple_mask[{index}] has span {span}; it must not be negative")
    return rows


def count(rows: list[tuple[int, int]], kind: int) -> int:
    """Elements of one type."""
    return sum(span for row_kind, span in rows if row_kind == kind)


def kinds(rows: list[tuple[int, int]]) -> Tensor:
    """The type of each element, in order."""
    spans = torch.tensor([span for _, span in rows], dtype=torch.int64)
    return torch.repeat_interleave(torch.tensor([kind for kind, _ in rows], dtype=torch.int64), spans)
