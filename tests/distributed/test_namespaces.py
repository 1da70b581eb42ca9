"""A job of two nodes that share nothing but a cable: one in each of two network namespaces, joined by a veth pair."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.test_torchrun import ROOT, TIMEOUT_S, check

#: Namespaces of the job's own, gone with its last process; as root, or as the root of a user namespace.
NAMESPACES = ("--net", "--mount", "--pid", "--fork", "--kill-child")
WAYS = (("unshare", *NAMESPACES), ("unshare", "--user", "--map-root-user", *NAMESPACES))
#: Joins this namespace, 10.0.0.1, and another, 10.0.0.2.  `ip netns` keeps names in /run, which is private here.
CABLE = """
set -e
mount -t tmpfs tmpfs /run
ip netns add other
ip link add node0 type veth peer name node1 netns other
ip address add 10.0.0.1/24 dev node0
ip link set node0 up
ip link set lo up
ip -n other address add 10.0.0.2/24 dev node1
ip -n other link set node1 up
ip -n other link set lo up
"""


def way() -> tuple[str, ...]:
    """How this machine lets us make network namespaces; skips the test if it does not."""
    for tool, package in (("ip", "iproute2"), ("unshare", "util-linux"), ("mount", "mount")):
        if shutil.which(tool) is None:
            pytest.skip(f"needs the command {tool} (Debian package {package})")
    problems = []
    for found in WAYS:
        tried = subprocess.run([*found, "sh", "-c", CABLE + "ip netns exec other true"], capture_output=True, text=True)
        if tried.returncode == 0:
            return found
        problems.append(f"{shlex.join(found)}: {tried.stderr.strip()}")
    pytest.skip("needs network namespaces, as root or in a user namespace: " + "; ".join(problems))


def node(number: int, folder: Path) -> str:
    """The command of one node."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=10.0.0.1:29500", f"--rdzv-conf=is_host={int(number == 0)}"]
    command += [f"--local-addr=10.0.0.{number + 1}", "--rdzv-id=test"]
    command += ["-m", "tests.distributed.torchrun_program", str(folder)]
    where = "ip netns exec other " if number else ""
    return f"{where}env GLOO_SOCKET_IFNAME=node{number} {shlex.join(command)}"


def start(found: tuple[str, ...], folder: Path) -> subprocess.Popen[str]:
    job = f"{CABLE}{node(1, folder)} & other=$!\n{node(0, folder)}\nwait $other\n"
    job += f"ip -json -statistics link show node0 > {shlex.quote(str(folder / 'link.json'))}"
    return subprocess.Popen(
        [*found, "sh", "-c", job],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(110)
def test_two_nodes_in_two_network_namespaces(tmp_path: Path) -> None:
    job = start(way(), tmp_path)
    try:
        output, _ = job.communicate(timeout=TIMEOUT_S)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    assert job.returncode == 0, output
    assert check(tmp_path, 4)["local_world_size"] == "2"
    (link,) = json.loads((tmp_path / "link.json").read_text())
    for direction in ("rx", "tx"):
        assert link["stats64"][direction]["bytes"] > 10_000, link
