"""Checks the versions of torch, torchrec and fbgemm before they are used, in words instead of undefined symbols."""

from __future__ import annotations

import platform
import shutil
from importlib import import_module, metadata

TORCH = "2.13"
TORCHREC = "1.8"
FBGEMM = "1.8"


def require_torchrec() -> None:
    """Imports torch, fbgemm and torchrec.

    Raises:
        ImportError: if one is missing, broken or of another version; says which are needed and how to install them.
    """
    for module, distributions, wanted in (
        ("torch", ("torch",), TORCH),
        ("fbgemm_gpu", ("fbgemm-gpu-cpu", "fbgemm-gpu"), FBGEMM),
        ("torchrec", ("torchrec",), TORCHREC),
    ):
        found = installed_version(*distributions)
        if found is None:
            raise ImportError(_message(f"{distributions[0]} is not installed"))
        if not found.startswith(f"{wanted}."):
            raise ImportError(_message(f"{distributions[0]} {found} is installed"))
        try:
            import_module(module)
        except Exception as error:  # a mismatched build raises OSError, ImportError, AttributeError, RuntimeError...
            raise ImportError(_message(f"{module} {found} cannot be imported ({_first_line(error)})")) from error
    import torch

    if not hasattr(torch.ops.fbgemm, "jagged_to_padded_dense"):
        raise ImportError(_message("the operators of fbgemm are not loaded: its build does not fit torch's"))


def installed_version(*distributions: str) -> str | None:
    """Version of the first of the distributions that is installed."""
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def install_lines(gpu: bool) -> list[str]:
    """The commands that install the needed versions."""
    if gpu:
        return [f'pip install "torch=={TORCH}.*" "fbgemm-gpu=={FBGEMM}.*" "torchrec=={TORCHREC}.*"']
    return [
        f'pip install "torch=={TORCH}.*" "fbgemm-gpu-cpu=={FBGEMM}.*" tensordict torchmetrics==1.0.3 pyre-extensions',
        f'pip install --no-deps "torchrec=={TORCHREC}.*"',
    ]


def _message(problem: str) -> str:
    versions = ", ".join(
        f"{label} {installed_version(*names) or 'missing'}"
        for label, names in (
            ("torch", ("torch",)),
            ("torchrec", ("torchrec",)),
            ("fbgemm", ("fbgemm-gpu-cpu", "fbgemm-gpu")),
        )
    )
    gpu = shutil.which("nvidia-smi") is not None and platform.system() == "Linux"
    lines = "\n    ".join(install_lines(gpu))
    return (
        f"tpuemb_torch: {problem}.\n"
        f"It needs torch {TORCH}, torchrec {TORCHREC} and fbgemm {FBGEMM} "
        f"(found: {versions}). Install them with:\n    {lines}"
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
