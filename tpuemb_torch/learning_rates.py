"""Dynamic learning rates as an optimizer's, so that torch's schedulers can drive them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tpuemb_torch.embedding import TPUEmbedding, TPUEmbeddingBagCollection
from tpuemb_torch.sharding import ShardedTPUEmbeddingBagCollection


class LearningRates(torch.optim.Optimizer):
    """The dynamic learning rates of a layer, one parameter group per tag, for `torch.optim.lr_scheduler`.

    Each backward takes the rates that the groups have at that moment, without a step of lag: a scheduler that is
    stepped after batch n sets the rates of batch n + 1.  The tables are stepped by the backward; `step` does nothing.
    State dicts have the rates, so that a resumed schedule goes on.

        rates = tpuemb.LearningRates(embedding, [0.1, 0.01])
        scheduler = torch.optim.lr_scheduler.LinearLR(rates, start_factor=0.1, total_iters=1000)

    Args:
        embedding: a `TPUEmbedding` or `TPUEmbeddingBagCollection`, sharded or not; it is driven from here on, until
            its `set_learning_rates` is called.
        rates: one initial rate per tag.

    Raises:
        ValueError: for a wrong number of rates, or one that is not finite.
    """

    def __init__(
        self,
        embedding: TPUEmbedding | TPUEmbeddingBagCollection | ShardedTPUEmbeddingBagCollection,
        rates: Sequence[float],
    ) -> None:
        collection = embedding.collection if isinstance(embedding, TPUEmbedding) else embedding
        count = collection.config.num_learning_rates
        if len(rates) != count:
            raise ValueError(f"{len(rates)} learning rates given, but the config has {count} dynamic tags: one each")
        if count == 0:
            raise ValueError("the config has no dynamic learning rate: its rates are constants of the config")
        # An optimizer must have parameters; nothing reads these.
        groups = [{"params": [nn.Parameter(torch.empty(0))], "lr": rate, "tag": tag} for tag, rate in enumerate(rates)]
        super().__init__(groups, {})
        collection.steps.follow(self.rates)

    def rates(self) -> list[float | Tensor]:
        """The rates by tag."""
        return [group["lr"] for group in sorted(self.param_groups, key=lambda group: group["tag"])]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Does nothing: the backward has stepped the tables."""
