"""The embedding layer as plain loops in float64: what every lookup and update is compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod, sqrt

import numpy as np

from tpuemb_torch.config import Config
from tpuemb_torch.optimizers import create_rule, reference_step, slots_of

#: One feature of a batch: a list of (id, weight) for every sample, row-major.
Samples = Sequence[Sequence[tuple[int, float]]]


class Oracle:
    """Tables and slots in float64, looked up and updated one id at a time."""

    def __init__(
        self, config: Config, combiners: Mapping[str, str], parameters: Mapping[str, Mapping[str, np.ndarray]]
    ):
        self.config = config
        self.combiners = combiners
        self.state = {
            table.name: [
                parameters[table.name][name].astype(np.float64)
                for name in ("parameters", *(s.name for s in slots_of(table.optimizer)))
            ]
            for table in config.tables
        }

    def gains(self, table: str, bag: Sequence[tuple[int, float]]) -> list[float]:
        combiner = self.combiners.get(table, "sum")
        if combiner == "sum":
            return [w for _, w in bag]
        total = sum(w for _, w in bag) if combiner == "mean" else sqrt(sum(w * w for _, w in bag))
        return [0.0 if total == 0 else w / total for _, w in bag]

    def lookup(self, batch: Mapping[str, Samples]) -> dict[str, np.ndarray]:
        """Activations by feature, `[samples, dim]`."""
        out = {}
        for feature in self.config.features:
            rows = self.state[feature.table.name][0]
            values = np.zeros((len(batch[feature.name]), feature.table.dimension))
            for sample, bag in enumerate(batch[feature.name]):
                for (row, _), gain in zip(bag, self.gains(feature.table.name, bag), strict=True):
                    values[sample] += gain * rows[row]
            out[feature.name] = values
        return out

    def update(self, batch: Mapping[str, Samples], gradients: Mapping[str, np.ndarray], rates: Sequence[float]) -> None:
        """One step; gradients by feature, `[samples, dim]`."""
        for table in self.config.tables:
            folded: dict[int, np.ndarray] = {}
            for feature in self.config.features:
                if feature.table is not table:
                    continue
                grads = gradients[feature.name].reshape(prod(gradients[feature.name].shape[:-1]), table.dimension)
                for sample, bag in enumerate(batch[feature.name]):
                    for (row, _), gain in zip(bag, self.gains(table.name, bag), strict=True):
                        folded.setdefault(row, np.zeros(table.dimension))
                        folded[row] += gain * grads[sample]
            if create_rule(table.optimizer).sweeps_all_rows:
                for row in range(table.vocabulary_size):
                    folded.setdefault(row, np.zeros(table.dimension))
            rate = table.optimizer.learning_rate
            lr = np.float32(rates[rate.tag] if rate.tag is not None else rate.constant or 0.0).astype(np.float64)
            state = self.state[table.name]
            for row, gradient in folded.items():
                new = reference_step(table.optimizer, state[0][row], gradient, lr, *(s[row] for s in state[1:]))
                for values, value in zip(state, new, strict=True):
                    values[row] = value
