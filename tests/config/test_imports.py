"""Reading a configuration needs protobuf, and YAML where it is YAML; no torch, no TensorFlow."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FORBIDDEN = ("torch", "torchrec", "fbgemm_gpu", "tensorflow", "numpy", "yaml")


def test_loading_a_configuration_imports_no_framework() -> None:
    code = f"""
import sys
from tests.config import examples
from tpuemb_torch.config import load_config
config = load_config(examples.BY_FEATURE)
config.to_text(), config.serialize(), config.output_shapes
print([name for name in {FORBIDDEN!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
