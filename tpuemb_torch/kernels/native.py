"""Builds C++ with the machine's compiler on first use, and keeps the libraries for later processes."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from os import environ
from pathlib import Path

import torch
from torch import Tensor

_log = logging.getLogger("tpuemb_torch.kernels")

#: No contraction and no fast-math: results must be those of the same operations in torch.
_FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi")

_lock = threading.Lock()
_loaded: dict[str, ctypes.CDLL] = {}
#: Compilations of this process; libraries found on disk do not count.
compilations = 0


class BuildError(RuntimeError):
    """There is no C++ compiler, or it fails; says what it said."""


def compiler() -> str | None:
    """Path of the C++ compiler: that of the variable CXX, g++, clang++ or c++; None without any."""
    for name in (environ.get("CXX", ""), "g++", "clang++", "c++"):
        found = shutil.which(shlex.split(name)[0]) if name.strip() else None
        if found is not None:
            return found
    return None


def load_library(source: str, what: str) -> ctypes.CDLL:
    """Loads the library of a C++ source, from this process, from disk, or by compiling it.

    Args:
        source: the text.
        what: what it is, for the message that tells of a compilation.

    Raises:
        BuildError: without a compiler that works.
    """
    with _lock:
        key = hashlib.sha256("\0".join((source, *_FLAGS, torch.__version__, _machine())).encode()).hexdigest()[:32]
        if key not in _loaded:
            _loaded[key] = _load(source, key, what)
        return _loaded[key]


def source_of(name: str) -> str:
    """Text of a C++ file of this package, after that of `blocks.h`."""
    folder = files(__package__)
    return "".join(folder.joinpath(file).read_text(encoding="utf-8") for file in ("blocks.h", name))


def integers(tensor: Tensor) -> Tensor:
    """The tensor as C++ reads it: int64, without gaps."""
    return tensor.long().contiguous()


def floats(tensor: Tensor) -> Tensor:
    """The tensor as C++ reads it: without gaps.

    Raises:
        TypeError: unless it is float32 and on the CPU.
    """
    if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
        raise TypeError(f"compiled steps are float32 on the CPU, got {tensor.dtype} on {tensor.device}")
    return tensor.contiguous()


def cache_folder() -> Path:
    """Where libraries are kept: TPUEMB_TORCH_CACHE, or `tpuemb_torch` in the user's cache folder."""
    if environ.get("TPUEMB_TORCH_CACHE"):
        return Path(environ["TPUEMB_TORCH_CACHE"])
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tpuemb_torch"


def _load(source: str, key: str, what: str) -> ctypes.CDLL:
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{key}.lock"):
            library = folder / f"{key}.so"
            if not library.exists():
                _compile(source, library, what, f", kept in {folder}")
            try:
                return ctypes.CDLL(str(library))
            except OSError:  # cut short, or of a machine with other libraries
                _compile(source, library, what, f", kept in {folder}")
                return ctypes.CDLL(str(library))
    except (OSError, RuntimeError) as error:
        if isinstance(error, BuildError):
            raise
        with tempfile.TemporaryDirectory() as own:  # a loaded library outlives its file
            library = Path(own) / f"{key}.so"
            _compile(source, library, what, f"; not kept: {error}")
            return ctypes.CDLL(str(library))


def _compile(source: str, library: Path, what: str, note: str) -> None:
    global compilations
    path = compiler()
    if path is None:
        raise BuildError("there is no C++ compiler: install g++ or clang++, or set CXX")
    start = time.perf_counter()
    torch_libraries = Path(torch.__file__).parent / "lib"
    native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    link = ["-DTPUEMB_SLEEF", f"-L{torch_libraries}", "-ltorch_cpu", f"-Wl,-rpath,{torch_libraries}"]
    with tempfile.TemporaryDirectory(dir=library.parent) as own:
        text, result = Path(own) / "source.cpp", Path(own) / "result.so"
        text.write_text(source, encoding="utf-8")
        command = [path, *_FLAGS, native, str(text), "-o", str(result), *link]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
            raise BuildError(f"{path} failed: {lines[0] if lines else f'exit code {done.returncode}'}")
        result.replace(library)
    compilations += 1
    _log.warning("compiled %s in %.1f s%s", what, time.perf_counter() - start, note)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lets one process at a time compile a library; the others find it on disk."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@cache
def _machine() -> str:
    """What -march=native depends on."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            lines = {line.strip() for line in file if line.split(":")[0].strip() in ("flags", "Features", "model name")}
    except OSError:
        lines = set()
    return f"{platform.machine()} {platform.processor()} {sorted(lines)}"
