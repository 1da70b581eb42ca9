"""What is said about a configuration."""

from __future__ import annotations

import json
import warnings

import pytest
from rich.console import Console

from tests.config import examples
from tests.golden import GOLDEN, golden
from tpuemb_torch.config import Config, load_config
from tpuemb_torch.planning import format_bytes
from tpuemb_torch.report import describe, print_config, program_formula


def printed(config: Config, width: int = 160) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_config(config, console, "title")
    return console.export_text()


def test_numbers() -> None:
    description = describe(load_config(examples.BY_FEATURE))
    users, items = description["tables"]
    assert description["weight_bytes"] == 100 * 8 * 4 + 50 * 4 * 4
    assert (users["weight_bytes"], users["slot_bytes"], users["slots"]) == (3200, 3200, ["accumulators"])
    assert (items["weight_bytes"], items["slot_bytes"], items["slots"]) == (800, 1600, ["momenta", "velocities"])
    assert description["slot_bytes"] == 4800
    assert (users["learning_rate"], users["learning_rate_tag"]) == (0.1, None)
    assert (items["learning_rate"], items["learning_rate_tag"]) == (None, 0)
    assert items["hyperparameters"] == {
        "beta1": 0.9,
        "beta2": 0.999,
        "epsilon": 1e-7,
        "use_non_lazy_adam": False,
        "use_sum_inside_sqrt": True,
    }
    assert items["features"] == ["clicked"]
    assert description["num_learning_rates"] == 1
    assert description["features"][1] == {
        "name": "clicked",
        "table": "items",
        "input_shape": [16, 5],
        "output_shape": [16, 5, 4],
    }
    assert description["notes"] == []


def test_options() -> None:
    config = load_config(
        examples.with_optimizer(
            """adagrad {} learning_rate { constant: 1 }
            clipping_limits { lower { value: -1.5 } } gradient_accumulation_status: DISABLED
            gradient_clipping_limits { lower { value: -2 } upper { value: 0.1 } }
            weight_decay_factor: 0.25 multiply_weight_decay_factor_by_learning_rate: true
            simulated_quantization {
              enabled: true num_buckets: 16 clipping_limits { lower { value: -1 } upper { value: 1 } }
            }
            low_dimensional_packing_status: ENABLED hot_id_replication_configuration { status: ENABLED }"""
        )
    )
    table = describe(config)["tables"][0]
    assert table["clipping_limits"] == [-1.5, None]
    assert table["gradient_clipping_limits"] == [-2.0, 0.1]
    assert table["quantization"] == {"lower": -1.0, "upper": 1.0, "num_buckets": 16}
    assert table["gradient_accumulation"] is False
    text = printed(config, width=300)
    for words in (
        "gradients not accumulated",
        "weights in [-1.5, inf]",
        "gradients in [-2, 0.1]",
        "weight decay 0.25 x learning rate",
        "16 buckets in [-1, 1]",
        "low_dimensional_packing: no effect",
        "Note: hot-id replication",
        "Note: low-dimensional packing",
    ):
        assert words in text


def test_tables_with_one_optimizer_share_its_line() -> None:
    proto = examples.by_table()
    for table in proto.table_descriptor:
        table.optimization_parameters.CopyFrom(proto.table_descriptor[0].optimization_parameters)
    text = printed(load_config(proto))
    assert text.count("adagrad") == 1
    assert text.count("#1") == 3
    assert "#2" not in text


def test_spmd_is_noted() -> None:
    proto = examples.by_feature()
    proto.spmd_sharding.enabled = True
    proto.profile_data_directory = "/x"
    notes = describe(load_config(proto))["notes"]
    assert len(notes) == 2
    assert "write_stats()" in notes[0]
    assert "spmd_sharding" in notes[1]


def test_names_are_not_markup() -> None:
    proto = examples.by_feature()
    proto.table_descriptor[0].name = "[red]t[/red]"
    proto.feature_descriptor[0].name = "[/nothing]"
    text = printed(load_config(proto))
    assert "[red]t[/red]" in text
    assert "[/nothing]" in text


def test_nothing_is_cut_in_a_narrow_window() -> None:
    text = printed(load_config(examples.BY_FEATURE), width=70)
    assert "…" not in text


def test_program() -> None:
    program = load_config(examples.with_program(examples.program(num_slots=1))).tables[0].optimizer.program
    assert program is not None
    assert program_formula(program) == ["w' = w - lr*g", "Slot_0' = Slot_0"]
    assert describe(load_config(examples.with_program(examples.program())))["tables"][0]["program"] == ["w' = w - lr*g"]


def test_user_defined_slots() -> None:
    table = describe(load_config(examples.with_program(examples.program(num_slots=2))))["tables"][0]
    assert table["slots"] == ["Slot_0", "Slot_1"]
    assert table["slot_bytes"] == 2 * table["weight_bytes"]


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536 * 1024**2, "1.5 GiB"),
        (2**70, "1048576.0 PiB"),
        (None, "unknown"),
    ],
)
def test_bytes(size: int | None, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    "name", ["missing"] if GOLDEN is None else sorted(p.stem for p in GOLDEN.glob("configs/valid/*.pb"))
)
def test_every_golden_configuration_can_be_described(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = load_config(golden(f"configs/valid/{name}.pb"))
    description = describe(config)
    assert json.loads(json.dumps(description, allow_nan=False)) == description
    facts = json.loads(golden(f"configs/valid/{name}.json").read_text())
    for table, fact in zip(description["tables"], facts.get("tables", []), strict=False):
        if "slot_names" in fact["optimizer"]:
            assert table["slots"] == fact["optimizer"]["slot_names"]
    text = printed(config)
    assert all(table.name in text for table in config.tables)
