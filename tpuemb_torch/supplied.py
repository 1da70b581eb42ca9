"""Activations that are there before the model asks for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


class SuppliedActivations:
    """Activations that a layer returns for the features which they were looked up for, once."""

    def __init__(self, features: Any, activations: dict[str, Tensor]) -> None:
        self._features = features
        self._activations: dict[str, Tensor] | None = activations

    def take(self, features: Any) -> dict[str, Tensor]:
        if self._activations is None:
            raise RuntimeError("the model calls its embedding layer twice in a step: TrainPipeline looks up once")
        if not _same(features, self._features):
            raise RuntimeError(
                "the model looks up other features than TrainPipeline prepared: let `features` give exactly what the "
                "model calls its embedding layer with"
            )
        activations, self._activations = self._activations, None
        return activations

    def check_taken(self) -> None:
        if self._activations is not None:
            raise RuntimeError("the model did not call its embedding layer: TrainPipeline cannot train it")


def _same(given: Any, expected: Any) -> bool:
    """Whether two inputs are the same tensors, perhaps in new containers."""
    if given is expected:
        return True
    if type(given) is not type(expected):
        return False
    if isinstance(given, Mapping):
        return set(given) == set(expected) and all(_same(given[key], expected[key]) for key in given)
    if isinstance(given, list | tuple):
        return len(given) == len(expected) and all(_same(a, b) for a, b in zip(given, expected, strict=True))
    if is_dataclass(given):
        return all(_same(getattr(given, f.name), getattr(expected, f.name)) for f in fields(given))
    return False
