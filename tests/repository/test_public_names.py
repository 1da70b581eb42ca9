"""The public surface: adding or removing a name or a command is a decision, made here."""

from __future__ import annotations

import pytest
from typer.main import get_command

import tpuemb_torch

NAMES = {
    "Config",
    "ConfigError",
    "ConfigWarning",
    "DeduplicationData",
    "Feature",
    "InputError",
    "LearningRate",
    "LearningRates",
    "Limits",
    "Optimizer",
    "Plan",
    "PlanError",
    "PreparedBatch",
    "Quantization",
    "Ragged",
    "Sparse",
    "Stats",
    "StatsError",
    "TPUEmbedding",
    "TPUEmbeddingBagCollection",
    "Table",
    "TableStats",
    "TrainPipeline",
    "__version__",
    "checkpoint",
    "load_config",
    "make_plan",
    "models",
    "ops",
    "read_plan",
    "read_stats",
    "save_config",
    "save_plan",
    "shard",
    "sharders",
}
COMMANDS = {
    "validate",
    "inspect",
    "convert",
    "stats",
    "import-checkpoint",
    "export-checkpoint",
    "plan",
    "diff",
    "doctor",
    "bench",
}


def test_public_names() -> None:
    assert set(tpuemb_torch.__all__) == NAMES


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_public_name_can_be_had_and_is_documented(name: str) -> None:
    value = getattr(tpuemb_torch, name)
    assert name == "__version__" or value.__doc__


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'TPUEmbeding'"):
        tpuemb_torch.TPUEmbeding  # noqa: B018


def test_commands() -> None:
    from tpuemb_torch.cli import app

    command = get_command(app)
    assert set(command.commands) == COMMANDS  # type: ignore[attr-defined]


def test_ops_are_functions_with_docstrings() -> None:
    for name in tpuemb_torch.ops.__all__:
        assert getattr(tpuemb_torch.ops, name).__doc__, name
