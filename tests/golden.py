"""Where the golden data is: files made by other implementations, which tests compare to.

The folder is the one named by TPUEMB_GOLDEN, else `../shared/golden` beside the repository.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_FOLDER = Path(os.environ.get("TPUEMB_GOLDEN") or Path(__file__).resolve().parents[2] / "shared" / "golden")

#: The folder, or None where there is none.
GOLDEN: Path | None = _FOLDER if _FOLDER.is_dir() else None


def golden(path: str | Path) -> Path:
    """Returns the path of a golden file or folder; skips the test where it is missing."""
    if GOLDEN is None:
        pytest.skip(f"no golden data: {_FOLDER} is not a folder (set TPUEMB_GOLDEN)")
    file = GOLDEN / path
    if not file.exists():
        pytest.skip(f"no golden data: {file} is missing")
    return file
