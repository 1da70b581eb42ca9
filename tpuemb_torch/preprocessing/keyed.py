"""A KeyedJaggedTensor of raw ids and weights -> one of checked ids and gains, in the collection's key order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tpuemb_torch.preprocessing.gains import combiner_codes, gains
from tpuemb_torch.preprocessing.id_checks import KeyInfo, check_ids
from tpuemb_torch.preprocessing.inputs import InputError


@dataclass(frozen=True)
class Key:
    """One key of a collection."""

    name: str
    feature: str
    table: str
    vocabulary_size: int
    combiner: str


@dataclass(frozen=True, eq=False)
class PreparedInput:
    """A batch ready for the lookup: keys in the collection's order, ids checked, weights replaced by gains.

    Where all combiners are "sum" and no weights were given, there are none (1.0 each).
    """

    kjt: KeyedJaggedTensor

    @property
    def stride(self) -> int:
        """Number of samples."""
        return self.kjt.stride()


class KeyedPreparation:
    """Prepares KeyedJaggedTensors for the lookup.

    Args:
        keys: the collection's keys, in its order.
        id_policy: see `check_ids`.
    """

    def __init__(self, keys: Sequence[Key], id_policy: str) -> None:
        self.names = [key.name for key in keys]
        self.id_policy = id_policy
        self._infos = [KeyInfo(key.feature, key.table) for key in keys]
        self._limits = torch.tensor([key.vocabulary_size for key in keys], dtype=torch.int64)
        self._tables = [key.table for key in keys]
        self._combiners = {key.table: key.combiner for key in keys}

    def __call__(self, kjt: KeyedJaggedTensor, combiners: Mapping[str, str] | None = None) -> PreparedInput:
        """Checks a batch and computes its gains.

        Args:
            kjt: raw ids and (optional) weights.
            combiners: combiners by table for this batch, instead of the collection's.

        Raises:
            InputError: for missing keys, inconsistent lengths, ids out of range (under "error") or weights that
                are not finite.
        """
        kjt = self._in_order(kjt)
        stride = kjt.stride()
        ids, lengths = kjt.values(), kjt.lengths().long()
        if ids.dtype not in (torch.int32, torch.int64):
            raise InputError(f"KeyedJaggedTensor values must be int32 or int64, got {ids.dtype}")
        ids = ids.long()
        if lengths.numel() != stride * len(self.names) or int(lengths.sum()) != ids.numel():
            raise InputError(
                f"KeyedJaggedTensor has {ids.numel()} values and {lengths.numel()} lengths that sum to "
                f"{int(lengths.sum())}, for {len(self.names)} keys and {stride} samples"
            )
        weights = kjt.weights_or_none()
        if weights is not None:
            weights = self._checked_weights(weights, ids.numel(), lengths, stride)
        limits = self._limits.to(ids.device)
        ids, lengths, weights = check_ids(ids, lengths, weights, limits, self._infos, self.id_policy)
        combiners = self._combiners if combiners is None else combiners
        if all(combiner == "sum" for combiner in combiners.values()):
            gain = weights
        else:
            codes = combiner_codes([combiners[table] for table in self._tables]).to(ids.device)
            gain = gains(weights, lengths, codes.repeat_interleave(stride))
        return PreparedInput(KeyedJaggedTensor(self.names, ids, weights=gain, lengths=lengths, stride=stride))

    def _in_order(self, kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
        if kjt.variable_stride_per_key():
            raise InputError("KeyedJaggedTensor with a batch size per key: give every key the same number of samples")
        given = list(kjt.keys())
        if given == self.names:
            return kjt
        position = {name: index for index, name in enumerate(given)}
        missing = [name for name in self.names if name not in position]
        if missing:
            raise InputError(f"KeyedJaggedTensor lacks keys {missing}; it has {given}")
        if len(position) != len(given):
            raise InputError(f"KeyedJaggedTensor has a key twice: {given}")
        return kjt.permute([position[name] for name in self.names])

    def _checked_weights(self, weights: torch.Tensor, count: int, lengths: torch.Tensor, stride: int) -> torch.Tensor:
        if weights.numel() != count:
            raise InputError(f"KeyedJaggedTensor has {weights.numel()} weights for {count} values")
        weights = weights.detach().float()
        finite = torch.isfinite(weights)
        if not bool(finite.all()):
            position = int((~finite).nonzero()[0])
            key = int(torch.searchsorted(lengths.view(-1, stride).sum(1).cumsum(0), position, right=True))
            raise InputError(
                f"feature {self._infos[key].feature!r}: a weight is {float(weights[position])}: weights must be finite"
            )
        return weights
