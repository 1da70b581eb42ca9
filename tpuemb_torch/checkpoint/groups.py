"""The process group of saves in the background."""

from __future__ import annotations

import torch.distributed as dist

_background: dict[dist.ProcessGroup, dist.ProcessGroup] = {}


def background_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """A group of the same ranks on gloo, whose collectives do not get between those of training (collective)."""
    if group is None:
        return None
    if group not in _background:
        own = dist.new_group(dist.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True)
        assert isinstance(own, dist.ProcessGroup)
        _background[group] = own
    return _background[group]
