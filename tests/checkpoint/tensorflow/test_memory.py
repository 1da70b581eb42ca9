"""Memory: importing holds a block of rows, reading the tables, exporting one tensor."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.checkpoint.tensorflow.examples import config_of
from tpuemb_torch.checkpoint import write_tensorflow
from tpuemb_torch.checkpoint.tensorflow.bundle_writer import BundleWriter
from tpuemb_torch.config import save_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SHAPE = (2**20, 96)
TABLE = 4 * SHAPE[0] * SHAPE[1]  # 403 MB, and as much for each slot
SLOTS = ("parameters", "momenta", "velocities")

_COMMAND = """
import resource, sys
from tpuemb_torch.cli import main
import tpuemb_torch.checkpoint.tensorflow.to_checkpoint, rich.console
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
print("KiB", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, file=sys.stderr)
"""
_READ = """
import resource, sys
from tpuemb_torch.checkpoint import read_tensorflow
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert read_tensorflow(sys.argv[1])["t"]["parameters"][-1, -1] == 1
print("KiB", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, file=sys.stderr)
"""


def used(program: str, arguments: Sequence[object]) -> int:
    """Bytes that a program takes beyond its imports."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return 1024 * int(done.stderr.rpartition("KiB ")[2])


def test_importing_and_exporting(tmp_path: Path) -> None:
    save_config(config_of({"t": SHAPE}, "adam"), tmp_path / "c.pb")
    write_tensorflow(tmp_path / "ckpt", {"t": dict.fromkeys(SLOTS, lambda: torch.ones(SHAPE))})
    importing = ["import-checkpoint", tmp_path / "ckpt", "--config", tmp_path / "c.pb", "--out", tmp_path / "out"]
    assert used(_COMMAND, importing) < 0.4 * TABLE
    assert used(_COMMAND, ["export-checkpoint", tmp_path / "out", tmp_path / "back"]) < 1.3 * TABLE


@pytest.mark.parametrize("parts", [1, 2])
def test_reading(tmp_path: Path, parts: int) -> None:
    with BundleWriter(tmp_path / "ckpt") as writer:
        for part in range(parts):
            name = "t" if parts == 1 else f"t/part_{part}"
            writer.add(name, torch.ones(SHAPE[0] // parts, SHAPE[1]))
    assert used(_READ, [tmp_path / "ckpt"]) < 1.3 * TABLE
