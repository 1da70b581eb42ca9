"""Imported once by the fork server of `ranks`: what every rank would import."""

import tpuemb_torch.checkpoint
import tpuemb_torch.embedding  # noqa: F401
