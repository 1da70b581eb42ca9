"""Recommender models on a `TPUEmbedding`: small, and meant to be copied."""

from tpuemb_torch._requirements import require_torchrec

require_torchrec()

from tpuemb_torch.models.dlrm import DLRM  # noqa: E402
from tpuemb_torch.models.two_tower import TwoTower  # noqa: E402

__all__ = ["DLRM", "TwoTower"]
