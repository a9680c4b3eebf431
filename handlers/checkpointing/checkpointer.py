"""When checkpoints are written, and which of them is the best; how they are written is engine/checkpoint."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, Self

from pulsetrain.engine import Events, Every, Phase
from pulsetrain.engine.checkpoint import (
    CheckpointManager,
    Form,
    Location,
    check_form,
    check_name,
    find_checkpoints,
    location_of,
)
from pulsetrain.engine.errors import ConfigurationError, MetricNotFoundError, RunFolderError, unknown_name
from pulsetrain.engine.events.ignite import Handle
from pulsetrain.engine.events.names import Event
from pulsetrain.engine.events.payloads import CheckpointSaved
from pulsetrain.engine.events.subscription import Subscription
from pulsetrain.engine.logs import get_logger
from pulsetrain.engine.metrics import canonical
from pulsetrain.handlers.attachment.cadence import reading_events
from pulsetrain.handlers.checkpointing.background_save import BackgroundSave
from pulsetrain.handlers.checkpointing.save_interval import SaveInterval
from pulsetrain.handlers.metric_values.best_value import (
    Mode,
    is_better,
    judged_name,
    require_validation,
    warn_if_never_reported,
)
from pulsetrain.handlers.metric_values.step_values import METRIC_EVENTS

__all__ = ["Checkpointer"]


_PREPARED_BEHIND = 10  # iterations of a run: memory is made for saves in the background, when optimizers have a state


class Checkpointer:
    """Saves the trainer's whole state into `folder/checkpoints` by a cadence, at the run's end, and when preempted.

    One folder holds one run: where there are checkpoints already, a run may go on from one, and none may begin.

    Args:
        folder: the run folder, or a URL that fsspec knows, such as "s3://bucket/runs/a".
        every: when to save; by default after each epoch. "auto" saves as often as costs at most 3.5% of the iterations'
            time, by `SaveInterval`: where it saves then depends on the clock, and differs when the run is repeated.
        keep_last: how many of the newest stay.
        keep_best: how many of the best stay, by `metric`.
        metric: of validations, such as "val/loss", or of rollouts, such as "rollout/return": says which checkpoint is
            best; None for none.
        mode: whether "min" or "max" of the metric is best. NaN is never best.
        name: labels the checkpoints' folders.
        at_end: save once more when the run ends, also after an interruption.
        background: copy the state and go on, while a thread writes the copy, which takes as much host memory as the
            state. CHECKPOINT_SAVED is fired behind the iteration in which the writing ended, whichever that is. A save
            waits for the one before, and the run's end for the last. What is saved at the end, when preempted and by
            `save` is written at once.
        form: of the files with the state: "torch", or "safetensors", whose arrays other tools read. By default
            "safetensors" where the backend computes with values, as JaxBackend does, else "torch". A run goes on from
            either.
        clock: seconds, never running backwards; for "auto".

    Raises:
        ConfigurationError: a number below 1, an unknown mode or form, or a name that is no folder's.
        RunFolderError: the folder cannot be written.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        every: Every | Literal["auto"] | None = None,
        *,
        keep_last: int = 3,
        keep_best: int = 1,
        metric: str | None = None,
        mode: Mode = "min",
        name: str = "checkpoint",
        at_end: bool = True,
        background: bool = False,
        form: Form | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        for argument, number in (("keep_last", keep_last), ("keep_best", keep_best)):
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                rule = "needs a whole number of at least 1"
                remedy = "; metric=None keeps no best" if argument == "keep_best" else ""
                raise ConfigurationError(f"Checkpointer({argument}={number!r}): {rule}{remedy}")
        if mode not in ("min", "max"):
            raise unknown_name("Checkpointer", "mode", mode, ("min", "max"))
        if isinstance(every, str) and every != "auto":
            raise unknown_name("Checkpointer", "every", every, ("auto",))
        check_name("Checkpointer", name)
        if form is not None:
            check_form("Checkpointer", form)
        self.folder = location_of(folder)
        self.every: Every | Literal["auto"] = every or Every(epochs=1)
        self.manager = CheckpointManager(self.folder / "checkpoints", keep_last_n=keep_last)
        self.mode: Mode = mode
        self.keep_best, self.metric, self.name, self.at_end = keep_best, metric, name, at_end
        self.form: Form | None = form
        self.best: list[tuple[float, str]] = []  # (value, checkpoint's folder name), best first
        self.saved_at = -1  # iteration of the last save
        self.ranked_round = 0  # validation round whose metric has been ranked
        # the rollout whose metric came last, and that whose has been ranked; 0 where rollouts do not tell it
        self.told_rollout = self.ranked_rollout = 0
        self._first: set[Location] = set()  # saved by this handler before the first iteration
        self._loaded = False  # a checkpoint, and no run has started since
        self._clock = clock
        self._background = BackgroundSave(clock) if background else None
        self._interval: SaveInterval | None = None
        self._handles: list[Handle | Subscription] = []

    def attach(self, engine: Any) -> Self:
        """Save this trainer's state.

        Raises:
            TypeError: the engine has no `checkpoint_state()` to save.
            RuntimeError: attached already.
            ConfigurationError: there is a metric to wait for, and the trainer never validates, nor has rollouts.
        """
        if not hasattr(engine, "checkpoint_state"):
            raise TypeError(
                f"Checkpointer: {type(engine).__name__} has no checkpoint_state(); attach it to a pulsetrain.Trainer, "
                "or use pulsetrain.engine.checkpoint.CheckpointManager in a handler of your own"
            )
        if self._handles:
            raise RuntimeError("Checkpointer: attached already; detach() it first")
        if self.metric is not None:
            require_validation("Checkpointer", self.metric, engine)
        self._handles = [
            # before all others: no handler of a run that may not begin writes anything
            engine.add_event_handler(Events.STARTED, self._on_started, phase=Phase.COMPUTE),
            engine.add_event_handler(Events.CHECKPOINT_LOADED, self._goes_on, phase=Phase.COMPUTE),
        ]
        if self.metric is not None:  # not at the first save alone, which may be long after
            self._handles += [
                engine.add_event_handler(event, self._hear_metric, phase=Phase.PERSIST) for event in METRIC_EVENTS
            ]
            self._handles.append(engine.add_event_handler(Events.COMPLETED, self._on_completed, phase=Phase.ACT))
        if self._background is not None:
            self._handles += [
                # before the cadence: what has been written is announced before the next begins
                engine.add_event_handler(Events.ITERATION_COMPLETED, self._settle, phase=Phase.PERSIST),
                # on the bus: a handler of the engine's own would take the exception
                engine.bus.subscribe(Events.EXCEPTION_RAISED, self._settle_failing, sender=engine, phase=Phase.PERSIST),
            ]
            self._handles += [
                engine.add_event_handler(event, self._settle, wait=True, phase=Phase.PERSIST)
                for event in (Events.INTERRUPT, Events.TERMINATE, Events.COMPLETED)
            ]
        if self.every == "auto":
            # aimed below what is promised: what a save costs is known after it
            self._interval = SaveInterval(lambda: self.writing, clock=self._clock, share=0.03)
            cadence: Any = Events.ITERATION_COMPLETED(event_filter=self._interval.is_due)
        else:
            cadence = reading_events(self.every)
        self._handles.append(engine.add_event_handler(cadence, self._save_by_cadence, phase=Phase.PERSIST))
        if self.at_end:
            self._handles += [
                engine.add_event_handler(event, self._save_once, phase=Phase.PERSIST)
                for event in (Events.COMPLETED, Events.PREEMPTED)
            ]
        return self

    def detach(self) -> None:
        """Save no more."""
        for handle in self._handles:
            handle.cancel()
        self._handles.clear()
        if self._background is not None:
            self._background.settle(wait=True, raises=False)
            self._background.release()

    def save(self, engine: Any, name: str | None = None, is_best: bool = False) -> Location:
        """Save now, beside the cadence and the ranking: neither knows of it. `is_best` points `get_best` at it.

        Raises:
            OSError: it could not be written; older checkpoints are as they were.
            CheckpointError: the state holds what could not be loaded again; it says where.
            RuntimeError: called in the middle of a step.
        """
        self._settle(wait=True)
        return self._write(engine, name or self.name, bool(is_best), lambda: None)

    def form_for(self, engine: Any) -> Form:
        """The form that this engine's checkpoints get."""
        in_place = getattr(getattr(engine, "backend", None), "in_place", True)
        return self.form or ("torch" if in_place else "safetensors")

    def state_dict(self) -> dict[str, Any]:
        """The ranking of the best, and when the last save was."""
        best = [list(entry) for entry in self.best]
        rollouts = [self.told_rollout, self.ranked_rollout]
        return {"best": best, "saved_at": self.saved_at, "ranked_round": self.ranked_round, "rollouts": rollouts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with a saved ranking."""
        self.best = [(value, folder) for value, folder in state["best"]]
        self.saved_at, self.ranked_round = state["saved_at"], state["ranked_round"]
        self.told_rollout, self.ranked_rollout = state.get("rollouts", (0, 0))  # older checkpoints know of none

    def _on_started(self, engine: Any) -> None:
        loaded, self._loaded = self._loaded, False
        # also where a checkpoint was made before the first iteration
        goes_on = loaded or engine.state.iteration > 0 or getattr(getattr(engine, "position", None), "resuming", False)
        if not goes_on:
            self.refuse_another_run()
        self.manager.clean()  # what a crash of the run before has left takes room
        if self._background is not None:
            due = Events.ITERATION_COMPLETED(once=engine.state.iteration + _PREPARED_BEHIND)
            self._handles.append(engine.add_event_handler(due, self._prepare))

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

    @property
    def writing(self) -> bool:
        """Whether a save in the background has not been announced yet."""
        return self._background is not None and self._background.writing

    def _prepare(self, engine: Any) -> None:
        if self._background is not None and not getattr(engine, "in_step", False):
            self._background.prepare(engine)

    def wait(self) -> None:
        """Until the save in the background, if there is one, is durable or has failed."""
        self._settle(wait=True)

    def _settle(self, *, wait: bool = False, raises: bool = True) -> None:
        """Say what came of the save in the background, if it has ended."""
        if self._background is not None and self._background.settle(wait=wait, raises=raises) and self._interval:
            self._interval.failed()

    def _settle_failing(self, error: BaseException) -> None:
        self._settle(wait=True, raises=False)  # the run has its error already

    def _save_by_cadence(self, engine: Any) -> None:
        start = self._clock()
        self._save_once(engine, self._background)
        if self._interval is not None:
            self._interval.saved(self._clock() - start)

    def _save_once(self, engine: Any, background: BackgroundSave | None = None) -> None:
        self._settle(wait=True)
        if getattr(engine, "rewinding", None) is not None:
            return  # what would be saved is about to be given up
        state = engine.state
        if state.iteration == self.saved_at and not self._has_news(engine):
            return  # two cadences, or a cadence and the run's end, met
        durable: list[bool] = []
        try:
            self._save_ranked(engine, durable, background)
        except OSError as error:
            if durable:  # it is that of a receiver of CHECKPOINT_SAVED
                raise
            # a full disk costs this checkpoint, not the run
            if self._interval is not None:
                self._interval.failed()
            get_logger("handlers").warning(
                "checkpoint not saved; the run and older checkpoints are as they were",
                folder=str(self.folder),
                iteration=engine.state.iteration,
                error=str(error),
            )

    def _save_ranked(self, engine: Any, durable: list[bool], background: BackgroundSave | None) -> None:
        """Save, and let the metric decide whether it is among the best.

        Args:
            durable: gets an entry when the checkpoint is, before it is announced.
        """
        iteration = engine.state.iteration
        value = self._metric_value(engine) if self._has_news(engine) else None
        before = self.best, self.saved_at, self.ranked_round, self.ranked_rollout
        improved = value is not None and is_better(value, self.best[0][0] if self.best else None, self.mode)
        # the state is read after the bookkeeping, so that a resumed run knows of this very save
        if value is not None:
            entry = (value, self.manager.target(self.name, iteration).name)
            self.best = sorted([*self.best, entry], key=lambda e: e[0], reverse=self.mode == "max")[: self.keep_best]
        self.saved_at = iteration
        self.ranked_round, self.ranked_rollout = engine.state.validation_round, self.told_rollout

        def undo() -> None:
            self.best, self.saved_at, self.ranked_round, self.ranked_rollout = before

        try:
            if background is not None:
                self._begin(engine, background, improved, undo)
            else:
                self._write(engine, self.name, improved, lambda: durable.append(True))
        except BaseException:
            if not durable:
                undo()
            raise

    def _begin(self, engine: Any, background: BackgroundSave, is_best: bool, undo: Callable[[], None]) -> None:
        self._refuse_in_step(engine)
        start, iteration, form = time.perf_counter(), engine.state.iteration, self.form_for(engine)

        def write(copy: dict[str, Any], announce: Callable[[CheckpointSaved], None]) -> None:
            self._store(copy, form, self.name, is_best, iteration, start, announce, background=True)

        background.begin(engine, write, undo)

    def _write(self, engine: Any, label: str, is_best: bool, when_durable: Callable[[], object]) -> Location:
        self._refuse_in_step(engine)
        start, iteration = time.perf_counter(), engine.state.iteration

        def announce(saved: CheckpointSaved) -> None:
            when_durable()
            engine.fire(Events.CHECKPOINT_SAVED, saved)

        return self._store(engine.checkpoint_state(), self.form_for(engine), label, is_best, iteration, start, announce)

    def _refuse_in_step(self, engine: Any) -> None:
        if getattr(engine, "in_step", False):
            raise RuntimeError(
                "Checkpointer.save(): called in the middle of a step, where no run could go on exactly; "
                "save on ITERATION_COMPLETED"
            )

    def _store(
        self,
        state: Mapping[str, Any],
        form: Form,
        label: str,
        is_best: bool,
        iteration: int,
        start: float,
        announce: Callable[[CheckpointSaved], None],
        *,
        background: bool = False,
    ) -> Location:
        def durable(path: Any) -> None:  # a Path, or a CheckpointUrl
            if iteration == 0:
                self._first.add(path)
            size, seconds = self.manager.size(path), time.perf_counter() - start
            saved = CheckpointSaved(
                path=path, iteration=iteration, bytes=size, seconds=seconds, is_best=is_best, background=background
            )
            announce(saved)

        keep = [self.manager.checkpoint_dir / folder for _, folder in self.best]
        return self.manager.save(state, label, is_best, step=iteration, keep=keep, announce=durable, form=form)

    def _hear_metric(self, engine: Any, event: Event) -> None:
        """Note that a rollout has told the metric; a validation that lacks it is an error now, not at the next save."""
        assert self.metric is not None
        name = judged_name("Checkpointer", self.metric, engine, event)
        if name is not None and event.type != Events.VALIDATION_COMPLETED.value:
            self.told_rollout = engine.state.rollout_round

    def _on_completed(self, engine: Any) -> None:
        assert self.metric is not None
        if not self.told_rollout:
            warn_if_never_reported("Checkpointer", self.metric, engine)

    def _has_news(self, engine: Any) -> bool:
        """Whether a validation or a rollout has told a metric that has not been ranked yet."""
        if self.metric is None:
            return False
        if self.told_rollout:
            return self.told_rollout != self.ranked_rollout
        return engine.state.validation_round not in (0, self.ranked_round)

    def _metric_value(self, engine: Any) -> float | None:
        """What is ranked; None for what never is best."""
        assert self.metric is not None
        metrics = engine.state.metrics
        try:
            value = float(metrics[canonical(self.metric, metrics, place="Checkpointer")])
        except MetricNotFoundError:
            if engine.state.rollout_round:  # its first value comes with a later rollout
                return None
            raise
        return None if math.isnan(value) else value
