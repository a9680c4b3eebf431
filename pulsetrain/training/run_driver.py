"""Starts, resumes, rewinds and ends the runs of an engine: to its bound, from a checkpoint, back to an earlier one."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol, cast

from pulsetrain.config import TrainingConfig
from pulsetrain.engine import FIRST, ConfigurationError, Engine, Event, Events, Phase
from pulsetrain.engine.argument_checks import check_type
from pulsetrain.engine.backends.functional import FunctionalBackend
from pulsetrain.engine.checkpoint import Location, check_checkpoint, resolve
from pulsetrain.engine.data.loaders import length_of
from pulsetrain.engine.data.workers import workers_outlive_signals
from pulsetrain.engine.distributed.ranks import is_sharded
from pulsetrain.engine.logs import get_logger
from pulsetrain.engine.step.backend import Backend
from pulsetrain.engine.step.protocols import TrainingBatch, TrainingResult
from pulsetrain.handlers import Checkpointer, EventRecorder, MetricLogger
from pulsetrain.handlers.checkpointing.state_writer import SavedEngine
from pulsetrain.handlers.run_files.ownership import release_idle, take_all
from pulsetrain.signals import interrupted_safely
from pulsetrain.state.handler_registry import HandlerRegistry
from pulsetrain.state.resume import Resumer
from pulsetrain.state.rewind import Rewind, go_back, plan_rewind
from pulsetrain.training.agreement import Agreement
from pulsetrain.training.heap import keep_freed_memory
from pulsetrain.training.no_data import NoTrainingData
from pulsetrain.training.reporter import MetricsReporter
from pulsetrain.training.run_length import RunLength
from pulsetrain.training.shared_folders import check_shared_folders
from pulsetrain.training.validation import Validator

__all__ = ["RunDriver"]


class DrivenRun(SavedEngine, Protocol):
    """What the driver needs of a training run besides its engine."""

    train_loader: Iterable[object]
    config: TrainingConfig
    backend: Backend
    model: object

    @property
    def accumulated(self) -> int: ...

    def load_checkpoint(self, path: str | os.PathLike[str] | Location, /) -> None: ...

    def load_checkpoint_state(self, state: Mapping[str, object], /) -> None: ...


class RunDriver:
    """Decides how a run starts, whether it is done, and what follows it.

    Args:
        engine: a training run, which also loads checkpoints.
        length: its bound.
        resumer: loads and resets its state.
        registry: its handlers.
        reporter: gets the beginning and the end of each epoch and of the run.
        validator: a run that reached its bound ends with a validation.
        agreement: of several processes.
    """

    def __init__(
        self,
        engine: Engine,
        length: RunLength,
        resumer: Resumer,
        registry: HandlerRegistry,
        reporter: MetricsReporter,
        validator: Validator,
        agreement: Agreement,
    ) -> None:
        self._engine, self._run = engine, cast(DrivenRun, engine)
        self._length, self._resumer, self._data, self._registry = length, resumer, resumer.data, registry
        self._reporter, self._validator, self._agreement = reporter, validator, agreement
        self._has_trained = False  # in a run before the present one
        self._has_checked_folders = False
        self._checked: Location | None = None  # the checkpoint that is being loaded, if the main process has checked it
        self._rewind: Rewind | None = None  # the run ends here, and train() continues after that checkpoint

    def attach(self, engine: Engine) -> None:
        engine.bus.subscribe(Events.STARTED, self._reseed, sender=engine, phase=Phase.COMPUTE, order=FIRST)
        if self._run.backend.device.type == "cpu":
            engine.add_event_handler(Events.STARTED, keep_freed_memory, phase=Phase.COMPUTE)
        engine.add_event_handler(Events.PREEMPTED, self._stop_when_preempted)
        if self._length.config.max_environment_steps is not None:
            engine.add_event_handler(Events.POLICY_UPDATED, self._stop_at_environment_steps)
        engine.add_event_handler(Events.COMPLETED, self._finish, phase=Phase.COMPUTE)

    @property
    def is_rewinding(self) -> bool:
        """Whether this run ends only to continue from an earlier checkpoint."""
        return self._rewind is not None

    @property
    def is_done(self) -> bool:
        """Whether the run has reached its bound."""
        state = self._engine.state
        if self._length.reached(state) is not None:
            return True
        if self._resumer.finishes_epoch(state.epoch_length):
            return False  # EPOCH_COMPLETED is left
        return self._is_last(state.epoch)

    def train(self, resume: str | os.PathLike[str] | None, *, wait: bool) -> None:
        """Train to the bound, through all rewinds; see `Trainer.train`."""
        if resume is not None:
            check_type("Trainer.train", "resume", resume, str | os.PathLike, "'latest' or a checkpoint's path")
        if isinstance(self._run.train_loader, NoTrainingData):
            self._run.train_loader.refuse()
        if not self._has_checked_folders:
            self._has_checked_folders = True
            with self._agreement.explained("looking for the run folder"):
                check_shared_folders(self._agreement.control, self._registry.handlers)
        try:
            with self._agreement.watched():
                take_all(self._engine, wait=wait)  # before the newest checkpoint is looked for
                if wait:
                    self._agreement.control.wait_for_main()
                if resume is not None:
                    self._load(resume)
                self._rewind = None
                with interrupted_safely(self._engine):
                    self._start()
                    self.continue_rewound()
        finally:
            release_idle(self._engine.bus)

    def continue_rewound(self) -> None:
        """If the run has ended to rewind, continue it from that checkpoint; also if it rewinds again."""
        if self._rewind is None:
            return
        try:
            while self._rewind is not None:
                go_back(self._rewind, self._run, self._registry.checkpointer("rewind()"), self._data)
                self._rewind = None
                self._start()
        finally:
            release_idle(self._engine.bus)

    def train_epoch(self, loader: Iterable[object]) -> None:
        """Train to the end of the current epoch, or through the next one."""
        with self._agreement.watched():
            if self._resumer.is_resuming:  # perhaps inside an epoch
                self._resume(loader, self._engine.state.epoch + 1)
            else:
                self._engine.run(loader, max_epochs=self._engine.state.epoch + 1)

    def reset(self) -> None:
        """Return to iteration 0: counters, history, handlers, data order; weights, optimizer and fp16 scale stay."""
        state = self._engine.state
        for handler in self._registry.handlers:
            if isinstance(handler, Checkpointer) and state.iteration > 0:
                handler.refuse_another_run()  # before anything of the finished run is touched
        self._has_trained = self._has_trained or state.iteration > 0
        state.max_epochs = state.max_iters = None
        self._resumer.reset(self._run.config.chosen_seed)

    def rewind(self, first: int, last: int, reason: str) -> None:
        """End here, and continue after the newest checkpoint before iteration `first`; see `Trainer.rewind`."""
        if self._agreement.is_shared:
            raise ConfigurationError(
                "several processes cannot return to a checkpoint during a run yet", "Trainer.rewind"
            )
        if self._engine.should_terminate or self._engine.state.stop_reason is not None:
            get_logger("pulsetrain").warning("the run ends, and does not rewind", reason=reason)
            return
        rewind = plan_rewind(self._registry.checkpointer("rewind()"), self._data, first, last)
        Engine.terminate(self._engine, skip_completed=True, reason=reason)
        self._rewind = rewind

    def cancel_rewind(self) -> None:
        """The run is to end: it does not continue from an earlier checkpoint."""
        self._rewind = None

    def on_step(self, batch: TrainingBatch, result: TrainingResult) -> None:
        """The stepper has made a step: count its losses and the iteration."""
        self._reporter.add(result, batch.size)
        self.commit_iteration()

    def commit_iteration(self) -> None:
        """The iteration was trained; end the run at a bound that counts updates or tokens."""
        self._data.commit(self._engine.state.iteration)
        if self._length.counted:
            reason = self._length.reached(self._engine.state)
            if reason is not None:
                Engine.terminate(self._engine, reason=reason)  # all ranks count alike

    @contextmanager
    def around_epoch(self, done: int) -> Iterator[None]:
        """Keep the run's books of an epoch. A handler could not: its events can be muted or left out."""
        state = self._engine.state
        self._data.begin_epoch(state.epoch, state.iteration - done)
        if not done:
            self._reporter.begin_epoch()
        with workers_outlive_signals(state.dataloader):  # some loaders start theirs at the first batch
            yield
        self._data.end_epoch()
        self._reporter.end_epoch()

    def _is_last(self, epoch: int) -> bool:
        """Whether no batch is left after those so far, with which this epoch is complete."""
        state = self._engine.state
        # not by the iterations that epochs make, as ignite does: with other data than before their length changes
        ended = state.max_epochs is not None and epoch >= state.max_epochs
        return bool(ended or (state.max_iters is not None and state.iteration >= state.max_iters))

    def _start(self) -> None:
        engine, state, length = self._engine, self._engine.state, self._length
        if engine.is_paused:
            engine.run(self._run.train_loader)
        elif self._resumer.is_resuming:
            length.start_from(state.iteration, state.update, self._run.accumulated)
            self._resume(self._run.train_loader, length.max_epochs, length.max_iterations)
        elif (state.max_epochs or state.max_iters) and not self.is_done:
            engine.run(self._run.train_loader)  # after a termination or an error
        else:
            self.reset()
            length.start_from(0, 0, 0)
            loader = self._run.train_loader
            engine.run(loader, length.max_epochs, length.max_iterations, length_of(loader))

    def _load(self, source: str | os.PathLike[str]) -> None:
        """Load a checkpoint: "latest" if there is one yet, or that of a path."""
        control = self._agreement.control
        if source != "latest":
            if control.is_shared and is_sharded(self._run.model):
                source = control.main_decides(lambda: _compared(source), patient=True)
                self._load_checked(source)
            else:
                self._run.load_checkpoint(source)
            return
        manager = self._registry.checkpointer("train(resume='latest')").manager
        latest = control.main_decides(manager.get_latest, patient=True)  # it reads all of the newest one
        if latest is not None:
            self._load_checked(latest)
            return
        self._require_beginning()
        take_all(self._engine, restart=True)
        for handler in self._registry.handlers:
            if isinstance(handler, (MetricLogger, EventRecorder)) and control.ranks.is_main:
                handler.begin_again()

    def has_checked(self, folder: Location) -> bool:
        """Whether the main process has just compared all files of this checkpoint with its manifest."""
        return folder == self._checked

    def _load_checked(self, folder: Location) -> None:
        self._checked = folder
        try:
            self._run.load_checkpoint(folder)
        finally:
            self._checked = None

    def _require_beginning(self) -> None:
        """Without a checkpoint the run starts from the beginning; weights that have been trained cannot.

        Raises:
            ConfigurationError: the trainer has trained.
        """
        engine, state = self._engine, self._engine.state
        if self._resumer.is_resuming:  # from a checkpoint that the caller has loaded
            return
        if self._has_trained or state.iteration > 0:
            rule = (
                "there is no checkpoint to resume from, and this trainer has trained already, so it cannot start from "
                "the beginning; make a new Trainer with an untrained model, or call train() to continue in this process"
            )
            raise ConfigurationError(rule, "Trainer.train", resume="latest")
        if not engine.is_paused:
            state.max_epochs = state.max_iters = None  # else a run that failed before its first batch continues

    def _resume(self, loader: Iterable[object], max_epochs: int | None, max_iterations: int | None = None) -> None:
        """Continue from the checkpoint that was loaded, to this bound."""
        state = self._engine.state
        state.max_epochs, state.max_iters = max_epochs, max_iterations
        first = state.iteration
        if not self.is_done:
            finished = self._resumer.finishes_epoch(state.epoch_length) and self._is_last(state.epoch + 1)
            if finished:
                self._report_bound(state.epoch + 1)
            self._engine.resume(loader, max_epochs, max_iterations)
            if not finished and state.iteration == first and self.is_done:  # data without a length ends unforeseen
                self._report_bound(state.epoch)
            return
        state.epoch = self._data.epoch
        self._report_bound(state.epoch)
        with self._resumer.finishing():
            self._engine.resume(loader, max_epochs, max_iterations)
        state.stop_reason = state.stop_reason or self._length.reached_inside(state, self._data.epoch_done)

    def _report_bound(self, epoch: int) -> None:
        state = self._engine.state
        get_logger("pulsetrain").info(
            "the run has reached its bound already, and no batch is trained; a larger bound continues it",
            iteration=state.iteration,
            epoch=epoch,
            bound=f"max_epochs={state.max_epochs}" if state.max_iters is None else self._engine.describe_bound(),
        )

    def _reseed(self, engine: Engine, event: Event) -> None:
        if isinstance(self._run.backend, FunctionalBackend):
            self._run.backend.reseed(self._data.seed)

    def _stop_when_preempted(self, engine: Engine, event: Event) -> None:
        reason = f"{event.payload.signal} was received"
        if not self._agreement.is_shared:
            engine.terminate(reason=reason, observed=True)
        elif event.payload.rank is None:  # else all ranks have agreed
            self._agreement.ask(reason, observed=True, signal=event.payload.signal)

    def _stop_at_environment_steps(self, engine: Engine) -> None:
        """Only a whole rollout is learnt from; a target_kl may end one after any of its epochs."""
        reason = self._length.reached(engine.state)
        if reason is not None:
            Engine.terminate(engine, reason=reason)

    def _finish(self) -> None:
        """At the run's end, report what no log point has; a run that reached its bound ends with a validation."""
        state, inside = self._engine.state, not self._data.epoch_done
        ends_inside = self._length.reached(state) is not None or state.iteration == state.max_iters
        self._reporter.log(provisional=not (ends_inside if inside else self.is_done))
        if inside:
            self._reporter.add_unfinished_epoch()
        if self.is_done:
            self._validator.validate_once()


def _compared(path: str | os.PathLike[str]) -> Location:
    """The checkpoint that a path names, all of whose files have been compared with its manifest."""
    folder = resolve(path)
    check_checkpoint(folder)
    return folder
