"""Memory of the tables."""

from __future__ import annotations

import ctypes
import mmap
from functools import cache

from torch import Tensor

#: Below this size a buffer's page table stays in cache anyway.
_LEAST_BYTES = 4 << 20


def advise_huge_pages(buffer: Tensor) -> None:
    """Asks for huge pages, before a CPU buffer is first written to; where the system refuses, pages are small.

    Rows of large tables are read and written at random: with pages of 4 KiB most accesses miss the processor's cache
    of page addresses.
    """
    advise = _madvise()
    size = buffer.numel() * buffer.element_size()
    if buffer.device.type != "cpu" or size < _LEAST_BYTES or advise is None:
        return
    begin = -(-buffer.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (buffer.data_ptr() + size - begin) // mmap.PAGESIZE * mmap.PAGESIZE
    advise(ctypes.c_void_p(begin), ctypes.c_size_t(length), ctypes.c_int(mmap.MADV_HUGEPAGE))


@cache
def _madvise() -> ctypes._FuncPointer | None:
    """The C library's madvise, where it knows huge pages (Linux)."""
    return getattr(ctypes.CDLL(None), "madvise", None) if hasattr(mmap, "MADV_HUGEPAGE") else None
