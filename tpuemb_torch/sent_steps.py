"""Steps whose gradients were sent: applied at once, or, when execution is pipelined, after the next lookup."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tpuemb_torch.kernels import StepSource


@dataclass(eq=False)
class SentStep:
    """Checked gradients of a batch, and the graph that they go back through.

    Attributes:
        activations: those of the batch, with their graph.
        gradients: one for each, of its shape.
        rates: float32 `[num_learning_rates]`, the dynamic inputs by tag.
    """

    activations: list[Tensor]
    gradients: list[Tensor]
    rates: Tensor


class StepQueue:
    """Applies steps; holds at most one back, which is applied before anything reads or writes the tables.

    Args:
        steps: where the kernels find the rates of a step.

    Attributes:
        generation: how often the queue was drained: lookups ahead of an update are made again after it.
    """

    def __init__(self, steps: StepSource) -> None:
        self._steps = steps
        self._held: SentStep | None = None
        self.generation = 0

    def apply(self, step: SentStep) -> None:
        """Steps the tables (collective in a job of several ranks), after a step that was held back."""
        self.release()
        gradients = [g.to(a.device) for g, a in zip(step.gradients, step.activations, strict=True)]
        with self._steps.using(step.rates):
            torch.autograd.backward(step.activations, gradients)

    def hold(self, step: SentStep) -> None:
        """Keeps a step until `release`, with a copy of its gradients: the caller may use their memory again."""
        self.release()
        self._held = SentStep(step.activations, [gradient.clone() for gradient in step.gradients], step.rates)

    def drain(self) -> None:
        """Applies all steps, before someone else reads or writes the tables."""
        self.generation += 1
        self.release()

    def release(self) -> None:
        """Applies the step that is held back, if there is one."""
        step, self._held = self._held, None
        if step is not None:
            self.apply(step)

    def __getstate__(self) -> dict[str, object]:
        # A graph cannot be copied: whoever copies tables drains first.
        return {"_steps": self._steps, "_held": None, "generation": self.generation}


def drain_before(module: torch.nn.Module, *_args: object) -> None:
    """State-dict hook: what is read or replaced must not lack, or get on top, a step that was held back."""
    queue = module.step_queue
    assert isinstance(queue, StepQueue)
    queue.drain()
