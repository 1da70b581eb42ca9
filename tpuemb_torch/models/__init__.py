"""Recommender models on a `TPUEmbedding`: small, and meant to be copied."""

from tpuemb_torch.models.dlrm import DLRM
from tpuemb_torch.models.two_tower import TwoTower

__all__ = ["DLRM", "TwoTower"]
