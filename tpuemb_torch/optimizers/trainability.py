"""Algorithms whose formula is not known: their tables train only on request."""

from __future__ import annotations

from collections.abc import Collection

import torch

from tpuemb_torch.config.schema import Config
from tpuemb_torch.optimizers.base import rule_class, rules


def check_experimental(algorithms: Collection[str]) -> frozenset[str]:
    """Returns the algorithms that a user wants to train although their formula is not known.

    Raises:
        ValueError: for a name that is not one of these algorithms.
    """
    known = sorted(name for name, rule in rules().items() if rule.untrainable_reason is not None)
    if isinstance(algorithms, str):
        raise ValueError(f"experimental={algorithms!r}: give a set of names, {{{algorithms!r}}}")
    for name in algorithms:
        if name not in known:
            raise ValueError(f"experimental: {name!r} is not experimental; what is: {', '.join(known)}")
    return frozenset(algorithms)


def training_refusal(config: Config, experimental: Collection[str]) -> str | None:
    """Returns why tables of this configuration do not train, None if they all do."""
    for table in config.tables:
        algorithm = table.optimizer.algorithm
        reason = rule_class(algorithm).untrainable_reason
        if reason is not None and algorithm not in experimental:
            return (
                f"table {table.name!r} has the optimizer {algorithm}, which does not train: {reason}. "
                "Lookups, load, retrieve and checkpoints work: use eval() or mode 'inference'. To train with an "
                f'approximation that nothing should depend on, build the layer with experimental={{"{algorithm}"}}'
            )
    return None


def may_differentiate(refusal: str | None, training: bool) -> bool:
    """Whether a lookup is to be a node of the autograd graph, so that its backward steps the tables.

    Args:
        refusal: from `training_refusal`.
        training: whether the module is in training mode.

    Raises:
        NotImplementedError: where the lookup would be for training, and that is refused.
    """
    if refusal is None or not torch.is_grad_enabled():
        return torch.is_grad_enabled()
    if training:
        raise NotImplementedError(refusal)
    return False
