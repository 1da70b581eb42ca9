"""Round trips: nothing is lost in any format, or the writer says that it would be."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from google.protobuf import json_format, text_format

from tests.config import examples
from tpuemb_torch.config import ConfigError, load_config, save_config
from tpuemb_torch.config.parse import ENDINGS
from tpuemb_torch.config.write import to_json, to_text, to_yaml

WRITERS = {"text": to_text, "json": to_json, "yaml": to_yaml}


def bits(value: float) -> bytes:
    return struct.pack("<f", value)


def check(proto: examples.Proto) -> None:
    """Each format gives the same bytes again."""
    data = proto.SerializeToString(deterministic=True)
    for name, write in WRITERS.items():
        assert load_config(write(proto), format=name).serialize() == data, name  # type: ignore[arg-type]


@pytest.mark.parametrize("proto", [examples.by_feature(), examples.by_table()], ids=["by_feature", "by_table"])
def test_every_format(proto: examples.Proto) -> None:
    check(proto)


def test_program() -> None:
    check(examples.with_program(examples.program(num_slots=1)))


@pytest.mark.parametrize(
    "value",
    [-0.0, 1e-45, 1.1754943508222875e-38, 3.4028234663852886e38, 0.1, 1 / 3, 16777216.0, 1e-7, 0.30000001192092896],
)
def test_floats_keep_their_bits(value: float) -> None:
    proto = examples.with_optimizer("mdl_adagrad_light {}")
    message = proto.table_descriptor[0].optimization_parameters.mdl_adagrad_light
    message.mdl_min_weight = value
    proto.table_descriptor[0].optimization_parameters.clipping_limits.lower.value = value
    check(proto)
    for name, write in WRITERS.items():
        again = load_config(write(proto), format=name).to_proto().table_descriptor[0].optimization_parameters  # type: ignore[arg-type]
        assert bits(again.mdl_adagrad_light.mdl_min_weight) == bits(message.mdl_min_weight)


def test_infinite_limits_are_kept() -> None:
    proto = examples.with_optimizer("adagrad {} clipping_limits { lower { value: -inf } upper { value: inf } }")
    check(proto)


def test_a_nan_that_text_cannot_hold_is_refused(tmp_path: Path) -> None:
    module = examples.program()
    literal = module.computations[0].instructions.add(name="c", opcode="constant", id=99)
    literal.shape.element_type = 11  # F32
    literal.literal.f32s.append(0.0)
    proto = examples.with_program(module)
    payload = proto.SerializeToString().replace(
        literal.literal.SerializeToString(), b"\x42\x04" + struct.pack("<I", 0x7FC12345)
    )
    config = load_config(payload)
    for ending in (".pbtxt", ".json", ".yaml"):
        with pytest.raises(ConfigError, match=r"without loss; use a binary proto"):
            save_config(config, tmp_path / f"x{ending}")
    assert list(tmp_path.iterdir()) == []
    save_config(config, tmp_path / "x.pb")
    assert (tmp_path / "x.pb").read_bytes() == payload


def with_unknown_fields() -> examples.Proto:
    """Fields of all wire types that the proto does not know, at several depths."""
    proto = examples.with_program(examples.program())
    table = proto.table_descriptor[0]
    parameters = table.optimization_parameters
    proto.MergeFromString(
        b"\xf8\x3f\x96\x01" + b"\xfa\x3f\x03abc" + b"\xf9\x3f" + bytes(range(8)) + b"\xfd\x3f\1\2\3\4"
    )
    table.MergeFromString(b"\xf8\x3f" + b"\xff" * 9 + b"\x01")
    parameters.learning_rate.MergeFromString(b"\xfb\x3f\x08\x05\xfc\x3f")  # a group
    entry = parameters.user_defined_program.program.computations[0]
    entry.instructions[1].shape.MergeFromString(b"\xfa\x3f\x00")
    parameters.user_defined_program.program.schedule.sequences[-5].MergeFromString(b"\xf8\x3f\x01")
    proto.feature_descriptor[0].MergeFromString(b"\xfa\x3f\x02\xff\xfe")
    return proto


def test_unknown_fields_survive_in_every_format() -> None:
    proto = with_unknown_fields()
    check(proto)
    config = load_config(proto)
    assert config.to_proto() == proto
    assert load_config(config.to_text()).serialize() == config.serialize()


def test_unknown_fields_stay_out_of_the_way_of_tensorflow() -> None:
    """Its text parser skips the comments."""
    again = text_format.Parse(to_text(with_unknown_fields()), examples.Proto())
    known = with_unknown_fields()
    known.DiscardUnknownFields()
    known.table_descriptor[0].optimization_parameters.learning_rate.DiscardUnknownFields()
    assert again == known


def test_formats_are_protobufs_own() -> None:
    proto = examples.by_feature()
    assert to_text(proto) == text_format.MessageToString(proto)
    assert json.loads(to_json(proto)) == json_format.MessageToDict(proto, preserving_proto_field_name=True)
    assert json_format.Parse(to_json(proto), examples.Proto()) == proto


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"table_descriptor[5]": "CAE="}, "table_descriptor[5]"),
        ({"no_such_field": "CAE="}, "no_such_field"),
        ({"table_descriptor": "CAE="}, "table_descriptor"),
        ({"mode": "CAE="}, "mode"),
        ({"": "not base64!"}, "@unknown_fields"),
        ({"": 3}, "@unknown_fields"),
        ({"": "CA=="}, "@unknown_fields"),  # cut off
        ([1], "@unknown_fields"),
    ],
)
def test_broken_record_of_unknown_fields(record: object, words: str) -> None:
    mapping = json.loads(to_json(examples.by_feature()))
    with pytest.raises(ConfigError) as caught:
        load_config(json.dumps({**mapping, "@unknown_fields": record}))
    assert caught.value.field == words


@pytest.mark.parametrize("ending", ENDINGS)
def test_save_and_load(tmp_path: Path, ending: str) -> None:
    config = load_config(examples.BY_FEATURE)
    path = tmp_path / f"x{ending}"
    save_config(config, str(path))
    assert load_config(path) == config
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_save_replaces_a_file_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    path.write_text("old")
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            save_config(load_config(examples.BY_FEATURE), path)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]
    save_config(load_config(examples.BY_FEATURE), path)
    assert path.read_text() != "old"


def test_save_needs_a_format(tmp_path: Path) -> None:
    config = load_config(examples.BY_FEATURE)
    with pytest.raises(ConfigError, match=r"unknown file ending '\.bin'"):
        save_config(config, tmp_path / "x.bin")
    save_config(config, tmp_path / "x.bin", format="binary")
    assert (tmp_path / "x.bin").read_bytes() == config.serialize()
    with pytest.raises(OSError, match="No such file"):
        save_config(config, tmp_path / "missing" / "x.pb")
