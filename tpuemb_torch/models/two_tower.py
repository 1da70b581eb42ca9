"""Two towers: a query and a candidate vector, scored by their dot product."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from tpuemb_torch.embedding import TPUEmbedding
from tpuemb_torch.models.layers import mlp


class TwoTower(nn.Module):
    """Two-tower retrieval model: each tower is a network over the concatenated activations of its features.

    Args:
        embedding: the embedding layer; every feature is a bag (`input_shape` of one axis).
        query: names of the query tower's features.
        candidate: names of the candidate tower's features.
        hidden: hidden sizes of both towers.
        dimension: size of the towers' outputs.

    Raises:
        ValueError: for a feature that the config does not have.
    """

    def __init__(
        self,
        embedding: TPUEmbedding,
        query: Sequence[str],
        candidate: Sequence[str],
        hidden: Sequence[int] = (64,),
        dimension: int = 32,
    ) -> None:
        super().__init__()
        sizes = {feature.name: feature.table.dimension for feature in embedding.config.features}
        unknown = [name for name in (*query, *candidate) if name not in sizes]
        if unknown:
            raise ValueError(f"unknown features {unknown}: the config has {list(sizes)}")
        self.embedding = embedding
        self.query, self.candidate = list(query), list(candidate)
        self.query_tower = mlp([sum(sizes[n] for n in query), *hidden, dimension], final_activation=False)
        self.candidate_tower = mlp([sum(sizes[n] for n in candidate), *hidden, dimension], final_activation=False)

    def forward(self, features: Mapping[str, object]) -> tuple[Tensor, Tensor]:
        """Unit vectors of both towers.

        Args:
            features: inputs of the embedding layer by feature name.

        Returns:
            query and candidate, float32 `[batch, dimension]` each; their row-wise dot products are the scores.
        """
        activations = self.embedding(features)
        query = self.query_tower(torch.cat([activations[name] for name in self.query], dim=1))
        candidate = self.candidate_tower(torch.cat([activations[name] for name in self.candidate], dim=1))
        return nn.functional.normalize(query, dim=1), nn.functional.normalize(candidate, dim=1)
