"""TensorFlow's TPU embedding layer on PyTorch and TorchRec.

`load_config`, `read_stats` and `read_plan` read configurations, statistics and plans without torch, `make_plan` needs
torch alone; everything else is imported at first use and needs torch, torchrec and fbgemm.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tpuemb_torch._version import __version__
from tpuemb_torch.config import (
    Config,
    ConfigError,
    ConfigWarning,
    Feature,
    LearningRate,
    Limits,
    Optimizer,
    Quantization,
    Table,
    load_config,
    save_config,
)
from tpuemb_torch.planning import Plan, PlanError, make_plan, read_plan, save_plan
from tpuemb_torch.statistics import Stats, StatsError, TableStats, read_stats

if TYPE_CHECKING:
    from tpuemb_torch import checkpoint, models, ops
    from tpuemb_torch.collection import TPUEmbeddingBagCollection
    from tpuemb_torch.embedding import TPUEmbedding, shard, sharders
    from tpuemb_torch.learning_rates import LearningRates
    from tpuemb_torch.preprocessing import DeduplicationData, InputError, PreparedBatch, Ragged, Sparse
    from tpuemb_torch.train_pipeline import TrainPipeline


_TORCHREC_NAMES = {
    "TPUEmbedding": "tpuemb_torch.embedding",
    "TPUEmbeddingBagCollection": "tpuemb_torch.collection",
    "DeduplicationData": "tpuemb_torch.preprocessing",
    "LearningRates": "tpuemb_torch.learning_rates",
    "InputError": "tpuemb_torch.preprocessing",
    "PreparedBatch": "tpuemb_torch.preprocessing",
    "Ragged": "tpuemb_torch.preprocessing",
    "Sparse": "tpuemb_torch.preprocessing",
    "TrainPipeline": "tpuemb_torch.train_pipeline",
    "shard": "tpuemb_torch.embedding",
    "sharders": "tpuemb_torch.embedding",
}
_MODULES = ("checkpoint", "models", "ops")

__all__ = [
    "Config",
    "ConfigError",
    "ConfigWarning",
    "DeduplicationData",
    "Feature",
    "InputError",
    "LearningRate",
    "LearningRates",
    "Limits",
    "Optimizer",
    "Plan",
    "PlanError",
    "PreparedBatch",
    "Quantization",
    "Ragged",
    "Sparse",
    "Stats",
    "StatsError",
    "TPUEmbedding",
    "TPUEmbeddingBagCollection",
    "Table",
    "TableStats",
    "TrainPipeline",
    "__version__",
    "checkpoint",
    "load_config",
    "make_plan",
    "models",
    "ops",
    "read_plan",
    "read_stats",
    "save_config",
    "save_plan",
    "shard",
    "sharders",
]


def __getattr__(name: str) -> Any:
    if name not in _TORCHREC_NAMES and name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tpuemb_torch._requirements import require_torchrec

    require_torchrec()
    if name in _MODULES:
        value = import_module(f"{__name__}.{name}")
    else:
        value = getattr(import_module(_TORCHREC_NAMES[name]), name)
    globals()[name] = value  # found there the next time, without this function
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
