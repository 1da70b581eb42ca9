"""The bytes: sorted tables, checksums, keys of slices, strings; and what damaged bytes say."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoint.tensorflow.examples import GOLDEN, golden_prefix, values, write_variables
from tpuemb_torch.checkpoint import CheckpointError, read_tensorflow, write_tensorflow
from tpuemb_torch.checkpoint.tensorflow import varint
from tpuemb_torch.checkpoint.tensorflow.bundle import TensorBundle
from tpuemb_torch.checkpoint.tensorflow.bundle_writer import BundleWriter
from tpuemb_torch.checkpoint.tensorflow.checksum import extend, mask, masked
from tpuemb_torch.checkpoint.tensorflow.slice_keys import slice_key
from tpuemb_torch.checkpoint.tensorflow.sstable import read_table, write_table
from tpuemb_torch.protos import tensorflow_checkpoint_pb2 as pb


def test_crc32c_of_known_strings() -> None:
    # RFC 3720, B.4, and the mask of LevelDB's crc32c_test.cc.
    assert extend(0, bytes(32)) == 0x8A9136AA
    assert extend(extend(0, b"123"), b"456789") == 0xE3069283
    assert mask(0) == 0xA282EAD8
    assert masked(b"foo") != extend(0, b"foo")


@given(st.integers(0, 2**64 - 1), st.binary(max_size=3))
def test_varints_come_back(value: int, after: bytes) -> None:
    data = varint.encode(value)
    assert varint.decode(data + after, 0) == (value, len(data))


@pytest.mark.parametrize("data", [b"", b"\x80", b"\xff" * 10 + b"\x01", b"\xff" * 9 + b"\x02"])
def test_bad_varints_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="number"):
        varint.decode(data, 0)


@given(st.dictionaries(st.binary(max_size=12), st.binary(max_size=40), max_size=60))
def test_tables_come_back(entries: dict[bytes, bytes]) -> None:
    assert read_table(write_table(entries), "x") == entries


def test_tables_of_several_blocks_come_back() -> None:
    entries = {b"key%06d" % i: bytes(100) for i in range(8000)}
    table = write_table(entries)
    assert len(table) > 3 * 262144
    assert read_table(table, "x") == entries


@pytest.mark.parametrize("name", ["tf215v1_adagrad_3hosts", "tpuembedding_v2_stacked_2dev_adam"])
def test_every_flipped_bit_of_an_index_is_noticed(name: str) -> None:
    data = Path(f"{golden_prefix(name)}.index").read_bytes()
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1 << (position % 8)
        with pytest.raises(CheckpointError, match=r"^index some\.index is damaged"):
            read_table(bytes(damaged), "some.index")


@given(st.data())
def test_broken_indexes_raise_nothing_else(data: st.DataObject) -> None:
    table = write_table({b"": b"x", b"a": b"yy", b"ab": bytes(30)})
    cut = data.draw(st.binary(max_size=20)) + table[data.draw(st.integers(0, len(table))) :]
    if cut != table:
        with pytest.raises(CheckpointError):
            read_table(cut, "x")


def test_a_compressed_index_is_refused_by_name() -> None:
    table = bytearray(write_table({b"": b"x"}))
    size = len(table) - 48 - 2 * (8 + 5) - 4  # of the first block
    block = next(
        i for i in range(1, size + 10) if table[i] == 0 and masked(bytes(table[: i + 1])) == crc_at(table, i + 1)
    )
    table[block] = 1
    table[block + 1 : block + 5] = struct.pack("<I", masked(bytes(table[: block + 1])))
    with pytest.raises(CheckpointError, match="compressed"):
        read_table(bytes(table), "x")


def crc_at(data: bytearray, position: int) -> int:
    return int(struct.unpack_from("<I", data, position)[0])


def test_keys_of_slices() -> None:
    # From the index of a checkpoint that TensorFlow 2.15 wrote.
    assert slice_key("item", [(3, 2), (0, 3)]) == b"\x00item\x00\x01\x01\x02\x83\x82\x80\x83"
    assert slice_key("a\0b", []) == b"\x00a\x00\xffb\x00\x01\x00"
    # One byte takes 6 bits and a sign, each further one 7 more.
    shortest = len(slice_key("v", [(0, 1)]))
    for number, length in ((63, 1), (64, 2), (8191, 2), (8192, 3), (2**62 - 1, 9), (2**62, 10), (-64, 1), (-65, 2)):
        assert len(slice_key("v", [(number, 1)])) == shortest + length - 1
    ordered = [-(2**40), -65, -64, -1, 0, 1, 63, 64, 8191, 8192, 100003, 2**31, 2**62]
    keys = [slice_key("v", [(number, 1)]) for number in ordered]
    assert keys == sorted(keys)


@settings(deadline=None, max_examples=30)
@given(st.binary(max_size=300))
def test_strings_come_back(tmp_path_factory: pytest.TempPathFactory, value: bytes) -> None:
    prefix = tmp_path_factory.mktemp("strings") / "ckpt"
    with BundleWriter(prefix) as writer:
        writer.add("before", torch.ones(3))
        writer.add_string("s", value)
    assert TensorBundle(prefix).strings("s") == [value]


@pytest.mark.parametrize("name", GOLDEN)
def test_every_flipped_bit_of_the_data_is_noticed(tmp_path: Path, name: str) -> None:
    prefix = golden_prefix(name)
    (tmp_path / "ckpt.index").write_bytes(Path(f"{prefix}.index").read_bytes())
    data = Path(f"{prefix}.data-00000-of-00001").read_bytes()
    file = tmp_path / "ckpt.data-00000-of-00001"
    for position in range(0, len(data), 41):
        damaged = bytearray(data)
        damaged[-1 - position] ^= 1 << (position % 8)
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=rf"{file.name} is damaged: CRC32C of tensor '.+'"):
            read_tensorflow(tmp_path / "ckpt")


def test_a_cut_or_missing_data_file_is_named(tmp_path: Path) -> None:
    (index, data) = write_tensorflow(tmp_path / "ckpt", {"t": {"parameters": values(9, 4)}})
    content = data.read_bytes()
    data.write_bytes(content[:-1])
    with pytest.raises(
        CheckpointError, match=rf"{data.name} is cut off: it has {len(content) - 1} bytes, tensor 'embedd"
    ):
        read_tensorflow(tmp_path / "ckpt")
    data.unlink()
    with pytest.raises(CheckpointError, match=rf"data file .*{data.name}: No such file"):
        read_tensorflow(tmp_path / "ckpt")
    index.write_bytes(index.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"ckpt\.index is damaged .*cut off"):
        read_tensorflow(tmp_path / "ckpt")
    index.unlink()
    with pytest.raises(CheckpointError, match=r"no TensorFlow checkpoint .*ckpt\.index: No such file"):
        read_tensorflow(tmp_path / "ckpt")


def test_a_missing_data_file_is_named_before_anything_is_read(tmp_path: Path) -> None:
    """Also one that has only what is not read."""
    with BundleWriter(tmp_path / "ckpt") as writer:
        writer.add("t", values(9, 4))
        writer.add("z/kernel/Adam", values(9, 4))
    index = tmp_path / "ckpt.index"
    table = read_table(index.read_bytes(), "")
    header, entry = pb.BundleHeaderProto.FromString(table[b""]), pb.BundleEntryProto.FromString(table[b"z/kernel/Adam"])
    header.num_shards, entry.shard_id = 2, 1
    parts = {b"": header.SerializeToString(), b"z/kernel/Adam": entry.SerializeToString()}
    index.write_bytes(write_table({**table, **parts}))
    (tmp_path / "ckpt.data-00000-of-00001").rename(tmp_path / "ckpt.data-00000-of-00002")
    with pytest.raises(
        CheckpointError, match=r"tensor 'z/kernel/Adam': data file .*ckpt\.data-00001-of-00002: No such"
    ):
        read_tensorflow(tmp_path / "ckpt")
    (tmp_path / "ckpt.data-00001-of-00002").write_bytes(bytes(200))
    with pytest.raises(CheckpointError, match=r"ckpt\.data-00001-of-00002 is cut off: it has 200 bytes, tensor 'z/k"):
        read_tensorflow(tmp_path / "ckpt")


def test_parts_of_a_table_are_checked_before_they_are_given(tmp_path: Path) -> None:
    prefix = write_variables(tmp_path / "ckpt", {"t": values(90, 4)}, {"t": [50, 40]})
    bundle = TensorBundle(prefix)
    assert torch.equal(bundle.read("t", range(45, 55)), values(90, 4)[45:55])
    file = tmp_path / "ckpt.data-00000-of-00001"
    damaged = bytearray(file.read_bytes())
    damaged[0] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(CheckpointError, match="CRC32C of tensor 't'"):
        TensorBundle(prefix).read("t", range(45, 55))
    assert torch.equal(TensorBundle(prefix).read("t", range(50, 55)), values(90, 4)[50:55])


def test_a_folder_means_its_latest_checkpoint(tmp_path: Path) -> None:
    write_tensorflow(tmp_path / "ckpt-3", {"t": {"parameters": values(2, 2)}})
    with pytest.raises(CheckpointError, match=r"no file named checkpoint .*\(found: ckpt-3\)"):
        read_tensorflow(tmp_path)
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "ckpt-3"\nall_model_checkpoint_paths: "ckpt-3"\n')
    assert set(read_tensorflow(tmp_path)) == {"t"}
    assert set(read_tensorflow(tmp_path / "ckpt-3.index")) == {"t"}
