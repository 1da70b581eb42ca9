"""CRC32C (Castagnoli), masked as TensorFlow stores it (tensorflow/core/lib/hash/crc32c.h)."""

from __future__ import annotations

import google_crc32c

_MASK_DELTA = 0xA282EAD8


def extend(crc: int, data: bytes) -> int:
    """The CRC of what `crc` is of, followed by `data`; 0 is the CRC of nothing."""
    return int(google_crc32c.extend(crc, data))


def mask(crc: int) -> int:
    """The form in which a CRC is stored: rotated right by 15 bits, plus a constant, so that a CRC of data that
    contains CRCs stays meaningful."""
    return (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xFFFFFFFF


def masked(data: bytes) -> int:
    """The stored form of the CRC of `data`."""
    return mask(extend(0, data))
