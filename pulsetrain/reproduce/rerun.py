"""Runs the trainer of a recorded run again, in another folder, and compares its events with the recorded ones."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pulsetrain.engine import CheckpointError, ConfigurationError, Events, Phase
from pulsetrain.engine.checkpoint import Location, find_checkpoints
from pulsetrain.engine.checkpoint.reader import step_of
from pulsetrain.engine.events.payloads import CheckpointLoaded
from pulsetrain.engine.recording import EventCheck, EventLog, LoggedEvent
from pulsetrain.engine.recording.log.files import log_files
from pulsetrain.engine.recording.log.run_file import read_run_file
from pulsetrain.handlers import (
    Alert,
    BestModel,
    Checkpointer,
    CrashBundle,
    EventRecorder,
    HangWatchdog,
    LRFinder,
    MemoryMonitor,
    MetricLogger,
    Plots,
    Profiler,
    ProgressBar,
    RunSummary,
    Throughput,
    TimeLimit,
)
from pulsetrain.handlers.recorder.fingerprints import FingerprintEvents, StateFingerprint, fingerprint_of
from pulsetrain.handlers.recorder.resume_check import OPTIONAL
from pulsetrain.reproduce.tensor_check import TensorCheck
from pulsetrain.trainer import Trainer

__all__ = ["ExpectedEvents", "Rerun", "checkpoint_before", "first_checkpoint", "nearest_checkpoint"]

# they write, print, measure, or end the run by the clock, and do not change the deterministic events: a rerun detaches
# them
OUTPUT_HANDLERS = (
    *(Alert, Checkpointer, CrashBundle, HangWatchdog, LRFinder, MemoryMonitor, MetricLogger),
    *(Plots, Profiler, ProgressBar, RunSummary, Throughput, TimeLimit),
)
ENDINGS = frozenset({"exception_raised", "terminate"})
COMPARED = "the comparison is complete"  # the reason for which a rerun is terminated


def checkpoint_before(run: Path, iteration: int) -> Location | None:
    """The run's last checkpoint before this iteration; None if there is none."""
    before = [folder for folder in find_checkpoints(run / "checkpoints") if step_of(folder) < iteration]
    return max(before, key=step_of, default=None)  # it may be damaged, which loading reports


def nearest_checkpoint(run: str | os.PathLike[str], iteration: int) -> Location:
    """The run's last checkpoint before this iteration.

    Args:
        run: the run folder.
        iteration: the first iteration after the checkpoint, at the earliest.

    Raises:
        CheckpointError: there is none.
    """
    nearest = checkpoint_before(Path(run), iteration)
    if nearest is None:
        found = find_checkpoints(Path(run, "checkpoints"))
        there = f"the first was saved after iteration {min(map(step_of, found))}" if found else "it has none"
        raise CheckpointError(
            f"{run}: has no checkpoint before iteration {iteration}; {there}; choose a later iteration"
        )
    return nearest


def first_checkpoint(run: str | os.PathLike[str]) -> Location | None:
    """The checkpoint that a forked run starts with; None if the run was not forked.

    Raises:
        CheckpointError: a forked run has no checkpoint.
    """
    parent = read_run_file(Path(run)).get("parent")
    if parent is None:
        return None
    found = find_checkpoints(Path(run, "checkpoints"))
    if not found:
        raise CheckpointError(f"{run}: was forked from another run, and has no checkpoint to start from")
    return found[0]


def _rewinds_of(run: Path) -> tuple[int, list[tuple[int, int]]]:
    """How often the run was rewound, and the first and last numbers of the batches that it left out since."""
    starts = read_run_file(run).get("starts") or [{}]
    left_out = [(first, last) for first, last in starts[-1].get("left_out", ())]
    return starts[-1].get("rewinds", len(left_out)), left_out


