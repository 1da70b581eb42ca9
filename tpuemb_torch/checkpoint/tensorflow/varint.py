"""Base-128 varints, as in LevelDB's tables and TensorFlow's string tensors."""

from __future__ import annotations


def encode(value: int) -> bytes:
    """`value` (not negative), 7 bits a byte, lowest first."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def decode(data: bytes, position: int) -> tuple[int, int]:
    """The varint at a position, and the position behind it.

    Raises:
        ValueError: if the data ends within it, or it has more than 64 bits.
    """
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(data):
            raise ValueError("the data ends within a number")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value >> 64:
                break
            return value, position
    raise ValueError("a number has more than 64 bits")
