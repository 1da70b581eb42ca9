"""Progress bars of what moves many bytes."""

from __future__ import annotations

from tqdm import tqdm


def bytes_bar(what: str, total: int, rank: int = 0) -> tqdm[None]:
    """A bar with bytes and rate: on rank 0, if stderr is a terminal and it takes more than a second."""
    hidden = None if rank == 0 else True  # None asks tqdm to look for a terminal
    return tqdm(total=total, desc=what, unit="B", unit_scale=True, leave=False, delay=1, disable=hidden)