class Rerun:
    """A trainer like that of the run, at a checkpoint or at the beginning; its files go to another folder.

    Args:
        build: makes the trainer; if it takes an argument, it is called with `folder`.
        folder: for the files of handlers.
        checkpoint: the checkpoint to load; None for the beginning of the run.
        run: the run folder; its rewinds count here, and batches that it left out after them are left out, too.
        alike: whether as many processes have recorded the run. Else the log of rank 0 counts for all of them, and
            digests of batches, of which a process has its shares, are not compared.

    Raises:
        ConfigurationError: `build` did not make a Trainer with an EventRecorder.
        CheckpointError: the checkpoint is damaged, or does not fit the trainer.
    """

    trainer: Trainer
    recorder: EventRecorder
    check: EventCheck
    start: int
    end: int
    cut_short: bool
    tensors: TensorCheck | None

    def __init__(
        self,
        build: Callable[..., Trainer],
        folder: Path,
        checkpoint: Location | None,
        run: Path | None = None,
        *,
        alike: bool = True,
    ) -> None:
        trainer = build(folder) if _takes_a_folder(build) else build()
        if not isinstance(trainer, Trainer):
            raise ConfigurationError(f"build_trainer(): made a {type(trainer).__name__}; it has to return a Trainer")
        recorders = [handler for handler in trainer.handlers if isinstance(handler, EventRecorder)]
        if len(recorders) != 1:
            raise ConfigurationError(
                f"build_trainer(): made a Trainer with {len(recorders) or 'no'} EventRecorder among its handlers; "
                "give it the one that recorded the run"
            )
        self.trainer, self.recorder = trainer, recorders[0]
        self.recorder.folder, self.recorder.continuation.reports = folder / "events", False
        detached = [each for each in trainer.handlers if isinstance(each, OUTPUT_HANDLERS) or _writes_weights(each)]
        for handler in detached:
            handler.detach()
        if run is not None:
            rewinds = _rewinds_of(run)
            trainer.add_event_handler(Events.STARTED, lambda engine: engine.data.keep_rewinds(*rewinds))
        self.check = EventCheck(iter(()))
        self.start = self.end = 0  # iterations
        self._stops: set[int] = set()  # iterations after which the recorded run ended and was resumed
        self.cut_short = False  # whether all processes have ended since one differs
        self._control, self._alike = trainer.agreement.control, alike
        if run is not None:
            self.recorder.repeat(EventLog(run, self.recorder.rank if alike else 0), resumed=checkpoint is not None)
        if checkpoint is not None:
            trainer.load_checkpoint(checkpoint)
            self.start = self.end = trainer.state.iteration
        self.tensors = TensorCheck(trainer, run, detached) if run is not None else None

    @property
    def after(self) -> int:
        """The last seq of the recorded run before the events that are repeated; -1 at its beginning."""
        after = self.recorder.continuation.resumed_after
        return -1 if after is None else after

    def compare(self, expected: ExpectedEvents, last: int | None = None) -> None:
        """Train, and compare each event with the expected ones, until one differs or all have been compared.

        If an exception or a handler ended the recorded run, training continues until that is repeated, or its
        iteration is over. On an accelerator, values are compared when they reach the host, so the run may be some
        iterations further when a difference is found.

        Several processes end together: at the iteration after which one of them differs, or all have compared theirs.
        An exception in one of them is raised, in each, since they are no longer at the same place.

        Args:
            expected: the recorded events of this process.
            last: iteration of the last expected event, if known.
        """
        trainer = self.trainer
        on_host = trainer.backend.device.type == "cpu"

        def flush(engine: Trainer) -> None:
            if on_host or engine.state.iteration == last:
                self.recorder.flush()

        def stop_after_the_end(engine: Trainer) -> None:
            if expected.end is not None and not self.check.waiting and engine.state.iteration > expected.end.iteration:
                engine.terminate(reason=COMPARED)

        shared = self._control.is_shared
        self.check = EventCheck(iter(expected), OPTIONAL) if shared else _TerminatingCheck(expected, trainer)
        if not self._alike:
            self.check.leave_out(FingerprintEvents.BATCH_FINGERPRINTED.value)
        if not any(self._control.gather(self.check.waiting or expected.end is not None)):
            return
        self.recorder.resume_check = self.check
        trainer.add_event_handler(Events.ITERATION_COMPLETED, flush, phase=Phase.PERSIST)
        if shared:
            trainer.add_event_handler(Events.ITERATION_COMPLETED, self._end_together, expected, phase=Phase.PERSIST)
            if self.tensors is not None and last is not None:
                self.tensors.end_at(last)
        else:
            trainer.add_event_handler(Events.ITERATION_STARTED, stop_after_the_end)
        self._stops = expected.stops
        ended_at = -1
        while ended_at < 0 or (self._is_expected_to_continue() and trainer.state.iteration > ended_at):
            if ended_at >= 0:
                self._resume_here()
            ended_at = trainer.state.iteration
            try:
                trainer.train()
            except Exception:  # of the run itself: `ending` finds it in the log
                if shared:
                    raise
                self.recorder.flush()
        self.end = trainer.state.iteration
        self.recorder.resume_check = None
        self.recorder.detach()

    def _end_together(self, expected: ExpectedEvents) -> None:
        """Of several processes: end in all of them once each has compared its log, or one differs.

        What follows an iteration, such as the end of its epoch, is compared before the next one is complete.
        """
        end, iteration = expected.end, self.trainer.state.iteration
        done = not self.check.waiting and (end is None or iteration > end.iteration)
        differs = self.check.divergence is not None
        finished, differing = self._control.sum([done, differs], "what has been compared")
        if differing or finished == self._control.ranks.world_size:
            self.cut_short = differing > 0
            self.recorder.resume_check = None  # what follows is only this end
            self.trainer.terminate(reason=COMPARED, observed=True, alike=True)

    def ending(self) -> LoggedEvent | None:
        """The exception or termination that ended this run; None if the comparison ended it."""
        if not log_files(self.recorder.folder, self.recorder.rank)[0].exists():
            return None  # the recorded log holds nothing to compare, so nothing was run
        ends = list(self.log().read(engine=self.trainer.name, event=ENDINGS))
        return next((event for event in reversed(ends) if not _is_ours(event) and not self._is_stop(event)), None)

    def _resume_here(self) -> None:
        """Continue as a process that resumes from a checkpoint made now."""
        trainer = self.trainer
        trainer.load_checkpoint_state(trainer.checkpoint_state())
        iteration = trainer.state.iteration
        trainer.fire(Events.CHECKPOINT_LOADED, CheckpointLoaded(path=self.recorder.folder, iteration=iteration))
        self.recorder.resume_check = self.check

    def _is_expected_to_continue(self) -> bool:
        """Whether the recorded run ended here, too, and was resumed; of several processes, that of each."""
        undecided = self.check.waiting and self.check.divergence is None
        return all(self._control.gather(undecided and self.trainer.state.iteration in self._stops))

    def _is_stop(self, event: LoggedEvent) -> bool:
        return event.iteration in self._stops and event.iteration < self.end

    def state(self) -> StateFingerprint:
        """Fingerprints of the trainer's current state."""
        return fingerprint_of(self.trainer.model, self.trainer.optimizer)

    def log(self) -> EventLog:
        """The log of this run, in this process."""
        return EventLog(self.recorder.folder, self.recorder.rank)

    def rows(self, iteration: int) -> Sequence[object] | None:
        """The indices of that iteration's batch in the data; None if the loader decides the order itself."""
        data = self.trainer.data
        return data.rows(iteration) if iteration > data.pass_start else None


