"""Runs a recorded run's trainer again, away from the run's folder, and compares what comes with what was recorded."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

from pulsetrain.engine import Events, Phase
from pulsetrain.engine.checkpoint import Place, find_checkpoints
from pulsetrain.engine.checkpoint.reader import step_of
from pulsetrain.engine.errors import CheckpointError, ConfigurationError
from pulsetrain.engine.recording import EventCheck, EventLog, LoggedEvent
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
    Throughput,
)
from pulsetrain.handlers.recorder.fingerprints import StateFingerprint, fingerprint_of
from pulsetrain.handlers.run_files.run_file import read_run_file
from pulsetrain.trainer import Trainer

__all__ = ["Again", "Expected", "first_checkpoint", "nearest_checkpoint"]

# they write, print and measure, and change nothing that a recording expects again
QUIET = (
    *(Alert, BestModel, Checkpointer, CrashBundle, HangWatchdog, LRFinder, MemoryMonitor, MetricLogger),
    *(Plots, Profiler, ProgressBar, Throughput),
)


@overload
def nearest_checkpoint(run: Path, iteration: int) -> Place: ...
@overload
def nearest_checkpoint(run: Path, iteration: int, *, or_none: bool) -> Place | None: ...
def nearest_checkpoint(run: Path, iteration: int, *, or_none: bool = False) -> Place | None:
    """The run's last checkpoint that was made before this iteration.

    Args:
        run: the run folder.
        iteration: the one that it has to come before.
        or_none: give None where there is none.

    Raises:
        CheckpointError: there is none.
    """
    found = find_checkpoints(run / "checkpoints")
    before = [place for place in found if step_of(place) < iteration]
    if not before and or_none:
        return None
    if not before:
        there = f"the first was made behind iteration {min(map(step_of, found))}" if found else "it has none"
        raise CheckpointError(
            f"{run}: has no checkpoint before iteration {iteration}; {there}; choose a later iteration"
        )
    return max(before, key=step_of)  # though it may be damaged: whoever loads it says so


def first_checkpoint(run: Path) -> Place | None:
    """What a run that was forked from another begins with; None where the run has begun by itself.

    Raises:
        CheckpointError: a fork has no checkpoint.
    """
    parent = read_run_file(run).get("parent")
    if parent is None:
        return None
    found = find_checkpoints(run / "checkpoints")
    if not found:
        raise CheckpointError(f"{run}: was forked from another run, and has no checkpoint to begin at")
    return found[0]


def _left_out_by(run: Path | None) -> tuple[tuple[int, int], ...]:
    """What a run left out that has gone back to a checkpoint: the batches' first and last numbers."""
    starts = read_run_file(run).get("starts") if run is not None else None
    return tuple((first, last) for first, last in starts[-1].get("left_out", ())) if starts else ()


