"""Pieces that the models share."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def mlp(sizes: Sequence[int], final_activation: bool = True) -> nn.Sequential:
    """Linear layers of the given sizes with ReLU between them, and after the last if asked."""
    layers: list[nn.Module] = []
    for index, (size_in, size_out) in enumerate(zip(sizes[:-1], sizes[1:], strict=True)):
        layers.append(nn.Linear(size_in, size_out))
        if final_activation or index < len(sizes) - 2:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)
