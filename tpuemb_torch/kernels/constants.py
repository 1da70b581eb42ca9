"""Small constant tensors of a kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Constant:
    """A constant, copied once to each device that asks for it.

    Not a buffer: a module that is moved, or allocated with `to_empty`, must not lose these values.
    """

    def __init__(self, values: Sequence[object], dtype: torch.dtype = torch.float32) -> None:
        self._copies = {torch.device("cpu"): torch.tensor(values, dtype=dtype)}

    def on(self, device: torch.device) -> Tensor:
        """The constant on a device."""
        if device not in self._copies:
            self._copies[device] = self._copies[torch.device("cpu")].to(device)
        return self._copies[device]
