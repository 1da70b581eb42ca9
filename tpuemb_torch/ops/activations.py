"""tpu_embedding_activations: an identity that catches the gradient on its way back, for a later send."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from tpuemb_torch.embedding import TPUEmbedding
from tpuemb_torch.ops.system import current

Gradients = dict[tuple[int, int], Tensor]

#: Per layer, so that a newly configured one begins without gradients.
_captured: WeakKeyDictionary[TPUEmbedding, Gradients] = WeakKeyDictionary()


class _Capture(Function):
    @staticmethod
    def forward(ctx: Any, variable: Tensor, activations: Tensor, layer: TPUEmbedding, key: tuple[int, int]) -> Tensor:
        ctx.layer, ctx.key, ctx.variable_shape = layer, key, variable.shape
        return activations.view_as(activations)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        table_id, lookup_id = ctx.key
        if ctx.layer.config.mode == "inference":
            raise RuntimeError("gradients of tpu_embedding_activations in a config of mode INFERENCE, which takes none")
        gradients = _captured.setdefault(ctx.layer, {})
        if ctx.key in gradients:
            raise RuntimeError(
                f"a second gradient for table_id {table_id} and lookup_id {lookup_id}: take the first with "
                "captured_gradients(), and give each activation its own lookup_id"
            )
        gradients[ctx.key] = gradient.detach().clone()
        return gradient.new_zeros(ctx.variable_shape), gradient.new_zeros(gradient.shape), None, None


def tpu_embedding_activations(
    embedding_variable: Tensor, sliced_activations: Tensor, table_id: int, lookup_id: int
) -> Tensor:
    """The activations, whose gradient the backward keeps for `captured_gradients` instead of passing it on.

    Args:
        embedding_variable: float32, any shape; it must require a gradient, or no backward comes here; it gets zeros.
        sliced_activations: float32; they get a zero gradient.
        table_id: which table, in the config's order.
        lookup_id: which lookup of the table; each (table_id, lookup_id) takes one gradient per step.

    Returns:
        `sliced_activations`.

    Raises:
        ValueError: for a table that does not exist or a negative lookup_id.
        RuntimeError: in the backward, for a second gradient or in mode INFERENCE.

    Source: _embedding_activations_grad in TensorFlow's tensorflow/python/tpu/ops/tpu_ops.py.
    """
    layer = current()
    if not 0 <= table_id < len(layer.config.tables):
        raise ValueError(f"table_id {table_id}: the config has {len(layer.config.tables)} tables")
    if lookup_id < 0:
        raise ValueError(f"lookup_id {lookup_id} is negative")
    output: Tensor = _Capture.apply(embedding_variable, sliced_activations, layer, (table_id, lookup_id))
    return output


def captured_gradients() -> Gradients:
    """Takes the gradients caught since the last call: by (table_id, lookup_id), float32, of the activations' shapes."""
    return _captured.pop(current(), {})
