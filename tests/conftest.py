"""Settings of all tests: few threads, the same seed everywhere; those with several processes are marked."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of files that call `run_ranks`."""
    for item in items:
        module = getattr(item, "module", None)
        if hasattr(module, "run_ranks"):
            item.add_marker("dist")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    import torch

    torch.manual_seed(0)
