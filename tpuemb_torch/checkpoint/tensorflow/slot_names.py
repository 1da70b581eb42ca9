"""Names of slot variables in name-based checkpoints, by algorithm.

The v1 layer (`tf.compat.v1.tpu.experimental`, TPUEstimator) names a slot of variable `user` `user/Adagrad`
(tensorflow/python/tpu/tpu_embedding.py of TensorFlow 2.15 and earlier); the TF2 layer names it `user/accumulators`.
Algorithms that v1 does not have are written under the TF2 names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tpuemb_torch.optimizers import rules

#: Algorithm (case of the proto's `parameters`), slot, end of the variable's name.
V1_NAMES: dict[str, dict[str, str]] = {
    "adagrad": {"accumulators": "Adagrad"},
    "adagrad_momentum": {"accumulators": "AdagradMomentum/Accumulator", "momenta": "AdagradMomentum/Momentum"},
    "adam": {"momenta": "Adam/m", "velocities": "Adam/v"},
    "frequency_estimator": {"last_hit_step": "FrequencyEstimator"},
    "ftrl": {"accumulators": "Ftrl", "linears": "Ftrl_1"},
    "momentum": {"momenta": "Momentum"},
    "proximal_adagrad": {"accumulators": "ProximalAdagrad"},
    "proximal_yogi": {"v": "ProximalYogi", "m": "ProximalYogi_1"},
    "rms_prop": {"ms": "RMSProp/ms", "mom": "RMSProp/mom"},
}
#: Slots of each algorithm under the names of its Load and Retrieve ops, which the TF2 layer uses for its variables.
V2_NAMES: dict[str, tuple[str, ...]] = {
    name: tuple(slot.name for slot in rule.slots) for name, rule in rules().items() if rule.slots
}
#: Slots of tf.train.AdamOptimizer, which a model's dense variables have and tables have not.
DENSE_NAMES = ("Adam", "Adam_1")

#: Which algorithm is meant where a table's slots fit several and nothing says which; the others' formulas differ,
#: but their slots hold the same kind of number.
_FIRST = ("adagrad", "momentum")


def v1_slots() -> dict[str, str]:
    """Slot by the end of a variable's name, over all algorithms of the v1 layer."""
    return {end: slot for names in V1_NAMES.values() for slot, end in names.items()}


def v2_slots() -> dict[str, str]:
    """The same for the TF2 layer."""
    return {slot: slot for slots in V2_NAMES.values() for slot in slots}


def ends_of(algorithm: str | None, slot: str) -> Iterator[str]:
    """The ends that a slot's variable may have: of one algorithm, or of all if it is None."""
    algorithms = V1_NAMES if algorithm is None else {algorithm: V1_NAMES.get(algorithm, {})}
    yield from dict.fromkeys(names[slot] for names in algorithms.values() if slot in names)
    yield slot


def v1_ends(slots: Sequence[str], algorithm: str | None) -> dict[str, str]:
    """The end under which each slot is written.

    Args:
        slots: a table's slots, without "parameters".
        algorithm: the table's, or None: {accumulators} are then Adagrad's and {momenta} Momentum's.
    """
    if algorithm is None:
        fitting = [name for name, ends in V1_NAMES.items() if set(ends) == set(slots)]
        algorithm = next((name for name in _FIRST if name in fitting), fitting[0] if fitting else "")
    names = V1_NAMES.get(algorithm, {})
    return {slot: names.get(slot, slot) for slot in slots}
