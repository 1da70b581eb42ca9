"""What is particular to state dicts of sharded tables: MOD orders rows shard by shard, and nothing is assigned."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class MarksModShards(Protocol):
    """A collection; `mod_shards` has the number of shards of each table, int64 `[tables]`."""

    mod_shards: Tensor


def refuse_assignment(
    _module: object, _state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_args: object
) -> None:
    """Refuses `load_state_dict(assign=True)`: the kernels would go on with their own weights, without a word."""
    # torch leaves its mark in the state dict: without the removal, the next load of it would be refused as well.
    if metadata.pop("assign_to_params_buffers", False):
        raise RuntimeError(
            f"load_state_dict(assign=True) cannot put other tensors in place of the sharded tables of {prefix!r}: "
            "leave assign out, and the values are copied"
        )


def write_mod_shards(module: MarksModShards, state: dict[str, Any], prefix: str, _metadata: dict[str, Any]) -> None:
    """Marks a state dict whose tables are ordered shard by shard (MOD has no contiguous blocks): shards by table."""
    state[f"{prefix}mod_shards"] = module.mod_shards.clone()


def check_mod_shards(module: MarksModShards, state: dict[str, Any], prefix: str, *_args: object) -> None:
    """Refuses rows in another order: they would land in the wrong places without a word."""
    shards = state.pop(f"{prefix}mod_shards", None)
    own = module.mod_shards
    if any(key.startswith(prefix) for key in state) and (shards is None or shards.tolist() != own.tolist()):
        found = (
            "rows in another order" if shards is None else f"rows ordered for {shards.tolist()} shards of each table"
        )
        raise RuntimeError(
            f"state dict with {found}; these tables are MOD-sharded over {own.tolist()}. "
            "Use tpuemb_torch.checkpoint or load_parameters(), which do not depend on the sharding"
        )
