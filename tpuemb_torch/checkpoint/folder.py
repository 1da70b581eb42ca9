"""The folder of a model's checkpoints: what is in it, and how a checkpoint gets in whole or not at all.

latest                       names of the checkpoints that are kept, the last save first
step-20-0f3c2a91/            one of them
    checkpoint.json          what it is: configs, rates, plan, and a digest of every other file
    .metadata, __0_0.distcp  tables and dense state in torch.distributed.checkpoint's format
    extra.pt                 the user's own
.step-30-77b0c1d2.partial/   a save that is not complete, or was stopped
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from pathlib import Path
from typing import Any

from tpuemb_torch.checkpoint.errors import CheckpointError
from tpuemb_torch.checkpoint.files import ALGORITHM, digest_of, sync_folder, write_file

#: Formats that can be read, with the algorithm of their digests; the last is written.
FORMATS = {1: "blake2b", 2: ALGORITHM}

DESCRIPTION = "checkpoint.json"
_POINTER = "latest"
_NAME = re.compile(r"step-(\d+)-[0-9a-f]{8}")
_PARTIAL = re.compile(r"\.step-\d+-[0-9a-f]{8}\.partial")


def new_name(step: int) -> str:
    return f"step-{step}-{uuid.uuid4().hex[:8]}"


class CheckpointFolder:
    """The folder that users give to `save` and `load`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()

    def names(self) -> list[str]:
        """Checkpoints that can be loaded, the last save first.

        Raises:
            CheckpointError: if there is none, or the list is damaged.
        """
        try:
            text = (self.path / _POINTER).read_bytes().decode(errors="replace")
        except OSError as problem:
            raise CheckpointError(f"no checkpoint in {self.path}: {problem}") from problem
        names = text.split("\n")
        if not all(_NAME.fullmatch(name) for name in names):
            raise CheckpointError(
                f"checkpoint {self.path} is damaged: file {_POINTER} is not as it was written, it holds {text[:80]!r}"
            )
        return names

    def find(self, step: int | None) -> Path:
        """The checkpoint of a step; None is the last save.

        Raises:
            CheckpointError: if there is none.
        """
        names = self.names()
        if step is not None:
            names = [name for name in names if _step_of(name) == step]
            if not names:
                raise CheckpointError(
                    f"no checkpoint of step {step} in {self.path}: it has steps {[_step_of(n) for n in self.names()]}"
                )
        if not (self.path / names[0]).is_dir():
            raise CheckpointError(
                f"checkpoint {self.path} is damaged: file {_POINTER} names {names[0]}, which is not there"
            )
        return self.path / names[0]

    def steps(self) -> list[int]:
        """Steps of the checkpoints, the last save first."""
        return [_step_of(name) for name in self.names() if (self.path / name).is_dir()]

    def partial(self, name: str) -> Path:
        """Where a checkpoint is written."""
        return self.path / f".{name}.partial"

    def remove_partials(self) -> None:
        """Removes what stopped saves left."""
        for other in self.path.glob(".step-*.partial"):
            if other.is_dir() and _PARTIAL.fullmatch(other.name):
                shutil.rmtree(other, ignore_errors=True)
        for pointer in self.path.glob(f"{_POINTER}.step-*"):
            pointer.unlink(missing_ok=True)

    def publish(self, name: str, keep: int) -> None:
        """Makes a checkpoint that is complete the last one, and removes those beyond the last `keep`."""
        os.rename(self.partial(name), self.path / name)
        sync_folder(self.path)
        known = True
        try:
            earlier = self.names()
        except CheckpointError:
            # The first one; or nothing says which of the others are good.
            earlier, known = [], False
        kept = [name, *(other for other in earlier if _step_of(other) != _step_of(name))][:keep]
        pointer = self.path / f"{_POINTER}.{name}"
        write_file(pointer, "\n".join(kept).encode())
        os.replace(pointer, self.path / _POINTER)
        sync_folder(self.path)
        for other in self.path.glob("step-*") if known else ():
            if other.name not in kept and other.is_dir() and _NAME.fullmatch(other.name):
                shutil.rmtree(other, ignore_errors=True)


def write_description(data: Path, description: dict[str, Any]) -> None:
    """Writes `checkpoint.json`, with a digest of itself."""
    description = {"format": max(FORMATS), **description}
    description["digest"] = _own_digest(description)
    write_file(data / DESCRIPTION, _text(description).encode())


def read_description(data: Path) -> dict[str, Any]:
    """Reads `checkpoint.json`.

    Raises:
        CheckpointError: if it is missing, damaged, or of an unknown format.
    """
    try:
        content = (data / DESCRIPTION).read_bytes()
        description = json.loads(content)
        # Blanks are not in the digest.
        whole = content == _text(description).encode() and description.pop("digest", None) == _own_digest(description)
    except OSError as problem:
        raise CheckpointError(f"checkpoint {data} is damaged: {DESCRIPTION} cannot be read ({problem})") from problem
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise CheckpointError(
            f"checkpoint {data} is damaged: {DESCRIPTION} cannot be understood ({problem})"
        ) from problem
    if not whole:
        raise CheckpointError(f"checkpoint {data} is damaged: {DESCRIPTION} is not as it was written")
    if description.get("format") not in FORMATS:
        raise CheckpointError(
            f"checkpoint {data} has format {description.get('format')}, this version reads {list(FORMATS)}"
        )
    assert isinstance(description, dict)
    return description


def _text(description: dict[str, Any]) -> str:
    return json.dumps(description, indent=1)


def _own_digest(description: dict[str, Any]) -> str:
    algorithm = FORMATS.get(description["format"], ALGORITHM)
    return digest_of(json.dumps(description, sort_keys=True).encode(), algorithm)


def _step_of(name: str) -> int:
    found = _NAME.fullmatch(name)
    assert found is not None
    return int(found[1])
