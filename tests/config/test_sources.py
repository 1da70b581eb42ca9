"""Everything that `load_config` takes, and what it says where it cannot."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from google.protobuf import json_format, text_format

from tests.config import examples
from tpuemb_torch.config import ConfigError, load_config, save_config
from tpuemb_torch.config.parse import ENDINGS
from tpuemb_torch.config.write import to_json, to_text, to_yaml
from tpuemb_torch.protos import optimization_parameters_pb2

PROTO = examples.by_feature()
BINARY = PROTO.SerializeToString(deterministic=True)


def check(config: object) -> None:
    assert config == load_config(BINARY)


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("as_str", [True, False])
def test_file(tmp_path: Path, ending: str, as_str: bool) -> None:
    path = tmp_path / f"config{ending}"
    save_config(PROTO, path)
    check(load_config(str(path) if as_str else path))


@pytest.mark.parametrize("make", [bytes, bytearray, memoryview])
def test_bytes(make: type) -> None:
    check(load_config(make(BINARY)))


@pytest.mark.parametrize(
    "text", [to_text(PROTO), to_text(PROTO).replace("\n", " "), "\n# a comment\n" + to_text(PROTO)]
)
def test_text(text: str) -> None:
    check(load_config(text))


def test_json_and_yaml_as_str() -> None:
    check(load_config(to_json(PROTO)))  # text protos cannot begin with a brace
    check(load_config(to_json(PROTO), format="json"))
    check(load_config(to_yaml(PROTO), format="yaml"))
    check(load_config(to_json(PROTO).encode(), format="json"))


def test_protobufs_own_json_names() -> None:
    check(load_config(json_format.MessageToJson(PROTO)))  # vocabularySize
    check(load_config(text_format.MessageToString(PROTO, as_one_line=True)))


def test_message() -> None:
    check(load_config(PROTO))


def test_serialized_bytes_are_kept(tmp_path: Path) -> None:
    shuffled = BINARY[-30:]  # any split at a field boundary will do: protobuf takes fields in any order
    first = next(i for i in range(1, len(BINARY)) if _parses(BINARY[i:]) and _parses(BINARY[:i]))
    shuffled = BINARY[first:] + BINARY[:first]
    assert shuffled != BINARY
    config = load_config(shuffled)
    assert config.serialize() == shuffled
    save_config(config, tmp_path / "a.pb")
    assert (tmp_path / "a.pb").read_bytes() == shuffled


def _parses(data: bytes) -> bool:
    try:
        examples.Proto.FromString(data)
    except Exception:
        return False
    return True


def test_ending_in_capitals_and_named_format(tmp_path: Path) -> None:
    upper, bare = tmp_path / "CONFIG.PB", tmp_path / "config"
    upper.write_bytes(BINARY)
    bare.write_bytes(BINARY)
    check(load_config(upper))
    check(load_config(str(bare), format="binary"))
    with pytest.raises(ConfigError, match=r"unknown file ending ''.*\.pbtxt.*format="):
        load_config(bare)


def test_name_that_looks_like_text(tmp_path: Path) -> None:
    path = tmp_path / "mode: {TRAINING}"
    path.write_text(to_text(PROTO))
    check(load_config(str(path), format="text"))


@pytest.mark.parametrize("name", ["no/such/config.pb", "config.pbtxt", "config", "a:b.json", "{x}.pb"])
def test_missing_file(name: str) -> None:
    with pytest.raises(ConfigError, match="no such file") as caught:
        load_config(name)
    assert caught.value.field == name


def test_directory(tmp_path: Path) -> None:
    (tmp_path / "x.pb").mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "x.pb")


@pytest.mark.parametrize("source", ["", " \n\t ", b"", b"  ", bytearray()])
def test_empty(source: str | bytes) -> None:
    with pytest.raises(ConfigError, match="is empty"):
        load_config(source)


@pytest.mark.parametrize("ending", ENDINGS)
def test_empty_file(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"x{ending}"
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match="is empty") as caught:
        load_config(path)
    assert caught.value.field == str(path)


@pytest.mark.parametrize("source", [None, 3, ["mode: TRAINING"], {"mode": "TRAINING"}])
def test_wrong_type(source: object) -> None:
    with pytest.raises(TypeError, match=type(source).__name__):
        load_config(source)  # type: ignore[arg-type]


def test_wrong_message() -> None:
    with pytest.raises(ConfigError, match="TPUEmbeddingConfiguration") as caught:
        load_config(optimization_parameters_pb2.AdamParameters(beta1=0.5))
    assert caught.value.field == "tpuemb_torch.tpu.AdamParameters"


def test_unknown_format() -> None:
    with pytest.raises(ValueError, match="'xml' is unknown; use one of binary"):
        load_config(BINARY, format="xml")  # type: ignore[arg-type]


def test_text_with_a_typo_names_the_line() -> None:
    text = examples.BY_FEATURE.replace("vocabulary_size: 50", "vocabulary_sise: 50")
    line = text[: text.index("sise")].count("\n") + 1
    with pytest.raises(ConfigError, match="vocabulary_sise") as caught:
        load_config(text)
    assert caught.value.field == f"text: line {line}, column 3"


def test_text_cut_off() -> None:
    with pytest.raises(ConfigError, match="not a valid text proto"):
        load_config(examples.BY_FEATURE[:120])


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        ({"modes": "TRAINING"}, "modes", "no such field"),
        ({"mode": "LEARNING"}, "mode", "LEARNING"),
        ({"num_hosts": "two"}, "num_hosts", "'two' is not valid"),
        ({"num_hosts": 1.5}, "num_hosts", "1.5"),
        ({"num_hosts": True}, "num_hosts", "Bool"),
        ({"num_hosts": 2**31}, "num_hosts", "out of range"),
        ({"table_descriptor": {"name": "t"}}, "table_descriptor", "must be in"),
        ({"table_descriptor": [{"name": "t"}, {"rows": 3}]}, "table_descriptor[1].rows", "vocabulary_size"),
        ({"table_descriptor": [{"name": 5}]}, "table_descriptor[0].name", "5"),
        ({"table_descriptor": [None]}, "table_descriptor[0]", "null"),
        (
            {"table_descriptor": [{"optimization_parameters": {"adam": {"beta1": "high"}}}]},
            "table_descriptor[0].optimization_parameters.adam.beta1",
            "'high' is not valid",
        ),
        (
            {"table_descriptor": [{"optimization_parameters": {"adam": {}, "adagrad": {}}}]},
            "table_descriptor[0].optimization_parameters",
            "oneof",
        ),
    ],
)
@pytest.mark.parametrize("format", ["json", "yaml"])
def test_wrong_key_or_value(format: str, change: dict[str, object], field: str, words: str) -> None:
    mapping = {**json.loads(to_json(PROTO)), **change}
    with pytest.raises(ConfigError) as caught:
        load_config(json.dumps(mapping), format=format)  # type: ignore[arg-type]  # JSON is YAML, too
    assert caught.value.field == field
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "format", "words"),
    [
        ('{"mode": "TRAINING",}', "json", "line 1, column"),
        ('{"mode": "TRAINING", "mode": "TRAINING"}', "json", "'mode' twice"),
        ("[1, 2]", "json", "holds a list"),
        ("mode: TRAINING\nmode: TRAINING\n", "yaml", "line 2"),
        ("mode: [TRAINING\n", "yaml", "line 2"),
        ("just words\n", "yaml", "holds a str"),
        ("mode: !!python/object:os.system x\n", "yaml", "line 1"),
        ("? [a, b]\n: c\n", "yaml", "YAML"),
        ("&a [*a]\n", "yaml", "aliases"),
        ("1: 2\n", "yaml", "no such field"),
        ("mode: \x07\n", "yaml", "YAML"),
        ("mode: 2001-99-99\n", "yaml", "YAML"),
    ],
)
def test_broken_json_and_yaml(text: str, format: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(text, format=format)  # type: ignore[arg-type]
    assert words in str(caught.value)


def test_yaml_that_expands_without_measure() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    with pytest.raises(ConfigError, match="aliases expand"):
        load_config("\n".join(lines), format="yaml")


def test_yaml_anchors_are_fine() -> None:
    text = """
      mode: TRAINING
      num_hosts: 1
      num_tensor_cores: 1
      table_descriptor:
        - name: a
          vocabulary_size: 10
          dimension: 4
          optimization_parameters: &o {adagrad: {}, learning_rate: {constant: 1e-3}}
        - {name: b, vocabulary_size: 10, dimension: 4, optimization_parameters: *o}
      feature_descriptor: [{input_shape: [2]}, {table_id: 1, input_shape: [2]}]
    """
    config = load_config(text, format="yaml")
    assert config.tables[0].optimizer == config.tables[1].optimizer
    assert config.tables[0].optimizer.learning_rate.constant == pytest.approx(1e-3)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000])
@pytest.mark.parametrize("format", ["json", "yaml"])
def test_deep_nesting(text: str, format: str) -> None:
    with pytest.raises(ConfigError):
        load_config(text, format=format)  # type: ignore[arg-type]


def test_deep_nesting_in_text() -> None:
    inside = "optimization_parameters{user_defined_program{program{host_program_shape{result{" + "tuple_shapes{" * 5000
    with pytest.raises(ConfigError, match="nested too deeply"):
        load_config("table_descriptor{" + inside + "}" * 5006)


def test_bytes_with_text_in_them_say_so() -> None:
    with pytest.raises(ConfigError, match="look like text: pass a str"):
        load_config(examples.BY_FEATURE.encode())


def test_bytes_cut_off_name_the_field_and_byte() -> None:
    with pytest.raises(ConfigError, match=rf"at byte \d+ of {len(BINARY) - 1}, field 10 has") as caught:
        load_config(BINARY[:-1])
    assert caught.value.field == "feature_descriptor[1]"


def test_name_that_is_not_utf8() -> None:
    with pytest.raises(ConfigError, match="not UTF-8") as caught:
        load_config(BINARY.replace(b"items", b"item\xff"))
    assert caught.value.field == "table_descriptor[1].name"


def test_text_file_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "x.pbtxt"
    path.write_bytes(b"mode: TRAINING # \xff")
    with pytest.raises(ConfigError, match="UTF-8") as caught:
        load_config(path)
    assert caught.value.field == f"{path}: byte 17"


def test_wrong_wire_type() -> None:
    with pytest.raises(ConfigError, match="wrong wire type") as caught:
        load_config(b"\x08\x05" + BINARY)
    assert caught.value.field == "table_descriptor"


def test_an_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(ConfigError("mode", "is UNSPECIFIED")))
    assert isinstance(error, ConfigError)
    assert (error.field, error.problem, str(error)) == ("mode", "is UNSPECIFIED", "mode: is UNSPECIFIED")