class Again:
    """A trainer as the run's was, at a checkpoint or at the beginning; its files go to another folder.

    Args:
        build: makes the trainer; where it takes an argument, it is given `folder`.
        folder: for what handlers write.
        checkpoint: None begins at the beginning.
        run: the folder of the run; of one that has gone back, the batches that it left out then are left out here.

    Raises:
        ConfigurationError: it made no Trainer, or one without an EventRecorder.
        CheckpointError: the checkpoint is damaged, or does not fit.
    """

    def __init__(
        self, build: Callable[..., Trainer], folder: Path, checkpoint: Place | None, run: Path | None = None
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
        self.recorder.folder = folder / "events"
        for handler in trainer.handlers:
            if isinstance(handler, QUIET):
                handler.detach()
        trainer.data.left_out += _left_out_by(run)
        self.check = EventCheck(iter(()))
        self.start = self.end = 0  # iterations
        if checkpoint is not None:
            trainer.load_checkpoint(checkpoint)
            self.start = self.end = trainer.state.iteration

    @property
    def after(self) -> int:
        """The seq of the recorded run behind which this goes on; -1 for the beginning."""
        return self.recorder.resumed_behind if self.recorder.resumed_behind is not None else -1

    def compare(self, expected: Expected, last: int | None = None) -> None:
        """Train, and compare each event with those expected, until one differs or all have come.

        Where the recorded run was ended by an exception or by a handler, it is trained on until that comes again, or
        does not come in its iteration. On an accelerator a difference is seen when values come to the host: the run may
        be some iterations further.

        Args:
            last: iteration of the last event expected, where that is known.
        """
        trainer = self.trainer
        on_host = trainer.backend.device.type == "cpu"

        def flush(engine: Trainer) -> None:
            if on_host or engine.state.iteration == last:
                self.recorder.flush()

        def stop_behind_the_end(engine: Trainer) -> None:
            if expected.end is not None and not self.check.waiting and engine.state.iteration > expected.end.iteration:
                engine.terminate(reason=OVER)

        self.check = _Ending(expected, trainer)
        if not self.check.waiting and expected.end is None:
            return
        self.recorder.resume_check = self.check
        trainer.add_event_handler(Events.ITERATION_COMPLETED, flush, phase=Phase.PERSIST)
        trainer.add_event_handler(Events.ITERATION_STARTED, stop_behind_the_end)
        try:
            trainer.train()
        except Exception:  # of the run itself: the log of it has it
            self.recorder.flush()
        self.end = trainer.state.iteration
        self.recorder.resume_check = None
        self.recorder.detach()

    def ending(self) -> LoggedEvent | None:
        """The exception or the handler's word that has ended this run; None where the comparison has."""
        ends = list(self.log().read(engine=self.trainer.name, event=ENDINGS))
        return next((event for event in reversed(ends) if not _is_ours(event)), None)

    def state(self) -> StateFingerprint:
        """Fingerprints of the trainer as it is now."""
        return fingerprint_of(self.trainer.model, self.trainer.optimizer)

    def log(self) -> EventLog:
        """What was recorded of it."""
        return EventLog(self.recorder.folder)

    def rows(self, iteration: int) -> Sequence[int] | None:
        """The indices of that iteration's batch in the data; None where the loader does not tell them."""
        data = self.trainer.data
        return data.rows(iteration) if iteration > data.pass_start else None


ENDINGS = frozenset({"exception_raised", "terminate"})
OVER = "the comparison has come to its end"


def _is_ours(event: LoggedEvent) -> bool:
    return isinstance(event.payload, dict) and event.payload.get("reason") == OVER


class Expected:
    """The deterministic events of a log that have to come again, behind a seq.

    Args:
        events: of the log, in order.
        engine: the trainer's.
        last: the last iteration; None for the log's end.
        is_past: of a seq: whether what was there has been computed again since.
    """

    def __init__(
        self,
        events: Iterator[LoggedEvent],
        engine: str,
        last: int | None = None,
        is_past: Callable[[int], bool] = lambda seq: False,
    ) -> None:
        self._is_past = is_past
        self._events, self._engine, self._last = events, engine, last
        self._stopped_from_outside = False
        self.end: LoggedEvent | None = None  # of the run, if it can come again; known when all have been had

    def __iter__(self) -> Iterator[LoggedEvent]:
        for event in self._events:
            if event.engine == self._engine and not (event.ord < 0 and self._is_past(event.seq)):
                if self._last is not None and event.iteration > self._last:
                    return
                self._stopped_from_outside |= event.event in ("preempted", "interrupt")
                if event.event == "interrupt":
                    return
                if event.event in ENDINGS:
                    self.end = None if self._stopped_from_outside else event
                    return
            if event.ord >= 0 and not event.open:
                yield event


class _Ending(EventCheck):
    """Ends the trainer's run at the first difference, or when all has come."""

    def __init__(self, expected: Expected, trainer: Trainer) -> None:
        super().__init__(iter(expected))
        self._expected_end = expected
        self._trainer = trainer

    def see(self, event: LoggedEvent) -> None:
        undecided = self.waiting and self.divergence is None
        super().see(event)
        if undecided and (self.divergence is not None or (not self.waiting and self._expected_end.end is None)):
            self._trainer.terminate(reason=OVER)


def _takes_a_folder(build: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(build).parameters.values()
    except (TypeError, ValueError):
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(each.kind in kinds and each.default is inspect.Parameter.empty for each in parameters)
