"""DLRM: dense features and embeddings, their pairwise dot products, a top network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from tpuemb_torch.embedding import TPUEmbedding
from tpuemb_torch.models.layers import mlp


class DLRM(nn.Module):
    """Deep learning recommendation model (Naumov et al., 2019, arXiv:1906.00091), with an optional wide part.

    All bag features of the embedding layer whose dimension is not 1 take part in the interactions and must have the
    same dimension; features of dimension 1 are added to the logit (the wide part).

    Args:
        embedding: the embedding layer; every feature is a bag (`input_shape` of one axis).
        dense_features: number of dense inputs.
        bottom: hidden sizes of the network on the dense inputs; its output has the embedding dimension.
        top: hidden sizes of the network on the interactions; its output is the logit.
        vectors_in_top: whether the top network also sees the activations themselves, beside their products (the
            paper's does not; with few features it helps).

    Raises:
        ValueError: if the features cannot interact.
    """

    def __init__(
        self,
        embedding: TPUEmbedding,
        dense_features: int,
        bottom: Sequence[int] = (64,),
        top: Sequence[int] = (64, 32),
        vectors_in_top: bool = False,
    ) -> None:
        super().__init__()
        features = embedding.config.features
        for feature in features:
            if len(feature.input_shape) != 1:
                raise ValueError(
                    f"feature {feature.name!r} has input_shape {feature.input_shape}: DLRM takes bags only"
                )
        self.deep = [f.name for f in features if f.table.dimension > 1]
        self.wide = [f.name for f in features if f.table.dimension == 1]
        dimensions = {f.table.dimension for f in features if f.table.dimension > 1}
        if len(dimensions) != 1:
            raise ValueError(f"interacting features must have one dimension, got {sorted(dimensions)}")
        (dimension,) = dimensions
        self.embedding = embedding
        self.bottom = mlp([dense_features, *bottom, dimension])
        self.vectors_in_top = vectors_in_top
        vectors = 1 + len(self.deep)
        inputs = dimension * (vectors if vectors_in_top else 1) + vectors * (vectors - 1) // 2
        self.top = mlp([inputs, *top, 1], final_activation=False)
        self.register_buffer("pairs", torch.triu_indices(vectors, vectors, offset=1), persistent=False)

    def forward(self, dense: Tensor, features: Mapping[str, object]) -> Tensor:
        """Logits of a batch.

        Args:
            dense: float32 `[batch, dense_features]`.
            features: inputs of the embedding layer by feature name.

        Returns:
            float32 `[batch]`.
        """
        activations = self.embedding(features)
        bottom = self.bottom(dense)
        vectors = torch.stack([bottom, *(activations[name] for name in self.deep)], dim=1)
        products = vectors @ vectors.transpose(1, 2)
        first, second = self.get_buffer("pairs")
        seen = vectors.flatten(1) if self.vectors_in_top else bottom
        logit = self.top(torch.cat([seen, products[:, first, second]], dim=1))
        return sum((activations[name] for name in self.wide), logit).squeeze(1)
