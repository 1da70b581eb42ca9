"""Saving and loading hold some chunks of a table beside it, not a copy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from tests.checkpoint.cases import layer
from tpuemb_torch.checkpoint import load, save

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

def more(function, *args):
    with open("/proc/self/clear_refs", "w") as reset:  # the peak becomes what is in use now
        reset.write("5")
    before = peak()
    function(*args)
    print(peak() - before)

path, rows = sys.argv[1], int(sys.argv[2])
small = layer()
save(path + "/small", small)
load(path + "/small", small)
embedding = layer(rows, dimension=64, optimizer="stochastic_gradient_descent {}")
more(save, path + "/large", embedding)
more(load, path + "/large", embedding)
"""


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_a_table_of_400_mb_takes_a_few_chunks_more(tmp_path: Path) -> None:
    size = 400 * 2**20
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path), str(size // (4 * 64))]
    output = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]).stdout
    saving, loading = map(int, output.split())
    assert saving < 0.2 * size
    assert loading < 0.2 * size
