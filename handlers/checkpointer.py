"""When checkpoints are written, and which of them is the best; how they are written is engine/checkpoint.py."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any, Literal, Self

from engine import Events, Every, Phase
from engine.checkpoint import CheckpointManager, check_name, find_checkpoints
from engine.errors import ConfigurationError, RunFolderError, unknown_name
from engine.logs import get_logger
from engine.metrics import canonical
from engine.payloads import CheckpointSaved
from engine.subscription import Handle
from handlers.readings import reading_events

__all__ = ["Checkpointer"]


class Checkpointer:
    """Saves the trainer's whole state into `folder/checkpoints` by a cadence, at the run's end, and when preempted.

    One folder holds one run: where there are checkpoints already, a run may go on from one, and none may begin.

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
        ConfigurationError: a number below 1, an unknown mode, or a name that is no folder's.
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
        for argument, number in (("keep_last", keep_last), ("keep_best", keep_best)):
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                rule = "needs a whole number of at least 1"
                remedy = "; metric=None keeps no best" if argument == "keep_best" else ""
                raise ConfigurationError(f"Checkpointer({argument}={number!r}): {rule}{remedy}")
        if mode not in ("min", "max"):
            raise unknown_name("Checkpointer", "mode", mode, ("min", "max"))
        check_name("Checkpointer", name)
        self.folder = Path(folder)
        self.every = every or Every(epochs=1)
        self.manager = CheckpointManager(self.folder / "checkpoints", keep_last_n=keep_last)
        self.keep_best, self.metric, self.mode, self.name, self.at_end = keep_best, metric, mode, name, at_end
        self.best: list[tuple[float, str]] = []  # (value, checkpoint's folder name), best first
        self.saved_at = -1  # iteration of the last save
        self.ranked_round = 0  # validation round whose metric has been ranked
        self._first: set[Path] = set()  # saved by this handler before the first iteration
        self._loaded = False  # a checkpoint, and no run has started since
        self._handles: list[Handle] = []

    def attach(self, engine: Any) -> Self:
        """Save this trainer's state.

        Raises:
            TypeError: the engine has no `checkpoint_state()` to save.
            RuntimeError: attached already.
            ConfigurationError: there is a metric to wait for, and the trainer never validates.
        """
        if not hasattr(engine, "checkpoint_state"):
            raise TypeError(
                f"Checkpointer: {type(engine).__name__} has no checkpoint_state(); attach it to a pulsetrain.Trainer, "
                "or use engine.checkpoint.CheckpointManager in a handler of your own"
            )
        if self._handles:
            raise RuntimeError("Checkpointer: attached already; detach() it first")
        if self.metric is not None and not getattr(engine, "val_loaders", True):
            raise ConfigurationError(
                f"Checkpointer(metric={self.metric!r}): waits for a validation, and the Trainer has no val_loader"
            )
        self._handles = [
            # before all others: no handler of a run that may not begin writes anything
            engine.add_event_handler(Events.STARTED, self._on_started, phase=Phase.COMPUTE),
            engine.add_event_handler(Events.CHECKPOINT_LOADED, self._goes_on, phase=Phase.COMPUTE),
            engine.add_event_handler(reading_events(self.every), self._save_once, phase=Phase.PERSIST),
        ]
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

    def save(self, engine: Any, name: str | None = None, is_best: bool = False) -> Path:
        """Save now, beside the cadence and the ranking: neither knows of it. `is_best` points `get_best` at it.

        Raises:
            OSError: it could not be written; older checkpoints are as they were.
            CheckpointError: the state holds what could not be loaded again; it says where.
            RuntimeError: called in the middle of a step.
        """
        saved = self._write(engine, name or self.name, bool(is_best))
        engine.fire(Events.CHECKPOINT_SAVED, saved)
        return saved.path

    def state_dict(self) -> dict[str, Any]:
        """The ranking of the best, and when the last save was."""
        best = [list(entry) for entry in self.best]
        return {"best": best, "saved_at": self.saved_at, "ranked_round": self.ranked_round}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with a saved ranking."""
        self.best = [(value, folder) for value, folder in state["best"]]
        self.saved_at, self.ranked_round = state["saved_at"], state["ranked_round"]

    def _on_started(self, engine: Any) -> None:
        loaded, self._loaded = self._loaded, False
        # also where a checkpoint was made before the first iteration
        goes_on = loaded or engine.state.iteration > 0 or getattr(getattr(engine, "position", None), "resuming", False)
        if not goes_on:
            self.refuse_another_run()

    def refuse_another_run(self) -> None:
        """Refuse to begin a run where another one's checkpoints are.

        Raises:
            RunFolderError: there are some.
        """
        if set(find_checkpoints(self.manager.checkpoint_dir)) - self._first:
            raise RunFolderError(
                f"run folder {self.folder}: holds checkpoints already; go on with train(resume='latest'), "
                "or choose another folder"
            )

    def _goes_on(self) -> None:
        self._loaded = True

    def _save_once(self, engine: Any) -> None:
        state = engine.state
        news = self.metric is not None and state.validation_round != self.ranked_round
        if state.iteration == self.saved_at and not news:
            return  # two cadences, or a cadence and the run's end, met
        try:
            saved = self._save_ranked(engine)
        except OSError as error:  # a full disk costs this checkpoint, not the run
            get_logger("handlers").warning(
                "checkpoint not saved; the run and older checkpoints are as they were",
                folder=str(self.folder),
                iteration=engine.state.iteration,
                error=str(error),
            )
        else:
            engine.fire(Events.CHECKPOINT_SAVED, saved)

    def _save_ranked(self, engine: Any) -> CheckpointSaved:
        """Save, and let the metric decide whether it is among the best."""
        iteration, validation_round = engine.state.iteration, engine.state.validation_round
        value = self._metric_value(engine) if validation_round != self.ranked_round else None
        before = self.best, self.saved_at, self.ranked_round
        improved = value is not None and (not self.best or self._better(value, self.best[0][0]))
        # the state is read after the bookkeeping, so that a resumed run knows of this very save
        if value is not None:
            entry = (value, self.manager.target(self.name, iteration).name)
            self.best = sorted([*self.best, entry], key=lambda e: e[0], reverse=self.mode == "max")[: self.keep_best]
        self.saved_at, self.ranked_round = iteration, validation_round
        try:
            return self._write(engine, self.name, improved)
        except BaseException:
            self.best, self.saved_at, self.ranked_round = before
            raise

    def _write(self, engine: Any, label: str, is_best: bool) -> CheckpointSaved:
        if getattr(engine, "in_step", False):
            raise RuntimeError(
                "Checkpointer.save(): called in the middle of a step, where no run could go on exactly; "
                "save on ITERATION_COMPLETED"
            )
        start, iteration = time.perf_counter(), engine.state.iteration
        path = self.manager.save(
            engine.checkpoint_state(),
            label,
            is_best,
            step=iteration,
            keep=[self.manager.checkpoint_dir / folder for _, folder in self.best],
        )
        if iteration == 0:
            self._first.add(path)
        size = sum(file.stat().st_size for file in path.iterdir())
        seconds = time.perf_counter() - start
        return CheckpointSaved(path=path, iteration=iteration, bytes=size, seconds=seconds, is_best=is_best)

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
