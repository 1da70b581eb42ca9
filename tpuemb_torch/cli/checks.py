"""What `tpuemb doctor` looks at; each check survives whatever is missing or broken."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

from tpuemb_torch._requirements import FBGEMM, TORCH, TORCHREC, install_lines, installed_version

_LEAST_PYTHON = (3, 11)
_LEAST_PROTOBUF = (5, 26)


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: what.
        ok: whether it is there and can be used.
        needed: whether the layer needs it; other things are for some features only.
        found: version, path or devices; "not found" without.
        note: what it is for, or what to do.
    """

    name: str
    ok: bool
    needed: bool
    found: str
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields."""
        return asdict(self)


def run_checks() -> tuple[list[Check], list[str]]:
    """Returns all checks, and the commands that install what is needed and missing."""
    gpus = _nvidia_gpus()
    libraries = [
        _library("torch", ("torch",), TORCH, "torch"),
        _library("fbgemm", ("fbgemm-gpu-cpu", "fbgemm-gpu"), FBGEMM, "fbgemm_gpu"),
        _library("torchrec", ("torchrec",), TORCHREC, "torchrec"),
    ]
    checks = [_package(), _python(), _protobuf(), *libraries, _gpu(gpus), _compiler(), _matplotlib(), _tensorflow()]
    advice = []
    if not all(check.ok for check in libraries):
        advice = install_lines(gpu=bool(gpus))
    if not next(check for check in checks if check.name == "protobuf").ok:
        advice.append(f'pip install "protobuf>={_text(_LEAST_PROTOBUF)}"')
    return checks, advice


def _package() -> Check:
    from tpuemb_torch import __version__

    return Check("tpuemb_torch", True, True, __version__)


def _python() -> Check:
    ok = sys.version_info[:2] >= _LEAST_PYTHON
    note = "" if ok else f"needs Python {_text(_LEAST_PYTHON)} or later"
    return Check("python", ok, True, f"{platform.python_version()} ({sys.executable}, {platform.platform()})", note)


def _protobuf() -> Check:
    found = installed_version("protobuf")
    if found is None:
        return Check("protobuf", False, True, "not found", f"needs {_text(_LEAST_PROTOBUF)} or later")
    number = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
    ok = number >= _LEAST_PROTOBUF
    return Check("protobuf", ok, True, found, "" if ok else f"needs {_text(_LEAST_PROTOBUF)} or later")


def _library(name: str, distributions: tuple[str, ...], wanted: str, module: str) -> Check:
    """A library of one version, which must also import: a build for another torch does not."""
    found = installed_version(*distributions)
    if found is None:
        return Check(name, False, True, "not found", f"needs {wanted}")
    if not found.startswith(f"{wanted}."):
        return Check(name, False, True, found, f"needs {wanted}")
    try:
        import_module(module)
        if module == "fbgemm_gpu":
            torch = import_module("torch")
            if not hasattr(torch.ops.fbgemm, "jagged_to_padded_dense"):
                raise ImportError("its operators are not loaded: its build does not fit torch's")
    except Exception as error:  # a mismatched build raises OSError, ImportError, AttributeError, RuntimeError...
        text = str(error).strip().splitlines() or [type(error).__name__]
        return Check(name, False, True, found, f"cannot be imported: {text[0]}")
    return Check(name, True, True, found)


def _nvidia_gpus() -> list[str]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        done = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.split(" (UUID")[0].strip() for line in done.stdout.splitlines() if line.startswith("GPU")]


def _gpu(gpus: list[str]) -> Check:
    purpose = "not needed: the layer runs on the CPU as well"
    if not gpus:
        return Check("GPU", False, False, "not found", purpose)
    try:
        import torch

        usable = torch.cuda.is_available()
    except Exception:  # torch is missing or broken, which its own check says
        usable = False
    note = "" if usable else "torch cannot use it: install its CUDA build, and the driver that it needs"
    return Check("GPU", usable, False, "; ".join(gpus), note)


def _compiler() -> Check:
    # As the kernels look for it (kernels/native.py), which cannot be imported without torch.
    for name in (os.environ.get("CXX", ""), "g++", "clang++", "c++"):
        path = shutil.which(shlex.split(name)[0]) if name.strip() else None
        if path is not None:
            return Check("C++ compiler", True, False, f"{path} ({_first_line(path)})")
    return Check(
        "C++ compiler",
        False,
        False,
        "not found",
        'kernel="compiled" needs g++ or clang++ (or CXX); "eager" works without',
    )


def _first_line(path: str) -> str:
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"does not run: {error}"
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else "no version"


def _matplotlib() -> Check:
    found = installed_version("matplotlib")
    note = "" if found else 'plots need it: pip install "tpuemb-torch[plot]"'
    return Check("matplotlib", found is not None, False, found or "not found", note)


def _tensorflow() -> Check:
    found = installed_version("tensorflow", "tensorflow-cpu")
    return Check("tensorflow", found is not None, False, found or "not found", "" if found else "nothing here needs it")


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
