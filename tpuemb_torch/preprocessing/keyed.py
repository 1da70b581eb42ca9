"""Raw ids and weights, key after key -> checked ids and gains, in the collection's order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tpuemb_torch.preprocessing.gains import combiner_codes, gains
from tpuemb_torch.preprocessing.id_checks import check_ids, locate
from tpuemb_torch.preprocessing.inputs import InputError
from tpuemb_torch.preprocessing.prepared import PreparedInput, first_bags


@dataclass(frozen=True)
class Key:
    """One key of a collection."""

    name: str
    feature: str
    table: str
    vocabulary_size: int
    combiner: str


class KeyedPreparation:
    """Prepares bags for the lookup.

    Args:
        keys: in the order in which bags come.
        id_policy: see `check_ids`.
        by_feature: see `PreparedInput`.
    """

    def __init__(self, keys: Sequence[Key], id_policy: str, by_feature: bool = False) -> None:
        self.keys = list(keys)
        self.names = [key.name for key in keys]
        self.id_policy = id_policy
        self.by_feature = by_feature
        self.combiners = {key.table: key.combiner for key in keys}
        self._limits = torch.tensor([key.vocabulary_size for key in keys], dtype=torch.int64)

    def __call__(
        self,
        ids: Tensor,
        lengths: Tensor,
        weights: Tensor | None,
        bags: Sequence[int],
        combiners: Mapping[str, str] | None = None,
    ) -> PreparedInput:
        """Checks ids and computes gains.

        Args:
            ids: int64 `[n]`, key-major.
            lengths: int64 `[sum of bags]`, not negative, with sum n.
            weights: finite float32 `[n]`, or None for 1.0 each.
            bags: number of bags of each key.
            combiners: combiners by table for this batch, instead of the collection's.

        Raises:
            InputError: for ids out of range (under "error").
        """
        combiners = self.combiners if combiners is None else combiners
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        ids_per_key = offsets[first_bags(tuple(bags)).to(offsets.device)].diff()
        limits = self._limits.to(ids.device)
        ids, offsets, weights = check_ids(ids, offsets, weights, ids_per_key, limits, self.keys, self.id_policy)
        gain = weights
        if any(combiner != "sum" for combiner in combiners.values()):
            codes = combiner_codes([combiners[key.table] for key in self.keys])
            codes = codes.repeat_interleave(torch.tensor(bags, dtype=torch.int64)).to(ids.device)
            gain = gains(weights, offsets.diff(), codes)
            if weights is not None:
                self._check_gains(gain, offsets, bags)
        return PreparedInput(ids, offsets, gain, tuple(bags), self.by_feature)

    def of_kjt(self, kjt: KeyedJaggedTensor, combiners: Mapping[str, str] | None = None) -> PreparedInput:
        """Checks a KeyedJaggedTensor of raw ids and (optional) weights and computes its gains.

        Raises:
            InputError: as `checked`, and for ids out of range (under "error").
        """
        ids, lengths, weights, stride = self.checked(kjt)
        return self(ids, lengths, weights, [stride] * len(self.names), combiners)

    def checked(self, kjt: KeyedJaggedTensor) -> tuple[Tensor, Tensor, Tensor | None, int]:
        """Ids, lengths, weights and stride of a KeyedJaggedTensor, in the order of the keys.

        Raises:
            InputError: for missing keys, inconsistent lengths, or weights that are not finite.
        """
        kjt = self._in_order(kjt)
        stride = kjt.stride()
        ids, lengths = kjt.values(), kjt.lengths().long()
        if ids.dtype not in (torch.int32, torch.int64) or ids.dim() != 1:
            raise InputError(
                f"KeyedJaggedTensor values must be int32 or int64 of rank 1, got {ids.dtype} of shape {list(ids.shape)}"
            )
        check_kjt_lengths(kjt)
        if lengths.numel() != stride * len(self.names) or int(lengths.sum()) != ids.numel():
            raise InputError(
                f"KeyedJaggedTensor has {ids.numel()} values and {lengths.numel()} lengths that sum to "
                f"{int(lengths.sum())}, for {len(self.names)} keys and {stride} samples"
            )
        weights = kjt.weights_or_none()
        if weights is not None:
            weights = self._checked_weights(weights, ids.numel(), lengths.view(-1, max(stride, 1)).sum(1))
        # Copies: the caller may use the memory again before the lookup, or before the update.
        return ids.to(torch.int64, copy=True), lengths, weights, stride

    def _check_gains(self, gain: Tensor, offsets: Tensor, bags: Sequence[int]) -> None:
        """Weights that nearly cancel may give a gain beyond float32."""
        finite = torch.isfinite(gain)
        if not bool(finite.all()):
            ids_per_key = offsets[first_bags(tuple(bags)).to(offsets.device)].diff()
            key, within = locate(int((~finite).nonzero()[0]), ids_per_key)
            raise InputError(
                f"feature {self.keys[key].feature!r}: the gain of id number {within} is beyond float32: the weights of "
                "its bag nearly cancel in the combiner's denominator"
            )

    def _in_order(self, kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
        check_one_stride(kjt)
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

    def _checked_weights(self, weights: Tensor, count: int, ids_per_key: Tensor) -> Tensor:
        if weights.dtype not in (torch.float32, torch.float64):
            raise InputError(f"KeyedJaggedTensor weights must be float32 or float64, got {weights.dtype}")
        if weights.shape != (count,):
            raise InputError(f"KeyedJaggedTensor has weights of shape {list(weights.shape)} for {count} values")
        weights = weights.detach().to(torch.float32, copy=True)
        finite = torch.isfinite(weights)
        if not bool(finite.all()):
            position = int((~finite).nonzero()[0])
            key, within = locate(position, ids_per_key)
            raise InputError(
                f"feature {self.keys[key].feature!r}: weight {within} is {float(weights[position])}: "
                "weights must be finite"
            )
        return weights


def check_one_stride(kjt: KeyedJaggedTensor) -> None:
    """Raises InputError for a KeyedJaggedTensor with a batch size per key."""
    if kjt.variable_stride_per_key():
        raise InputError("KeyedJaggedTensor with a batch size per key: give every key the same number of samples")


def check_kjt_lengths(kjt: KeyedJaggedTensor) -> None:
    """Raises InputError for negative lengths, or offsets that do not start at 0."""
    lengths, offsets = kjt.lengths(), kjt.offsets_or_none()
    if bool((lengths < 0).any()):
        position = int((lengths < 0).nonzero()[0])
        key = kjt.keys()[position // kjt.stride()]
        raise InputError(
            f"feature {key!r}: KeyedJaggedTensor length {position % kjt.stride()} is {int(lengths[position])}: "
            "lengths cannot be negative (offsets cannot decrease)"
        )
    if offsets is not None and offsets.numel() and int(offsets[0]) != 0:
        raise InputError(f"KeyedJaggedTensor offsets[0] is {int(offsets[0])}: offsets start at 0")
