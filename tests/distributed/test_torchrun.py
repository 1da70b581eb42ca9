"""Jobs started by torchrun: two nodes of two processes each, and a rank that is killed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed import torchrun_program as program
from tests.distributed.cases import concatenate

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 58


def start(folder: Path, port: int, *options: str, arguments: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=localhost:{port}",
    ]
    command += ["--rdzv-id=test", *options, "-m", "tests.distributed.torchrun_program", str(folder), *arguments]
    environment = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        # As scripts/launch/torchrun.sh says.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(jobs: list[subprocess.Popen[str]]) -> list[str]:
    try:
        outputs = [job.communicate(timeout=TIMEOUT_S)[0] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    for job, output in zip(jobs, outputs, strict=True):
        assert job.returncode == 0, output
    return outputs


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def one_process(world: int) -> tuple[list[float], dict[str, dict[str, torch.Tensor]]]:
    embedding = program.layer()
    parts = [[program.batch(number, rank) for rank in range(world)] for number in range(program.STEPS)]
    losses = [program.step(embedding, concatenate(part)) for part in parts]
    return losses, embedding.retrieve_parameters()


def check(folder: Path, world: int) -> Any:
    losses, parameters = one_process(world)
    found = [json.loads((folder / f"losses-{rank}.json").read_text()) for rank in range(world)]
    np.testing.assert_allclose(np.sum(found, axis=0), losses, rtol=1e-5)
    result = torch.load(folder / "result.pt")
    for table, slots in parameters.items():
        for slot, values in slots.items():
            np.testing.assert_allclose(result["parameters"][table][slot], values, rtol=1e-5, atol=1e-6)
    return result


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(110)
def test_two_nodes_of_two_processes(tmp_path: Path) -> None:
    port = free_port()
    finish([start(tmp_path, port, "--nnodes=2", "--nproc-per-node=2") for _ in range(2)])
    assert check(tmp_path, 4)["local_world_size"] == "2"


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(110)
def test_a_killed_rank_resumes_from_the_last_checkpoint_with_the_same_losses(tmp_path: Path) -> None:
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    for folder in (undisturbed, killed):
        folder.mkdir()
    options = ("--nnodes=1", "--nproc-per-node=2", "--max-restarts=1")
    (output,) = finish([start(killed, free_port(), *options, arguments=("--kill-rank=1", "--kill-step=3"))])
    assert "SIGKILL" in output or "Signal 9" in output or "-9" in output
    result = check(killed, 2)
    assert result["restarts"] == "1"
    finish([start(undisturbed, free_port(), *options)])
    wanted = torch.load(undisturbed / "result.pt")
    assert wanted["restarts"] == "0"
    for table, slots in wanted["parameters"].items():
        for slot, values in slots.items():
            assert torch.equal(values, result["parameters"][table][slot]), f"{table} {slot}"
    for rank in range(2):
        name = f"losses-{rank}.json"
        assert json.loads((killed / name).read_text()) == json.loads((undisturbed / name).read_text())
