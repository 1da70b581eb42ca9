"""The error of everything that reads or writes checkpoints."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, or read into this model; the message says why."""
