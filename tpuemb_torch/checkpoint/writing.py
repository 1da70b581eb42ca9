"""Writing a checkpoint: beside the others, then into its place."""

from __future__ import annotations

import operator
import shutil

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from tpuemb_torch.checkpoint.contents import Contents, rank_in
from tpuemb_torch.checkpoint.errors import CheckpointError
from tpuemb_torch.checkpoint.files import DigestingWriter, digest_of, sync_folder, write_file
from tpuemb_torch.checkpoint.folder import CheckpointFolder, new_name, write_description
from tpuemb_torch.checkpoint.planners import ChunkSavePlanner
from tpuemb_torch.sharding.exchange import raise_together
from tpuemb_torch.sharding.progress import bytes_bar


def begin(folder: CheckpointFolder, step: int, keep: int, group: dist.ProcessGroup | None) -> str:
    """Makes a place for a checkpoint and returns its name (collective)."""
    if step < 0:
        raise ValueError(f"step {step} is negative")
    if operator.index(keep) < 1:
        raise ValueError(f"keep={keep}: at least the checkpoint that is saved is kept")
    names = [new_name(step)]
    if group is not None:
        dist.broadcast_object_list(names, src=dist.get_global_rank(group, 0), group=group)
    error: Exception | None = None
    try:
        if rank_in(group) == 0:
            folder.remove_partials()
            folder.partial(names[0]).mkdir(parents=True)
    except OSError as problem:
        error = CheckpointError(f"cannot write checkpoint {folder.path}: {problem}")
    raise_together(error, group, CheckpointError)
    return names[0]


def write(folder: CheckpointFolder, name: str, contents: Contents, keep: int, group: dist.ProcessGroup | None) -> None:
    """Writes a checkpoint and makes it the last one (collective)."""
    data, rank = folder.partial(name), rank_in(group)
    size = sum(chunk.values.nbytes for chunk in contents.chunks)
    digests: list[dict[str, str]] = [{}] * (1 if group is None else dist.get_world_size(group))
    error: Exception | None = None
    with bytes_bar(f"saving checkpoint {name}", size, rank) as bar:
        writer = DigestingWriter(data, bar)
        try:
            dcp.save(
                dict(contents.dense),
                storage_writer=writer,
                planner=ChunkSavePlanner(contents.chunks),
                process_group=group,
                no_dist=group is None,
            )
        except (Exception, CheckpointException) as problem:  # the latter is no Exception
            error = CheckpointError(f"cannot write checkpoint {folder.path}: {_cause(problem)}")
    if error is None:
        digests[0] = writer.digests
        if group is not None:
            dist.all_gather_object(digests, writer.digests, group=group)
        try:
            if rank == 0:
                write_file(data / "extra.pt", contents.extra)
                files = {name: digest for own in digests for name, digest in own.items()}
                files["extra.pt"] = digest_of(contents.extra)
                write_description(data, {**contents.description, "files": files})
                sync_folder(data)
                folder.publish(name, keep)
        except Exception as problem:  # whatever it is, the other ranks wait to hear of it
            error = CheckpointError(f"cannot write checkpoint {folder.path}: {problem}")
    try:
        raise_together(error, group, CheckpointError)
    except CheckpointError:
        if rank == 0:
            shutil.rmtree(data, ignore_errors=True)
        raise


def _cause(problem: BaseException) -> str:
    """What went wrong, without torch.distributed.checkpoint's tracebacks of all ranks."""
    if isinstance(problem, CheckpointException):
        return "; ".join(f"rank {rank}: {error}" for rank, (error, _) in sorted(problem.failures.items()))
    return str(problem)
