"""Settings of all tests: few threads, the same seed everywhere."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _seeded() -> None:
    import torch

    torch.manual_seed(0)
