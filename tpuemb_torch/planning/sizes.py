"""Sizes in bytes, read and written."""

from __future__ import annotations

import re

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_FACTORS = {
    "": 1,
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGTP", start=1)},
    **{f"{letter}IB": 1024**power for power, letter in enumerate("KMGTP", start=1)},
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(size: int | str) -> int:
    """Returns a size in bytes, given as a number or as text such as "80GB" (10^9 bytes each) or "75.5 GiB" (2^30).

    Raises:
        ValueError: for anything else, or less than one byte.
    """
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        factor = _FACTORS.get(match[2].upper()) if match else None
        if match is None or factor is None:
            raise ValueError(f"{size!r} is not a size: give a number with B, KB, MB, GB, TB, KiB, MiB, GiB or TiB")
        size = int(match[1]) * factor if match[1].isdigit() else int(float(match[1]) * factor)
    if isinstance(size, bool) or not isinstance(size, int):
        raise ValueError(f"{size!r} is not a size: give a whole number of bytes, or text such as '80GB'")
    if size < 1:
        raise ValueError(f"{size} bytes: give at least one")
    return size


def format_bytes(size: int | None) -> str:
    """Returns a size with a unit, such as "1.5 GiB"; "unknown" for None."""
    if size is None:
        return "unknown"
    value = float(size)
    for unit in _BINARY:
        if value < 1024 or unit == _BINARY[-1]:
            break
        value /= 1024
    return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"