def _writes_weights(handler: object) -> bool:
    return isinstance(handler, BestModel) and handler.folder is not None


def _is_ours(event: LoggedEvent) -> bool:
    return isinstance(event.payload, dict) and event.payload.get("reason") == COMPARED


class ExpectedEvents:
    """The deterministic events of a log that a rerun must repeat.

    They continue where the run was ended by a handler, or from outside, and resumed after that.

    Args:
        events: the events of the log, in order.
        engine: name of the trainer's engine.
        last: the last iteration; None for the log's end.
        is_superseded: whether a resumed run has computed the event of this seq again.
    """

    def __init__(
        self,
        events: Iterator[LoggedEvent],
        engine: str,
        last: int | None = None,
        is_superseded: Callable[[int], bool] = lambda seq: False,
    ) -> None:
        self._is_superseded = is_superseded
        self._events, self._engine, self._last = events, engine, last
        self._stopped_from_outside = False
        self.end: LoggedEvent | None = None  # of the run, if it can be repeated; known after the last event was read
        self.stops: set[int] = set()  # iterations after which the run ended and was resumed, as far as was read

    def __iter__(self) -> Iterator[LoggedEvent]:
        for event in self._events:
            is_own, is_replaced = event.engine == self._engine, event.ord < 0 and self._is_superseded(event.seq)
            if is_own and is_replaced and event.event == "terminate":
                self.stops.add(event.iteration)  # resumed from a checkpoint of before it
            elif is_own and not is_replaced:
                if self._last is not None and event.iteration > self._last:
                    return
                self._stopped_from_outside |= event.event in ("preempted", "interrupt") or _depends_on_the_clock(event)
                if event.event == "interrupt":
                    continue  # the run was paused
                if event.event in ENDINGS:
                    if self._is_resumed():
                        self.stops.add(event.iteration)
                        self._stopped_from_outside = False
                        continue
                    self.end = None if self._stopped_from_outside else event
                    return
            if event.ord >= 0 and (event.event in OPTIONAL or not event.open):
                yield event

    def _is_resumed(self) -> bool:
        """Read on to where the run continues; false if it does not."""
        return any(each.event == "started" and each.engine == self._engine for each in self._events)


def _depends_on_the_clock(event: LoggedEvent) -> bool:
    return event.event == "terminate" and isinstance(event.payload, dict) and event.payload.get("observed") is True


class _TerminatingCheck(EventCheck):
    """Terminates the trainer's run at the first difference, or after the last expected event."""

    def __init__(self, expected: ExpectedEvents, trainer: Trainer) -> None:
        super().__init__(iter(expected), OPTIONAL)
        self._expected_end = expected
        self._trainer = trainer

    def see(self, event: LoggedEvent) -> None:
        undecided = self.waiting and self.divergence is None
        super().see(event)
        if undecided and (self.divergence is not None or (not self.waiting and self._expected_end.end is None)):
            self._trainer.terminate(reason=COMPARED)


def _takes_a_folder(build: Callable[..., Trainer]) -> bool:
    try:
        parameters = inspect.signature(build).parameters.values()
    except (TypeError, ValueError):
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(each.kind in kinds and each.default is inspect.Parameter.empty for each in parameters)
