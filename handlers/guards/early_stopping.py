"""Ends a run whose metric has stopped improving."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pulsetrain.engine import Engine, Event, Events, Phase
from pulsetrain.engine.argument_checks import check_number, check_whole_number
from pulsetrain.engine.metrics import Mode
from pulsetrain.handlers.attachment.attachment import Handler
from pulsetrain.handlers.metric_values.best_value import (
    check_judged,
    decide_mode,
    is_better,
    judged_name,
    subscribe_judge,
    warn_if_never_reported,
)

__all__ = ["EarlyStopping"]

_VALIDATION = "validation"


class EarlyStopping(Handler):
    """Terminates the engine after `patience` validations or rollouts without an improvement; NaN is never one.

    It also works without an engine: `if stopping.step(loss): break`. `is_best` says whether that loss was the best yet.

    Args:
        metric: its name in VALIDATION_COMPLETED, such as "val/loss" (or "val_loss"), or in ROLLOUT_COMPLETED or
            POLICY_UPDATED, such as "rollout/return": rollouts without it are ignored.
        patience: this many validations or rollouts in a row.
        mode: whether smaller ("min") or larger ("max") is better; by default as the metric or its name says.
        min_delta: an improvement is larger than this.

    Raises:
        ConfigurationError: a value out of range.

    >>> stopping = EarlyStopping(patience=2)
    >>> [stopping.step(loss) for loss in (1.0, 0.8, 0.9, 0.85)]
    [False, False, False, True]
    >>> stopping.best_value
    0.8
    """

    counter: int
    is_best: bool

    def __init__(
        self,
        metric: str = "val/loss",
        patience: int = 5,
        mode: Mode | None = None,
        min_delta: float = 0.0,
    ) -> None:
        check_judged("EarlyStopping", metric, mode)
        check_whole_number("EarlyStopping", "patience", patience)
        check_number("EarlyStopping", "min_delta", min_delta)
        self.metric = metric
        self.patience = patience
        self.mode: Mode | None = mode
        self.min_delta = min_delta
        self.reset()

    def attach(self, engine: Engine) -> Self:
        """Judge each validation or rollout of the engine, in phase ACT.

        Raises:
            ConfigurationError: the trainer never validates, and has no rollouts that could report the metric.
            MetricNotFoundError: the trainer has validation sets, and the metric is named after none of them.
        """
        with self._attachment.to(engine, whole_bus=False) as subscribe:
            subscribe_judge(subscribe, self._judge, "EarlyStopping", self.metric, engine, Phase.ACT)
            decide_mode("EarlyStopping", self, engine)
            subscribe(Events.STARTED, self._on_started, phase=Phase.ACT)
            subscribe(Events.COMPLETED, self._on_completed, phase=Phase.ACT)
        return self

    def reset(self) -> None:
        """Forget what was seen."""
        self.best_value: float | None = None
        self.counter = 0  # values since the best one
        self.is_best = False  # whether the last value was an improvement
        self._round = _VALIDATION  # "validation" or "rollout": where the values come from

    def step(self, value: float) -> bool:
        """Judge one more value; returns whether it is time to stop."""
        value = float(value)
        self.is_best = is_better(value, self.best_value, decide_mode("EarlyStopping", self), self.min_delta)
        if self.is_best:
            self.best_value = value
            self.counter = 0
        else:
            self.counter += 1
        return self.counter >= self.patience

    def state_dict(self) -> dict[str, object]:
        """The best value, how many values followed it, and whether the last one was an improvement."""
        state: dict[str, object] = {"best_value": self.best_value, "counter": self.counter, "is_best": self.is_best}
        return state if self._round == _VALIDATION else {**state, "round": self._round}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what was seen."""
        best = state["best_value"]
        self.best_value = None if best is None else float(best)
        self.counter = int(state["counter"])
        self.is_best = bool(state["is_best"])
        self._round = str(state.get("round", _VALIDATION))

    def _on_started(self, engine: Engine) -> None:
        # resumed after the round that ended the run, and killed before the run could end: it ends now
        if engine.state.iteration > 0 and self.counter >= self.patience:
            engine.terminate(reason=self._reason(self.metric), alike=True)

    def _on_completed(self, engine: Engine) -> None:
        if self.best_value is None and self.counter == 0:
            warn_if_never_reported("EarlyStopping", self.metric, engine)

    def _judge(self, engine: Engine, event: Event) -> None:
        name = judged_name("EarlyStopping", self.metric, engine, event)
        if name is None:
            return
        self._round = _VALIDATION if event.type == Events.VALIDATION_COMPLETED.value else "rollout"
        if self.step(event.payload.metrics[name]):
            engine.terminate(reason=self._reason(name), alike=True)

    def _reason(self, name: str) -> str:
        rounds = f"{self.counter} {self._round}{'s' if self.counter > 1 else ''}"
        if self.best_value is None:
            return f"early stopping: {name} has been NaN for {rounds}"
        return f"early stopping: {name} has not improved on {self.best_value:.4g} for {rounds}"
