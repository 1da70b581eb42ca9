"""Index keys of the slices of a partitioned variable.

A slice has its own entry under `EncodeTensorNameSlice(name, slice)` (tensorflow/core/util/saved_tensor_slice_util.cc),
a sequence in ordered code (tensorflow/core/lib/strings/ordered_code.cc): 0, the name, the rank, then start and length
of each axis.
"""

from __future__ import annotations

from collections.abc import Sequence


def slice_key(name: str, extents: Sequence[tuple[int, int]]) -> bytes:
    """The key of the slice with (start, length) on each axis; length -1 is the whole axis."""
    out = _unsigned(0) + _string(name.encode()) + _unsigned(len(extents))
    for start, length in extents:
        out += _signed(start) + _signed(length)
    return out


def _unsigned(value: int) -> bytes:
    """The number of bytes, then the bytes from the highest on."""
    size = (value.bit_length() + 7) // 8
    return bytes([size]) + value.to_bytes(size, "big")


def _string(value: bytes) -> bytes:
    """0x00 and 0xff are escaped, 0x00 0x01 ends it."""
    return b"".join({0: b"\x00\xff", 255: b"\xff\x00"}.get(byte, bytes([byte])) for byte in value) + b"\x00\x01"


def _signed(value: int) -> bytes:
    """As many leading bits as there are bytes, inverted for negative numbers, and the number behind them."""
    magnitude = ~value if value < 0 else value
    size = magnitude.bit_length() // 7 + 1
    wide = bytearray(value.to_bytes(10, "big", signed=True)[10 - size :])
    header = ((1 << size) - 1) << (16 - size)
    wide[0] ^= header >> 8
    if size > 1:
        wide[1] ^= header & 0xFF
    return bytes(wide)
