"""Decides when to save a checkpoint and which one is the best; engine/checkpoint writes them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Self

from pulsetrain.engine import Event, Events, Every, Phase
from pulsetrain.engine.argument_checks import check_whole_number
from pulsetrain.engine.checkpoint import (
    CheckpointManager,
    Form,
    Location,
    check_form,
    check_name,
    find_checkpoints,
    location_of,
)
from pulsetrain.engine.distributed.joining import busy, join
from pulsetrain.engine.distributed.pulse import SharedFlag
from pulsetrain.engine.distributed.ranks import is_sharded, ranks
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.events.engine import Engine
from pulsetrain.engine.events.names import EventsList, EventType
from pulsetrain.engine.events.payloads import CheckpointSaved
from pulsetrain.engine.logs import get_logger
from pulsetrain.engine.metrics import Mode
from pulsetrain.engine.step.backend import ValueBackend
from pulsetrain.engine.training_run import is_training_run
from pulsetrain.handlers.attachment.attachment import Handler
from pulsetrain.handlers.attachment.cadence import check_every
from pulsetrain.handlers.checkpointing.background_save import BackgroundSave
from pulsetrain.handlers.checkpointing.best_pointer import BestPointer
from pulsetrain.handlers.checkpointing.ranking import Ranking
from pulsetrain.handlers.checkpointing.save_cadence import SaveCadence
from pulsetrain.handlers.checkpointing.state_writer import Save, SavedEngine, StateWriter, Write, trained_iteration
from pulsetrain.handlers.metric_values.best_value import check_mode, decide_mode, subscribe_judge
from pulsetrain.handlers.run_files.ownership import FolderUse, holds_another_run

__all__ = ["Checkpointer"]

_PREPARED_AFTER = 10  # iterations: by then optimizers have their state, and memory for background saves is allocated


class Checkpointer(Handler):
    """Saves the trainer's whole state into `folder/checkpoints` at a cadence, at the run's end, and when preempted.

    One folder holds one run: if it has checkpoints already, a run may resume from one of them, but not start.

    Args:
        folder: the run folder, or a URL that fsspec supports, such as "s3://bucket/runs/a".
        every: when to save; by default after each epoch. "auto" saves as often as possible for at most 3.5% of the
            iterations' time, by `SaveInterval`: the saves then depend on the clock, and differ when a run is repeated.
        keep_last: how many of the newest to keep.
        keep_best: how many of the best by `metric` to keep.
        metric: of validations, such as "val/loss", or of rollouts, such as "rollout/return": decides which checkpoint
            is the best; None for no best.
        mode: whether the "min" or "max" of the metric is best; by default as it or its name says. NaN is never best.
        name: labels the checkpoints' folders.
        at_end: save once more when the run ends, and when it is preempted.
        background: copy the state and continue, while a thread writes the copy, which needs as much host memory as the
            state. CHECKPOINT_SAVED is fired after the iteration in which the writing ended, which differs from run to
            run. A save waits for the previous one, and the run's end for the last. Checkpoints at the end, when
            preempted and by `save` are written at once.
        form: of the files with the state: "torch", or "safetensors", whose arrays other tools can read. By default
            "safetensors" if the backend computes with values, as JaxBackend does, otherwise "torch". A run resumes from
            either.
        clock: seconds, never running backwards; for "auto".

    Raises:
        ConfigurationError: a number below 1, an unknown mode or form, or a name that a folder cannot have.
        RunFolderError: the folder cannot be written.

    >>> import tempfile, torch
    >>> from pulsetrain import Trainer, TrainingConfig
    >>> folder, config = tempfile.TemporaryDirectory(), TrainingConfig(max_epochs=3, seed=0)
    >>> batch = torch.ones(4, 2), torch.zeros(4, dtype=torch.long)
    >>> saver = Checkpointer(folder.name, keep_last=2)
    >>> history = Trainer(torch.nn.Linear(2, 2), [batch], handlers=[saver], config=config).train()
    >>> [path.name for path in saver.manager.valid()]
    ['000000002-checkpoint', '000000003-checkpoint']
    >>> folder.cleanup()
    """

    keep_best: int
    metric: str | None
    name: str
    at_end: bool
    saved_at: int

    def __init__(
        self,
        folder: str | os.PathLike[str],
        every: Every | Literal["auto"] | None = None,
        *,
        keep_last: int = 3,
        keep_best: int = 1,
        metric: str | None = None,
        mode: Mode | None = None,
        name: str = "checkpoint",
        at_end: bool = True,
        background: bool = False,
        form: Form | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        check_whole_number("Checkpointer", "keep_last", keep_last)
        if keep_best == 0:
            raise ConfigurationError("needs at least 1; metric=None keeps no best", "Checkpointer", keep_best=keep_best)
        check_whole_number("Checkpointer", "keep_best", keep_best)
        check_mode("Checkpointer", mode)
        if every != "auto":
            check_every("Checkpointer", every, "Every(epochs=1), or 'auto'", or_none=True)
        check_name("Checkpointer", name)
        if form is not None:
            check_form("Checkpointer", form)
        self.folder: Location = location_of(folder)
        self.every: Every | Literal["auto"] = every or Every(epochs=1)
        self.manager: CheckpointManager = CheckpointManager(self.folder / "checkpoints", keep_last_n=keep_last)
        self._writer = StateWriter(self.manager)
        self.keep_best, self.metric, self.name, self.at_end = keep_best, metric, name, at_end
        self.form: Form | None = form
        self.saved_at = -1  # iteration of the last save by the cadence or at an end, and
        self._saved_on: str | None = None  # its event, which `verify` compares at; None for a save by `save`
        self.failure: str | None = None  # why the last save failed; None if it did not
        self._ranking = Ranking(metric or "", mode, keep_best)
        self._pointer = BestPointer(self.manager, self._ranking)
        self._first: set[Location] = set()  # saved by this handler before the first iteration
        self._loaded = False  # whether a checkpoint was loaded since the last run started
        self._clock = clock
        self._background = BackgroundSave(clock) if background else None
        self._cadence = SaveCadence(self.every, lambda: self.writing, clock)
        self._shares = False  # whether processes of which this one saves for all tell it what each alone knows
        self._use: FolderUse | None = None

    def attach(self, engine: Engine) -> Self:
        """Save this trainer's state.

        Raises:
            TypeError: the engine has no `checkpoint_state()` to save.
            RuntimeError: attached already.
            ConfigurationError: the trainer never validates, and has no rollouts that could report the metric.
            MetricNotFoundError: the trainer has validation sets, and the metric is named after none of them.
        """
        if not hasattr(engine, "checkpoint_state"):
            raise TypeError(
                f"Checkpointer: {type(engine).__name__} has no checkpoint_state(); attach it to a pulsetrain.Trainer, "
                "or use pulsetrain.engine.checkpoint.CheckpointManager in a handler of your own"
            )
        if is_sharded(getattr(engine, "model", None)):
            self._refuse_torch_form()
            self._writer = StateWriter(self.manager, join())
        with self._attachment.to(engine, whole_bus=False) as subscribe:
            self._use = FolderUse("Checkpointer", subscribe, lambda: self.folder, self._leave)
            self.manager.refuse(None)
            # first, so that no handler writes anything for a run that may not start
            subscribe(Events.STARTED, self._on_started, phase=Phase.COMPUTE)
            subscribe(Events.CHECKPOINT_LOADED, self._on_loaded, phase=Phase.COMPUTE)
            if self.metric is not None:
                subscribe_judge(subscribe, self._ranking.note, "Checkpointer", self.metric, engine, Phase.PERSIST)
                decide_mode("Checkpointer", self._ranking, engine)
                subscribe(Events.COMPLETED, self._ranking.warn_of_silence, phase=Phase.ACT)
            if self._background is not None:
                # before the cadence: a save is announced before the next one starts
                subscribe(Events.ITERATION_COMPLETED, self._settle, phase=Phase.PERSIST)
                subscribe(Events.EXCEPTION_RAISED, self._settle_failing, phase=Phase.PERSIST)
                ends = Events.INTERRUPT | Events.TERMINATE | Events.COMPLETED
                subscribe(ends, self.wait, phase=Phase.PERSIST)
            together = self._shares or self._writer.control is not None
            flag = self._flag_of(engine) if together else None
            self._cadence.subscribe(subscribe, self._save_by_cadence, flag, is_main=self._writer.is_main)
            if self.at_end:
                # a signal reaches one process, while all take part in a save: where they end together
                ends = EventsList() | Events.COMPLETED
                ends = ends if together else ends | Events.PREEMPTED
                subscribe(ends, self._save_at_end, phase=Phase.PERSIST)
        return self

    @property
    def plan(self) -> tuple[object, ...]:
        """When it saves; processes whose plans are equal can share the state that only each of them has."""
        return self.every, self.at_end

    def lead(self, engine: Engine) -> None:
        """Attach to this trainer, in the process that saves for others, which `follow`."""
        self._shares = True
        self.attach(engine)

    def follow(self, engine: Engine) -> None:
        """Instead of `attach`, in a process for which the main one saves: send it the state of this process."""
        with self._attachment.to(engine, whole_bus=False) as subscribe:
            self._cadence.subscribe(subscribe, self._tell, self._flag_of(engine), is_main=False)
            if self.at_end:
                subscribe(Events.COMPLETED, self._tell, phase=Phase.PERSIST)

    def detach(self) -> None:
        """Stop saving; a save in the background is finished first."""
        self._attachment.cancel()
        self._shares = False
        if self._background is not None:
            self._background.settle(wait=True, raises=False)
            self._background.release()

    @property
    def mode(self) -> Mode | None:
        """Whether "min" or "max" is best; None if it was not given and this is not attached yet."""
        return self._ranking.mode

    @property
    def best(self) -> list[tuple[float, str]]:
        """The value and the folder name of the best checkpoints, best first."""
        return self._ranking.best

    @property
    def writing(self) -> bool:
        """Whether a save in the background has not been announced yet."""
        return self._background is not None and self._background.writing

    def save(self, engine: SavedEngine, name: str | None = None, is_best: bool = False) -> Location:
        """Save now, independently of the cadence and the ranking; with several processes, the main one saves for all.

        Args:
            engine: whose state to save.
            name: label in the folder's name.
            is_best: let `manager.get_best()` return this checkpoint; with a metric, until the next save is ranked.

        Raises:
            OSError: it could not be written; older checkpoints are unchanged.
            CheckpointError: the state holds something that could not be loaded again; the message names it.
            RuntimeError: called in the middle of a step.
            RunFolderError: another run owns the folder, such as that of the process from which this one was forked.
        """
        label = name or self.name
        if not ranks().is_main and self._writer.control is None:
            return self.manager.target(label, trained_iteration(engine))
        with nullcontext() if self._use is None else self._use.taken():
            self.wait()
            last, self._saved_on = self._saved_on, None
            try:
                save = Save(
                    self._writer.target(label, trained_iteration(engine)), label, self.form_for(engine),
                    is_best=bool(is_best), marked=bool(is_best),
                )  # fmt: skip
                return self._write(engine, save, lambda saved: None)
            finally:
                self._saved_on = last

    def save_with(self, manager: CheckpointManager, engine: SavedEngine, label: str) -> Location:
        """Save with another manager, and announce nothing; all processes that share the model call this."""
        writer = StateWriter(manager, self._writer.control)
        save = Save(writer.target(label, trained_iteration(engine)), label, self.form_for(engine))
        return writer.writer(engine, save)(writer.state_of(engine), lambda saved: None)

    def wait(self) -> None:
        """Wait until the save in the background, if there is one, is durable or has failed."""
        with nullcontext() if self._background is None else busy():
            self._settle(wait=True)

    def form_for(self, engine: object) -> Form:
        """The form of this engine's checkpoints."""
        values = is_training_run(engine) and isinstance(engine.backend, ValueBackend)
        return self.form or ("safetensors" if values or self._writer.control is not None else "torch")

    def state_dict(self) -> dict[str, object]:
        """The ranking of the best, and when the last save was."""
        return {**self._ranking.state_dict(), "saved_at": self.saved_at, "saved_on": self._saved_on}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the ranking of the best, and when the last save was."""
        self._ranking.load_state_dict(state)
        self.saved_at, self._saved_on = state["saved_at"], state.get("saved_on")

    def refuse_another_run(self) -> None:
        """Refuse to start a run in a folder with checkpoints of another run, or of this trainer's last run.

        Raises:
            RunFolderError: the folder has such checkpoints.
        """
        if set(find_checkpoints(self.manager.checkpoint_dir)) - self._first:
            raise holds_another_run("Checkpointer", self.folder)

    def _leave(self) -> None:
        """In a forked process: the parent's run owns the checkpoints."""
        self.manager.refuse("this process was forked from the run's, and only the run's process saves there")
        if self._background is not None:
            self._background.leave()

    def _on_started(self, engine: Engine) -> None:
        loaded, self._loaded = self._loaded, False
        if not self._writer.is_main:
            return
        # a run may also resume from a checkpoint that was saved before the first iteration
        resumes = loaded or engine.state.iteration > 0 or (is_training_run(engine) and engine.is_resuming)
        if not resumes:
            self.refuse_another_run()
        self.manager.clean()  # of what a crash of an earlier run left
        if self._background is not None:
            due = Events.ITERATION_COMPLETED(once=engine.state.iteration + _PREPARED_AFTER)
            self._attachment.subscribe(due, self._prepare, phase=Phase.ACT)

    def _on_loaded(self) -> None:
        self._loaded = True
        if self._writer.is_main:
            self._pointer.update()

    def _prepare(self, engine: SavedEngine) -> None:
        background, stepping = self._background, is_training_run(engine) and engine.is_stepping
        if background is not None and not background.is_prepared and not stepping:
            background.prepare(self._writer.own_state_of(engine))

    def _settle(self, *, wait: bool = False, raises: bool = True) -> None:
        """Announce the save in the background, if it has ended."""
        if self._background is not None and self._background.settle(wait=wait, raises=raises):
            self.failure = "the save in the background failed"
            self._cadence.failed()

    def _settle_failing(self, error: BaseException) -> None:
        self._settle(wait=True, raises=False)  # the run raises its own error

    def _save_by_cadence(self, engine: SavedEngine, event: Event) -> None:
        with self._shared(engine):
            start = self._clock()
            self._save_once(engine, event, self._background)
            self._cadence.saved(self._clock() - start)

    def _save_at_end(self, engine: SavedEngine, event: Event) -> None:
        with self._shared(engine):
            self._save_once(engine, event, None)

    def _flag_of(self, engine: Engine) -> SharedFlag | None:
        return engine.shared_flag(self) if self._cadence.is_timed and is_training_run(engine) else None

    def _shared(self, engine: SavedEngine) -> AbstractContextManager[None]:
        return engine.sharing() if self._shares and is_training_run(engine) else nullcontext()

    def _tell(self, engine: Engine) -> None:
        if is_training_run(engine):
            with engine.sharing():
                pass  # the main process saves

    def _save_once(self, engine: SavedEngine, event: Event, background: BackgroundSave | None) -> None:
        self.wait()
        if is_training_run(engine) and engine.is_rewinding:
            return  # this state is about to be discarded
        state, last, mark = engine.state, (self.saved_at, self._saved_on), self._ranking.mark()
        iteration = trained_iteration(engine)
        if iteration == self.saved_at and (self.metric is None or not self._ranking.has_news(state)):
            return  # two cadences, or a cadence and the run's end, met
        durable: list[CheckpointSaved] = []

        def undo() -> None:
            self.saved_at, self._saved_on = last
            self._ranking.undo(mark)

        try:
            target = self._writer.target(self.name, iteration)
            # ranked before the state is read, so that a run that resumes from this checkpoint knows its rank
            improved = self.metric is not None and self._ranking.rank(state, target.name)
            self.saved_at, self._saved_on = iteration, event.type
            save = Save(target, self.name, self.form_for(engine), is_best=improved, background=background is not None)
            if background is not None:
                write, main = self._write_of(engine, save), self._writer.is_main
                background.begin(
                    self._writer.state_of(engine), iteration, write, engine.fire if main else _silently, undo,
                    self._prune if main else lambda saved: None,
                )  # fmt: skip
            else:
                self._write(engine, save, durable.append)
        except BaseException as error:
            if durable:  # raised by a receiver of CHECKPOINT_SAVED
                raise
            undo()
            if not isinstance(error, OSError):
                raise
            # a full disk costs this checkpoint, not the run
            self.failure = str(error)
            self._cadence.failed()
            get_logger("handlers").warning(
                "checkpoint not saved; the run and older checkpoints are as they were",
                folder=str(self.folder),
                iteration=iteration,
                error=str(error),
            )

    def _write(self, engine: SavedEngine, save: Save, when_durable: Callable[[CheckpointSaved], object]) -> Location:
        def announce(saved: CheckpointSaved) -> None:
            when_durable(saved)
            if self._writer.is_main:
                engine.fire(Events.CHECKPOINT_SAVED, saved)

        write = self._write_of(engine, save)
        return write(self._writer.state_of(engine), announce)

    def _write_of(self, engine: SavedEngine, save: Save) -> Write:
        iteration = trained_iteration(engine)

        def durable(path: Location) -> None:
            if iteration == 0:
                self._first.add(path)
            if not save.marked:
                self._pointer.update(path.name)

        write = self._writer.writer(engine, save, self._kept, durable)

        def noted(state: Mapping[str, Any], announce: Callable[[CheckpointSaved], None]) -> Location:
            def announced(saved: CheckpointSaved) -> None:
                self.failure = None
                announce(saved)

            return write(state, announced)

        return noted

    def _refuse_torch_form(self) -> None:
        if self.form == "torch":
            rule = "each process writes its part of a sharded model, which is a safetensors file; leave it out"
            raise ConfigurationError(rule, "Checkpointer", form=self.form)

    def _prune(self, saved: CheckpointSaved) -> None:
        self.manager.prune([location_of(saved.path), *self._kept()])

    def _kept(self) -> list[Location]:
        return [self.manager.checkpoint_dir / folder for _, folder in self.best]


def _silently(event: EventType, payload: object) -> None:
    """The main process announces a save for all."""
