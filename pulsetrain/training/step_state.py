"""What the training step keeps from one batch to the next.

To go: the Stepper owns this.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pulsetrain.engine.step.accumulation import Accumulate, Accumulation
from pulsetrain.state.part import require

__all__ = ["StepState"]

_FIELDS = ("accumulation", "learning_rates", "grad_norm", "grad_norms")


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
        self.by_hand = False  # whether the caller computes the gradients, which then may wait in the parameters
        self._held = held

    @property
    def accumulated(self) -> int:
        """How many batches wait for the next update; of a step by hand, whether gradients do."""
        return int(bool(self._held.gradients())) if self.by_hand else self.accumulation.batches

    def discard(self) -> None:
        """Drop what waits for the next update."""
        self.accumulation.restart()
        self._held.discard()

    def reset(self) -> None:
        self.accumulation.restart()
        self._held.begin_anew()
        self.grad_norm = None
        self.grad_norms.clear()

    def state_dict(self) -> dict[str, Any]:
        gradients = self._held.gradients() if self.accumulated else {}  # between two updates: their sum so far
        return {
            "accumulation": {**self.accumulation.state_dict(), "gradients": gradients},
            "learning_rates": [float(rate) for rate in self.learning_rates],
            "grad_norm": self.grad_norm,
            "grad_norms": dict(self.grad_norms),
        }

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        require("stepper", state, _FIELDS)
        self._held.load_gradients(state["accumulation"]["gradients"], state["accumulation"]["batches"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        waiting = state["accumulation"]
        load_gradients = self._held.load_gradients(waiting["gradients"], waiting["batches"])
        self.accumulation.load_state_dict(waiting)
        load_gradients()
        self.learning_rates = tuple(state["learning_rates"])
        self.grad_norm = state["grad_norm"]
        self.grad_norms = dict(state["grad_norms"])
