"""TensorFlow's TPU embedding layer on PyTorch and TorchRec.

`load_config` reads a TPUEmbeddingConfiguration without torch; everything else is imported at first use and needs
torch, torchrec and fbgemm.
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

if TYPE_CHECKING:
    from tpuemb_torch import checkpoint, models, ops
    from tpuemb_torch.collection import TPUEmbeddingBagCollection
    from tpuemb_torch.embedding import TPUEmbedding, shard, sharders
    from tpuemb_torch.preprocessing import DeduplicationData, InputError, PreparedBatch, Ragged, Sparse
    from tpuemb_torch.train_pipeline import TrainPipeline


_TORCHREC_NAMES = {
    "TPUEmbedding": "tpuemb_torch.embedding",
    "TPUEmbeddingBagCollection": "tpuemb_torch.collection",
    "DeduplicationData": "tpuemb_torch.preprocessing",
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
    "Limits",
    "Optimizer",
    "PreparedBatch",
    "Quantization",
    "Ragged",
    "Sparse",
    "TPUEmbedding",
    "TPUEmbeddingBagCollection",
    "Table",
    "TrainPipeline",
    "__version__",
    "checkpoint",
    "load_config",
    "models",
    "ops",
    "save_config",
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
