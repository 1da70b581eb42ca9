"""Checkpoints: tables, slots and the rest of a model, independent of the sharding they were saved under.

`save`, `async_save`, `load` and `steps` are for this package's own; `read_tensorflow` and `write_tensorflow` read and
write TensorFlow's.
"""

from tpuemb_torch._requirements import require_torchrec

require_torchrec()

from tpuemb_torch.checkpoint.store import CheckpointError, async_save, load, save, steps  # noqa: E402
from tpuemb_torch.checkpoint.tensorflow import CheckpointWarning, read_tensorflow, write_tensorflow  # noqa: E402

__all__ = [
    "CheckpointError",
    "CheckpointWarning",
    "async_save",
    "load",
    "read_tensorflow",
    "save",
    "steps",
    "write_tensorflow",
]
