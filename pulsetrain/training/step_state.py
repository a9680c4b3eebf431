"""What the training step keeps from one batch to the next.

To go: the Stepper owns this.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pulsetrain.engine.step.accumulation import Accumulate, Accumulation

__all__ = ["StepState"]


class StepState:
    """Accumulation, norms and learning rates of the last update, and whether a step is in progress.

    Args:
        rule: how many batches make an update.
        held: has the gradients.
        learning_rates: of the first update.
    """

    def __init__(self, rule: Accumulate, held: Any, learning_rates: tuple[float, ...]) -> None:
        self.accumulation = Accumulation(rule)
        self.learning_rates = learning_rates  # of the last update made
        self.grad_norm: Tensor | None = None  # of the last update for which it was measured
        self.grad_norms: dict[str, Tensor] = {}  # the same of each of several optimizers
        self.skip: Tensor | None = None  # whether to skip the update in progress
        self.is_stepping = False
        self._held = held

    @property
    def accumulated(self) -> int:
        """How many batches wait for the next update."""
        return self.accumulation.batches

    def skip_update(self, where: Tensor) -> None:
        """Skip the current update where the condition, shape (), bool, holds."""
        self.skip = where if self.skip is None else self.skip | where

    def discard(self) -> None:
        """Drop the gradients that wait for the next update."""
        self.accumulation.restart()
        self._held.discard()

    def reset(self) -> None:
        self.accumulation.restart()
        self._held.optimizer.zero_grad(set_to_none=True)
        self._held.begin_anew()
        self.grad_norm = None
        self.grad_norms.clear()

    def state_dict(self) -> dict[str, Any]:
        return {
            "accumulation": self.accumulation.state_dict(),
            "learning_rates": [float(rate) for rate in self.learning_rates],
            "grad_norm": self.grad_norm,
            "grad_norms": dict(self.grad_norms),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.accumulation.load_state_dict(state["accumulation"])
        self.learning_rates = tuple(state["learning_rates"])
        self.grad_norm = state["grad_norm"]
        self.grad_norms = dict(state["grad_norms"])
