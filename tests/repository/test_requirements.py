"""A missing, mismatched or broken torch, fbgemm or torchrec is named with the line that mends it; configs still load.

Each case is a process that sees no installed packages but protobuf and stand-ins for the three.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import google.protobuf
import pytest

ROOT = Path(__file__).resolve().parents[2]
TORCH = "class ops:\n    class fbgemm:\n        jagged_to_padded_dense = None\n"
UNDEFINED = 'raise OSError("fbgemm_gpu_py.so: undefined symbol: _ZN2at4_ops5zeros4callE")\n'


@dataclass
class StandIn:
    """A package: its distribution's name and version (None: not installed) and what its import runs."""

    distribution: str
    version: str | None
    source: str = ""


def environment(folder: Path, **stand_ins: StandIn) -> Path:
    """A folder to import from: protobuf and the stand-ins, by module name."""
    (folder / "google").symlink_to(Path(google.protobuf.__file__).parents[1])
    for module, stand_in in stand_ins.items():
        if stand_in.version is None:
            continue
        (folder / module).mkdir()
        (folder / module / "__init__.py").write_text(stand_in.source)
        info = folder / f"{stand_in.distribution.replace('-', '_')}-{stand_in.version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {stand_in.distribution}\nVersion: {stand_in.version}\n"
        )
    return folder


def run(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    program = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(folder)!r}]\n{code}"
    # -S: no site-packages; -E: no PYTHONPATH.
    return subprocess.run([sys.executable, "-S", "-E", "-c", program], capture_output=True, text=True, check=False)


CASES = {
    "nothing": ({}, "torch is not installed"),
    "old torch": ({"torch": StandIn("torch", "2.9.1", TORCH)}, "torch 2.9.1 is installed"),
    "later minor": ({"torch": StandIn("torch", "2.130.0", TORCH)}, "torch 2.130.0 is installed"),
    "no fbgemm": ({"fbgemm_gpu": StandIn("fbgemm-gpu-cpu", None)}, "fbgemm-gpu-cpu is not installed"),
    "old fbgemm": ({"fbgemm_gpu": StandIn("fbgemm-gpu-cpu", "1.2.0")}, "fbgemm-gpu-cpu 1.2.0 is installed"),
    "broken fbgemm": ({"fbgemm_gpu": StandIn("fbgemm-gpu", "1.8.0", UNDEFINED)}, "fbgemm_gpu 1.8.0 cannot be imported"),
    "no operators": (
        {"torch": StandIn("torch", "2.13.0", "class ops:\n    class fbgemm: pass\n")},
        "operators of fbgemm",
    ),
    "no torchrec": ({"torchrec": StandIn("torchrec", None)}, "torchrec is not installed"),
    "old torchrec": ({"torchrec": StandIn("torchrec", "1.2.0")}, "torchrec 1.2.0 is installed"),
    "torchrec without its own needs": (
        {"torchrec": StandIn("torchrec", "1.8.0", "import tensordict\n")},
        "torchrec 1.8.0 cannot be imported (No module named 'tensordict')",
    ),
}
WORKING = {
    "torch": StandIn("torch", "2.13.0+cpu", TORCH),
    "fbgemm_gpu": StandIn("fbgemm-gpu-cpu", "1.8.0"),
    "torchrec": StandIn("torchrec", "1.8.0"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_error_names_versions_and_the_install_line(case: str, tmp_path: Path) -> None:
    changed, problem = CASES[case]
    folder = environment(tmp_path, **({**WORKING, **changed} if changed else {}))
    done = run(folder, "import tpuemb_torch\ntpuemb_torch.TPUEmbedding")
    assert done.returncode == 1
    message = done.stderr[done.stderr.rindex("ImportError: ") :]
    assert problem in message
    assert "torch 2.13, torchrec 1.8 and fbgemm 1.8" in message
    assert 'pip install "torch==2.13.' in message
    assert "undefined symbol" not in message.splitlines()[-1]


@pytest.mark.parametrize("case", CASES)
def test_configs_load_all_the_same(case: str, tmp_path: Path) -> None:
    folder = environment(tmp_path, **CASES[case][0])
    code = """
import tpuemb_torch
text = '''mode: TRAINING num_hosts: 1 num_tensor_cores: 1
table_descriptor { name: "t" vocabulary_size: 8 dimension: 4
  optimization_parameters { adagrad {} learning_rate { constant: 0.1 } } }
feature_descriptor { name: "f" table_id: 0 input_shape: 2 }'''
print(tpuemb_torch.load_config(text).tables[0].name)
"""
    done = run(folder, code)
    assert done.stdout == "t\n", done.stderr


def test_matching_versions_pass(tmp_path: Path) -> None:
    done = run(
        environment(tmp_path, **WORKING),
        "from tpuemb_torch._requirements import require_torchrec\nrequire_torchrec()\nprint('fine')",
    )
    assert done.stdout == "fine\n", done.stderr


@pytest.mark.parametrize(
    "statement",
    ["from tpuemb_torch import checkpoint", "from tpuemb_torch import ops", "from tpuemb_torch.models import DLRM"],
)
def test_importing_a_module_says_it_too(statement: str, tmp_path: Path) -> None:
    done = run(environment(tmp_path), statement)
    assert "ImportError: tpuemb_torch: torch is not installed" in done.stderr
