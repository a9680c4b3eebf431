"""Which checkpoints are the best by a metric, and which values of it have been ranked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pulsetrain.engine import Engine, Event, Events, MetricNotFoundError, State
from pulsetrain.engine.metrics import Mode, canonical
from pulsetrain.handlers.metric_values.best_value import decide_mode, is_better, judged_name, warn_if_never_reported

__all__ = ["Ranking"]


class Ranking:
    """Keeps the names of the best checkpoints' folders.

    Args:
        metric: the name that was asked for.
        mode: whether "min" or "max" is best; None to infer it. NaN never is.
        keep: how many.
    """

    metric: str
    keep: int
    reported_rollout: int

    def __init__(self, metric: str, mode: Mode | None, keep: int) -> None:
        self.metric, self.keep = metric, keep
        self.mode: Mode | None = mode
        self.best: list[tuple[float, str]] = []  # (value, checkpoint's folder name), best first
        self.reported_rollout = 0  # the last rollout with the metric; 0 where rollouts do not have it
        self._ranked_validation = self._ranked_rollout = 0  # whose values have been ranked

    def note(self, engine: Engine, event: Event) -> None:
        """Note a rollout with the metric; a validation without it is an error now, not only at the next save."""
        name = judged_name("Checkpointer", self.metric, engine, event)
        if name is not None and event.type != Events.VALIDATION_COMPLETED.value:
            self.reported_rollout = engine.state.rollout_round

    def warn_of_silence(self, engine: Engine) -> None:
        """At the end of a run: warn where no rollout had the metric."""
        if not self.reported_rollout:
            warn_if_never_reported("Checkpointer", self.metric, engine)

    def has_news(self, state: State) -> bool:
        """Whether the metric has a value that has not been ranked yet."""
        if self.reported_rollout:
            return self.reported_rollout != self._ranked_rollout
        return state.validation_round not in (0, self._ranked_validation)

    def rank(self, state: State, folder: str) -> bool:
        """Rank the folder by the metric's value, where that is new; returns whether it is the best."""
        value = self._value(state) if self.has_news(state) else None
        self._ranked_validation, self._ranked_rollout = state.validation_round, self.reported_rollout
        if value is None:
            return False
        mode = decide_mode("Checkpointer", self)
        improved = is_better(value, self.best[0][0] if self.best else None, mode)
        ranked = sorted([*self.best, (value, folder)], key=lambda entry: entry[0], reverse=mode == "max")
        self.best = ranked[: self.keep]
        return improved

    def mark(self) -> tuple[list[tuple[float, str]], int, int]:
        """The ranking as it is now, for `undo`."""
        return self.best, self._ranked_validation, self._ranked_rollout

    def undo(self, mark: tuple[list[tuple[float, str]], int, int]) -> None:
        """Return to the ranking before a save that failed."""
        self.best, self._ranked_validation, self._ranked_rollout = mark

    def state_dict(self) -> dict[str, object]:
        return {
            "best": [list(entry) for entry in self.best],
            "ranked_round": self._ranked_validation,
            "rollouts": [self.reported_rollout, self._ranked_rollout],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best = [(value, folder) for value, folder in state["best"]]
        self._ranked_validation = state["ranked_round"]
        self.reported_rollout, self._ranked_rollout = state.get("rollouts", (0, 0))  # older checkpoints have none

    def _value(self, state: State) -> float | None:
        """The value to rank; None for one that is never the best."""
        try:
            value = float(state.metrics[canonical(self.metric, state.metrics, place="Checkpointer")])
        except MetricNotFoundError:
            if state.rollout_round:  # a later rollout has its first value
                return None
            raise
        return None if math.isnan(value) else value
