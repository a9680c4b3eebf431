"""States that are values: the number of their update, its learning rate, and the state that follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pulsetrain.engine.step.protocols import GradientInfo, ModelState, Tree

__all__ = ["next_state", "rate_of", "step_of", "with_buffers"]


def step_of(state: ModelState) -> int:
    """Updates made."""
    return int(state.metadata.get("step", 0))


def rate_of(state: ModelState) -> float | None:
    """The rate of the next update: the schedule's, else the one that was set; None keeps the optimizer's own.

    >>> rate_of(ModelState({}, {}, {"step": 3, "learning_rate": 0.1}))
    0.1
    """
    schedule = state.metadata.get("schedule")
    found: float | None = state.metadata.get("learning_rate") if schedule is None else schedule.get_lr(step_of(state))
    return found


def with_buffers(state: ModelState, gradients: GradientInfo) -> ModelState:
    """The state with the buffers as the forward pass has left them."""
    return replace(state, weights={**state.weights, "buffers": gradients.buffers})


def next_state(state: ModelState, weights: Mapping[str, Tree], optimizer: Tree, rate: float | None) -> ModelState:
    """The state after an update that was made at this rate.

    >>> start = ModelState({}, {}, {"step": 3, "learning_rate": 0.1})
    >>> next_state(start, {}, {}, 0.05).metadata
    {'step': 4, 'learning_rate': 0.05}
    """
    return ModelState(weights, optimizer, {**state.metadata, "step": step_of(state) + 1, "learning_rate": rate})
