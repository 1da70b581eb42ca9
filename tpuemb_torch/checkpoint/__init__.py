"""Checkpoints: tables, slots and the rest of a model, independent of the sharding they were saved under."""

from tpuemb_torch._requirements import require_torchrec

require_torchrec()

from tpuemb_torch.checkpoint.store import CheckpointError, load, save  # noqa: E402

__all__ = ["CheckpointError", "load", "save"]
