"""Checkpoints: tables, slots and the rest of a model, independent of the sharding they were saved under."""

from tpuemb_torch.checkpoint.store import CheckpointError, load, save

__all__ = ["CheckpointError", "load", "save"]
