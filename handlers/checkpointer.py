"""When checkpoints are written, and which of them is the best; how they are written is engine/checkpoint.py."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any, Literal, Self

from engine import Events, Every, Phase
from engine.checkpoint import CheckpointManager
from engine.logs import get_logger
from engine.payloads import CheckpointSaved
from engine.subscription import Handle
from handlers.readings import canonical, reading_events

__all__ = ["Checkpointer"]


class Checkpointer:
    """Saves the trainer's whole state into `folder/checkpoints` by a cadence, at the run's end, and when preempted.

    Args:
        folder: the run folder.
        every: when to save; by default after each epoch.
        keep_last: how many of the newest stay.
        keep_best: how many of the best stay, by `metric`.
        metric: a validation metric, such as "val/loss", that says which checkpoint is best; None for none.
        mode: whether "min" or "max" of the metric is best. NaN is never best.
        name: labels the checkpoints' folders.
        at_end: save once more when the run ends, also after an interruption.

    Raises:
        ValueError: a number below 1, or an unknown mode.
        RunFolderError: the folder cannot be written.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        every: Every | None = None,
        *,
        keep_last: int = 3,
        keep_best: int = 1,
        metric: str | None = None,
        mode: Literal["min", "max"] = "min",
        name: str = "checkpoint",
        at_end: bool = True,
    ) -> None:
        if keep_best < 1:
            raise ValueError(f"Checkpointer({keep_best=}): needs to keep at least 1; metric=None keeps no best")
        if mode not in ("min", "max"):
            raise ValueError(f"Checkpointer({mode=}): choose 'min' or 'max'")
        self.folder = Path(folder)
        self.every = every or Every(epochs=1)
        self.manager = CheckpointManager(self.folder / "checkpoints", keep_last_n=keep_last)
        self.keep_best, self.metric, self.mode, self.name, self.at_end = keep_best, metric, mode, name, at_end
        self.best: list[tuple[float, str]] = []  # (value, checkpoint's folder name), best first
        self.saved_at = -1  # iteration of the last save
        self.ranked_round = 0  # validation round whose metric has been ranked
        self._handles: list[Handle] = []

    def attach(self, engine: Any) -> Self:
        """Save this trainer's state.

        Raises:
            TypeError: the engine has no `checkpoint_state()` to save.
            RuntimeError: attached already.
        """
        if not hasattr(engine, "checkpoint_state"):
            raise TypeError(
                f"Checkpointer: {type(engine).__name__} has no checkpoint_state(); attach it to a pulsetrain.Trainer, "
                "or use engine.checkpoint.CheckpointManager in a handler of your own"
            )
        if self._handles:
            raise RuntimeError("Checkpointer: attached already; detach() it first")
        on_cadence = engine.add_event_handler(reading_events(self.every), self._save_once, phase=Phase.PERSIST)
        self._handles = [on_cadence]
        if self.at_end:
            self._handles += [
                engine.add_event_handler(event, self._save_once, phase=Phase.PERSIST)
                for event in (Events.COMPLETED, Events.PREEMPTED)
            ]
        return self

    def detach(self) -> None:
        """Save no more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def save(self, engine: Any, name: str | None = None, is_best: bool | None = None) -> Path:
        """Save now; `is_best` None lets the metric decide.

        Raises:
            OSError: it could not be written; older checkpoints are as they were.
            MetricNotFoundError: a validation has been run and did not bring the metric.
        """
        validation_round = engine.state.validation_round
        value = self._metric_value(engine) if validation_round != self.ranked_round else None
        improved = value is not None and (not self.best or self._better(value, self.best[0][0]))
        # the state is read after the bookkeeping, so that a resumed run knows of this very save
        iteration = engine.state.iteration
        ranked = value is not None and (len(self.best) < self.keep_best or self._better(value, self.best[-1][0]))
        before = self.best, self.saved_at, self.ranked_round
        label = name or self.name
        if ranked and value is not None:
            entry = (value, f"{iteration:09d}-{label}")
            self.best = sorted([*self.best, entry], key=lambda e: e[0], reverse=self.mode == "max")[: self.keep_best]
        self.saved_at, self.ranked_round = iteration, validation_round
        start = time.perf_counter()
        try:
            path = self.manager.save(
                engine.checkpoint_state(),
                label,
                improved if is_best is None else is_best,
                step=iteration,
                keep=[self.manager.checkpoint_dir / folder for _, folder in self.best],
            )
        except BaseException:
            self.best, self.saved_at, self.ranked_round = before
            raise
        engine.fire(
            Events.CHECKPOINT_SAVED,
            CheckpointSaved(
                path=path,
                iteration=iteration,
                bytes=sum(file.stat().st_size for file in path.iterdir()),
                seconds=time.perf_counter() - start,
                is_best=improved if is_best is None else is_best,
            ),
        )
        return path

    def state_dict(self) -> dict[str, Any]:
        """The ranking of the best, and when the last save was."""
        best = [list(entry) for entry in self.best]
        return {"best": best, "saved_at": self.saved_at, "ranked_round": self.ranked_round}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with a saved ranking."""
        self.best = [(value, folder) for value, folder in state["best"]]
        self.saved_at, self.ranked_round = state["saved_at"], state["ranked_round"]

    def _save_once(self, engine: Any) -> None:
        state = engine.state
        news = self.metric is not None and state.validation_round != self.ranked_round
        if state.iteration == self.saved_at and not news:
            return  # two cadences, or a cadence and the run's end, met
        try:
            self.save(engine)
        except OSError as error:  # a full disk costs this checkpoint, not the run
            get_logger("handlers").warning(
                "checkpoint not saved; the run and older checkpoints are as they were",
                folder=str(self.folder),
                iteration=engine.state.iteration,
                error=str(error),
            )

    def _metric_value(self, engine: Any) -> float | None:
        if self.metric is None:
            return None
        if engine.state.validation_round == 0:
            return None
        metrics = engine.state.metrics
        value = float(metrics[canonical(self.metric, metrics, place="Checkpointer")])
        return None if math.isnan(value) else value

    def _better(self, value: float, other: float) -> bool:
        return value < other if self.mode == "min" else value > other
