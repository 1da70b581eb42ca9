"""Configurations that TensorFlow's own code wrote."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.golden import GOLDEN, golden
from tpuemb_torch.config import Config, ConfigError, ConfigWarning, load_config
from tpuemb_torch.config.parse import parse
from tpuemb_torch.config.write import save_config, to_json, to_text, to_yaml


def names(folder: str) -> list[str]:
    """The files of a folder without their endings; one name that will be skipped where there is no golden data."""
    if GOLDEN is None or not (GOLDEN / folder).is_dir():
        return ["missing"]
    return sorted(path.stem for path in (GOLDEN / folder).glob("*.pb"))


VALID, INVALID = names("configs/valid"), names("configs/invalid")

#: What TensorFlow leaves open, by the name of the case: the field that is rejected, or "accepted" or "warned about".
DECISIONS = {
    "adam_beta2_negative": "table_descriptor[0].optimization_parameters.adam.beta2",
    "adam_epsilon_negative": "table_descriptor[0].optimization_parameters.adam.epsilon",
    "adam_nonlazy_without_accumulation": "table_descriptor[0].optimization_parameters.adam.use_non_lazy_adam",
    "duplicate_feature_name": "feature_descriptor[1].name",
    "feature_empty_input_shape": "feature_descriptor[0].input_shape",
    "frequency_estimator_dimension": "warned about",
    "gradient_clip_without_accumulation": "accepted",
    "inf_learning_rate": "table_descriptor[0].optimization_parameters.learning_rate.constant",
    "nan_learning_rate": "table_descriptor[0].optimization_parameters.learning_rate.constant",
    "negative_learning_rate": "table_descriptor[0].optimization_parameters.learning_rate.constant",
    "num_features_and_batch_with_features": "batch_size_per_tensor_core",
    "num_tensor_cores_zero": "num_tensor_cores",
    "table_without_feature": "table_descriptor[1]",
    "wrong_wire_type": "table_descriptor",
}


def load(path: Path) -> Config:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return load_config(path)


@pytest.mark.parametrize("name", VALID)
def test_valid_in_every_format(name: str, tmp_path: Path) -> None:
    path = golden(f"configs/valid/{name}.pb")
    config = load(path)
    assert config.serialize() == path.read_bytes()
    assert config.to_proto() == parse(path).proto
    canonical = config.to_proto().SerializeToString(deterministic=True)
    for write, format in ((to_text, "text"), (to_json, "json"), (to_yaml, "yaml")):
        assert load_config(write(config.to_proto()), format=format).serialize() == canonical  # type: ignore[arg-type]
    for ending in (".pb", ".pbtxt", ".json", ".yaml"):
        save_config(config, tmp_path / f"x{ending}")
        assert load(tmp_path / f"x{ending}").to_proto() == config.to_proto()


@pytest.mark.parametrize("name", VALID)
def test_text_and_bytes_agree(name: str) -> None:
    text, binary = load(golden(f"configs/valid/{name}.pbtxt")), load(golden(f"configs/valid/{name}.pb"))
    known = binary.to_proto()
    known.DiscardUnknownFields()
    assert text.to_proto() == known
    assert (text.tables, text.features) == (binary.tables, binary.features)


@pytest.mark.parametrize("name", VALID)
def test_values_are_those_of_the_code_that_wrote_it(name: str) -> None:
    config = load(golden(f"configs/valid/{name}.pb"))
    facts: dict[str, Any] = json.loads(golden(f"configs/valid/{name}.json").read_text())
    if "n_slots" in facts:
        from tpuemb_torch.config.hlo import count_slots
        from tpuemb_torch.protos import hlo_pb2

        program = config.tables[0].optimizer.program
        assert program is not None
        assert count_slots(hlo_pb2.HloModuleProto.FromString(program)) == facts["n_slots"]
    if "tables" not in facts:
        return
    assert config.num_hosts == facts["num_hosts"]
    assert [(t.name, t.dimension) for t in config.tables] == [(t["name"], t["dim"]) for t in facts["tables"]]
    # TensorFlow gives each host at least one row.
    rows = [max(t["vocabulary_size"], config.num_hosts) for t in facts["tables"]]
    assert [t.vocabulary_size for t in config.tables] == rows
    assert [f.table.name for f in config.features] == [f["table"] for f in facts["features"]]
    # With several cores per replica (SPMD), TensorFlow's program sees the activations of all of them.
    cores = facts.get("cores_per_replica") or 1
    shapes = [tuple(f["expected_activation_shape"]) for f in facts["features"]]
    assert [(shape[0] * cores, *shape[1:]) for shape in config.output_shapes] == shapes
    assert config.num_learning_rates == len(facts["dynamic_learning_rates_in_tag_order"])
    if facts["source"].startswith("tensorflow 2.21"):
        check_optimizers(config, facts)
        for feature, fact in zip(config.features, facts["features"], strict=True):
            assert fact["name"] is None or feature.name == fact["name"]


def check_optimizers(config: Config, facts: dict[str, Any]) -> None:
    """TensorFlow 2's arguments, where they have the proto's meaning."""
    tags = facts["dynamic_learning_rates_in_tag_order"]
    for table, fact in zip(config.tables, facts["tables"], strict=True):
        optimizer, arguments = table.optimizer, fact["optimizer"]["args"]
        rate = arguments["learning_rate"]
        if isinstance(rate, str):
            assert optimizer.learning_rate.constant is None
            assert optimizer.learning_rate.tag is not None
            assert tags[optimizer.learning_rate.tag] == rate
        else:
            assert optimizer.learning_rate.tag is None
            assert optimizer.learning_rate.constant == pytest.approx(rate, rel=1e-6)
        assert optimizer.accumulation == ("enabled" if arguments["use_gradient_accumulation"] else "disabled")
        assert optimizer.weight_decay_factor == pytest.approx(arguments["weight_decay_factor"] or 0, rel=1e-6)
        for limits, prefix in ((optimizer.clipping_limits, "weight"), (optimizer.gradient_clipping_limits, "gradient")):
            lower, upper = arguments[f"clip_{prefix}_min"], arguments[f"clip_{prefix}_max"]
            assert limits.lower == (float("-inf") if lower is None else pytest.approx(lower, rel=1e-6))
            assert limits.upper == (float("inf") if upper is None else pytest.approx(upper, rel=1e-6))
        shared = set(arguments) & set(optimizer.hyperparameters)
        for name in shared:
            assert optimizer.hyperparameters[name] == pytest.approx(arguments[name], rel=1e-6)
        if optimizer.algorithm == "adam":
            assert optimizer.hyperparameters["beta1"] == pytest.approx(arguments["beta_1"], rel=1e-6)
            assert optimizer.hyperparameters["beta2"] == pytest.approx(arguments["beta_2"], rel=1e-6)
            assert optimizer.hyperparameters["use_non_lazy_adam"] == (not arguments["lazy_adam"])
            assert optimizer.hyperparameters["use_sum_inside_sqrt"] == arguments["sum_inside_sqrt"]
        assert (optimizer.quantization is None) == (fact["quantization"] is None)


@pytest.mark.parametrize("name", INVALID)
@pytest.mark.parametrize("ending", [".pb", ".pbtxt"])
def test_invalid(name: str, ending: str) -> None:
    facts = json.loads(golden(f"configs/invalid/{name}.json").read_text())
    path = golden(f"configs/invalid/{name}.pb").with_suffix(ending)
    if not path.exists():
        pytest.skip("there is no text form of bytes that are no message")
    if facts["kind"] != "must_reject" and name not in DECISIONS:
        pytest.skip(f"no decision is written down for {name}")
    decision = "rejected" if facts["kind"] == "must_reject" else DECISIONS[name]
    if decision == "accepted":
        load(path)
    elif decision == "warned about":
        with pytest.warns(ConfigWarning):
            load_config(path)
    else:
        with pytest.raises(ConfigError) as caught:
            load_config(path)
        assert caught.value.field
        assert re.fullmatch(r"[a-z_0-9.\[\]]+", caught.value.field) or str(path) in caught.value.field
        if decision != "rejected":
            assert caught.value.field == decision
