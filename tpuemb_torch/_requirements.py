"""Checks torch, fbgemm and torchrec before they are used; imports nothing but the standard library itself.

The three are built against each other: any other combination ends in an undefined symbol or a missing operator, so
what is wrong is said here, with the line that mends it.
"""

from __future__ import annotations

import shutil
import sys
from functools import cache
from importlib import import_module, metadata
from types import ModuleType

#: Major and minor versions that belong together, by module, in the order in which they are imported.
NEEDED = {"torch": "2.13", "fbgemm_gpu": "1.8", "torchrec": "1.8"}

_DISTRIBUTIONS = {
    "torch": ("torch",),
    "fbgemm_gpu": ("fbgemm-gpu-cpu", "fbgemm-gpu"),
    "torchrec": ("torchrec",),
}

# TorchRec's package asks for the CUDA build of fbgemm, so beside the CPU build it goes in without its dependencies
# and those that it imports are named here (pyproject.toml, extra "cpu", has the same ones).
_CPU_LINE = (
    'pip install "torch==2.13.0" "fbgemm-gpu-cpu==1.8.0" "torchmetrics==1.0.3" tensordict pyre-extensions tqdm'
    ' && {python} -m pip install --no-deps "torchrec==1.8.0"'
)
_GPU_LINE = 'pip install "torch==2.13.0" "fbgemm-gpu==1.8.0" "torchrec==1.8.0"'


@cache
def require_torchrec() -> None:
    """Imports torch, fbgemm and torchrec.

    Raises:
        ImportError: if one is missing, broken or of another version; says what was found, what is needed and the
            line that installs it.
    """
    problem = find_problem()
    if problem is not None:
        raise ImportError(f"{problem}\n{_needed()} Install them with\n  {install_line()}")


def find_problem() -> str | None:
    """What is wrong with torch, fbgemm and torchrec, in one line; None if all three work together."""
    # What pip says first: importing a mismatched library can do worse than raise.
    for module in NEEDED:
        for distribution, version in _installed(module).items():
            if not _matches(module, version):
                return f"{distribution} {version} is installed, but tpuemb_torch needs {NEEDED[module]}."
    if len(builds := _installed("fbgemm_gpu")) > 1:
        return f"{' and '.join(builds)} are both installed; they overwrite each other's files."
    for module in NEEDED:
        try:
            imported = import_module(module)
        except Exception as error:  # a broken library raises ImportError, OSError, RuntimeError or AttributeError
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            return f"{module} cannot be imported: {reason}."
        version = str(getattr(imported, "__version__", "of unknown version"))
        if not _matches(module, version):
            return f"{module} {version} is installed, but tpuemb_torch needs {NEEDED[module]}."
        if module == "fbgemm_gpu" and not _has_operators(sys.modules["torch"]):
            return f"fbgemm_gpu {version} is installed, but its operators (torch.ops.fbgemm) did not load."
    return None


def install_line() -> str:
    """The shell line that installs matching versions for this machine."""
    gpu = _wants_gpu()
    python = sys.executable or "python"
    line = f"{python} -m " + (_GPU_LINE if gpu else _CPU_LINE.format(python=python))
    wrong_build = "fbgemm-gpu-cpu" if gpu else "fbgemm-gpu"
    installed = _installed("fbgemm_gpu")
    if wrong_build in installed:
        # The two builds share their files: uninstalling one breaks the other.
        line = f"{python} -m pip uninstall -y {' '.join(installed)} && {line}"
    return line


def _installed(module: str) -> dict[str, str]:
    """Installed distributions of a module and their versions."""
    found = {}
    for distribution in _DISTRIBUTIONS[module]:
        try:
            found[distribution] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return found


def _matches(module: str, version: str) -> bool:
    return version.split("+")[0].split(".")[:2] == NEEDED[module].split(".")


def _needed() -> str:
    return (
        "tpuemb_torch runs its embedding on torch 2.13, torchrec 1.8 and fbgemm 1.8 (fbgemm-gpu-cpu or fbgemm-gpu); "
        "reading configurations needs none of them."
    )


def _has_operators(torch: ModuleType) -> bool:
    try:
        return hasattr(torch.ops.fbgemm, "asynchronous_complete_cumsum")
    except (AttributeError, RuntimeError):
        return False


def _wants_gpu() -> bool:
    """Whether this machine has an NVIDIA driver, and a torch (if any) that can use it."""
    if shutil.which("nvidia-smi") is None:
        return False
    try:
        torch = import_module("torch")
    except Exception:
        return True
    return getattr(getattr(torch, "version", None), "cuda", None) is not None
