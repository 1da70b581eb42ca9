"""Sorted string tables: the format of a checkpoint's index file, uncompressed.

The format is LevelDB's (leveldb/doc/table_format.md; tensorflow/core/lib/io/{format,block,table_builder}.cc):

    [block] ... [metaindex block] [index block] [footer]

A block is entries, restart offsets (uint32) and their number, then a type byte (0: not compressed) and a masked CRC32C
of all that.  An entry is three varints (bytes shared with the last key, other bytes of the key, bytes of the value),
the other bytes, and the value.  The index block's values are the offset and size of each block; the footer has those of
the metaindex and index blocks, padded to 40 bytes, and a magic number.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping

from tpuemb_torch.checkpoint.errors import CheckpointError
from tpuemb_torch.checkpoint.tensorflow import varint
from tpuemb_torch.checkpoint.tensorflow.checksum import masked

_MAGIC = 0xDB4775248B80FB57
_FOOTER = 48
_TRAILER = 5
#: TensorFlow's table::Options: bytes of a block, entries between two keys that are written whole.
_BLOCK_BYTES = 262144
_RESTART_INTERVAL = 16


def read_table(data: bytes, name: str) -> dict[bytes, bytes]:
    """The entries of a table, every byte of it checked.

    Args:
        data: the whole file.
        name: what to call it in errors.

    Raises:
        CheckpointError: if it is no table, is compressed, or a byte was changed.
    """
    try:
        return dict(_entries(data))
    except (ValueError, struct.error) as problem:
        raise CheckpointError(f"index {name} is damaged or no TensorFlow checkpoint index: {problem}") from problem


def _entries(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    if len(data) < _FOOTER:
        raise ValueError(f"it has {len(data)} bytes, fewer than a footer ({_FOOTER}); was it cut off?")
    footer = data[-_FOOTER:]
    if struct.unpack("<Q", footer[-8:])[0] != _MAGIC:
        raise ValueError("its last 8 bytes are not those of a table; was it cut off?")
    meta_offset, position = varint.decode(footer, 0)
    meta_size, position = varint.decode(footer, position)
    index_offset, position = varint.decode(footer, position)
    index_size, position = varint.decode(footer, position)
    if any(footer[position:-8]):
        raise ValueError("the padding of its footer is not zero")
    end, last = 0, b""
    for _, handle in _block_entries(_block(data, index_offset, index_size)):
        offset, position = varint.decode(handle, 0)
        size, _ = varint.decode(handle, position)
        if offset != end:
            raise ValueError(f"block at byte {offset}, expected at {end}")
        end = offset + size + _TRAILER
        for key, value in _block_entries(_block(data, offset, size)):
            if key <= last and (last or key != b""):
                raise ValueError(f"key {key!r} comes after {last!r}")
            last = key
            yield key, value
    _block(data, meta_offset, meta_size)
    if (meta_offset, index_offset) != (end, end + meta_size + _TRAILER):
        raise ValueError("its blocks do not lie one behind the other")
    if index_offset + index_size + _TRAILER + _FOOTER != len(data):
        raise ValueError(f"it has {len(data)} bytes, its blocks another number")


def _block(data: bytes, offset: int, size: int) -> bytes:
    """The content of a block, after a check of its CRC."""
    end = offset + size
    if end + _TRAILER > len(data):
        raise ValueError(f"block at byte {offset} ends at {end + _TRAILER}, the file at {len(data)}")
    kind, crc = data[end], struct.unpack_from("<I", data, end + 1)[0]
    if crc != masked(data[offset : end + 1]):
        raise ValueError(f"CRC32C of the block at byte {offset} ({size} bytes) does not match")
    if kind != 0:
        raise ValueError(f"block at byte {offset} is compressed (type {kind}); TensorFlow writes indexes uncompressed")
    return data[offset:end]


def _block_entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    restarts = struct.unpack_from("<I", block, len(block) - 4)[0]
    end = len(block) - 4 * (1 + restarts)
    if end < 0:
        raise ValueError("a block has more restarts than bytes")
    position, key = 0, b""
    while position < end:
        shared, position = varint.decode(block, position)
        other, position = varint.decode(block, position)
        size, position = varint.decode(block, position)
        if shared > len(key) or position + other + size > end:
            raise ValueError("an entry is longer than its block")
        key = key[:shared] + block[position : position + other]
        position += other + size
        yield key, block[position - size : position]


def write_table(entries: Mapping[bytes, bytes]) -> bytes:
    """A table of the entries, in the order of their keys."""
    out = bytearray()
    index = _BlockBuilder()
    block = _BlockBuilder()

    def append(content: bytes) -> bytes:
        """Appends a block; returns its handle."""
        handle = varint.encode(len(out)) + varint.encode(len(content))
        out.extend(content + b"\0" + struct.pack("<I", masked(content + b"\0")))
        return handle

    for key in sorted(entries):
        block.add(key, entries[key])
        if block.size >= _BLOCK_BYTES:
            index.add(key, append(block.finish()))
            block = _BlockBuilder()
    if not block.empty or not entries:
        index.add(max(entries, default=b""), append(block.finish()))
    footer = append(_BlockBuilder().finish())
    footer += append(index.finish(restart_interval=1))
    out.extend(footer.ljust(_FOOTER - 8, b"\0") + struct.pack("<Q", _MAGIC))
    return bytes(out)


class _BlockBuilder:
    def __init__(self) -> None:
        self._entries: list[tuple[bytes, bytes]] = []
        self.size = 0

    @property
    def empty(self) -> bool:
        return not self._entries

    def add(self, key: bytes, value: bytes) -> None:
        self._entries.append((key, value))
        self.size += len(key) + len(value)

    def finish(self, restart_interval: int = _RESTART_INTERVAL) -> bytes:
        out, restarts, last = bytearray(), [0], b""
        for number, (key, value) in enumerate(self._entries):
            shared = 0
            if number % restart_interval:
                while shared < min(len(key), len(last)) and key[shared] == last[shared]:
                    shared += 1
            elif number:
                restarts.append(len(out))
            out += varint.encode(shared) + varint.encode(len(key) - shared) + varint.encode(len(value))
            out += key[shared:] + value
            last = key
        return bytes(out) + struct.pack(f"<{len(restarts) + 1}I", *restarts, len(restarts))
