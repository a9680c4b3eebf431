"""Writes a bundle when a run fails: the batch, the last events, the traceback, and what the weights hold."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Self

from torch import Tensor

from pulsetrain.engine.argument_checks import check_whole_number
from pulsetrain.engine.errors import (
    ArgumentTypeError,
    ConfigurationError,
    PulsetrainError,
    RecordingError,
    unknown_name,
)
from pulsetrain.engine.events.bus import EventBus
from pulsetrain.engine.events.engine import Engine
from pulsetrain.engine.events.names import Event, Events
from pulsetrain.engine.events.payloads import ExceptionRaised
from pulsetrain.engine.events.subscription import Phase
from pulsetrain.engine.logs import get_logger
from pulsetrain.engine.recording import EventLog, LoggedEvent, LogWriter
from pulsetrain.engine.recording.log.run_file import id_of_run
from pulsetrain.engine.recording.replay.engine import ReplayedEngine
from pulsetrain.engine.training_run import is_training_run
from pulsetrain.handlers.attachment.attachment import Handler
from pulsetrain.handlers.crash.bundle_writer import BundleWriter, Failure
from pulsetrain.handlers.crash.crash_files import EVENTS, NOTE, read_bundle
from pulsetrain.handlers.crash.memory_snapshot import capacity_of
from pulsetrain.handlers.metric_values.event_values import EventValues
from pulsetrain.handlers.metric_values.step_values import scalars
from pulsetrain.handlers.recorder.event_recorder import FREQUENT, EventRecorder
from pulsetrain.handlers.run_files.ownership import FolderUse
from pulsetrain.handlers.run_files.run_folder import local_folder, make_folder

__all__ = ["CrashBundle", "read_bundle"]

KeptEvent = tuple[Event, Mapping[str, Tensor | float] | None]  # an event, and the scalars of the step's output
FAULTS = (Events.EXCEPTION_RAISED, Events.ANOMALY_DETECTED)
_NOT_KEPT = (*FREQUENT, Events.METRICS_LOGGED, Events.MEDIA_LOGGED)  # a subscription would make others compute these
_ITERATED = Events.ITERATION_COMPLETED.value


class CrashBundle(Handler):
    """Writes FOLDER/crash/iteration-NUMBER when the run raises: `read_bundle` or `pulsetrain debug` opens it.

    It holds the traceback with the shapes and numbers in local variables, the failing batch (loadable with
    weights_only), its rows of the dataset, the last events as a log, norms and NaN counts of weights, gradients and
    optimizer state, versions and settings. It holds only a short list of environment variables by name, and never the
    texts in local variables.

    If an allocation has failed, it also holds the run's memory by component, an estimate of what a training step needs
    by phase and module, which allocates nothing, and a change with which the step fits. On CUDA, it holds torch's
    memory_summary and, if torch records it, the allocator's history.

    It never raises; the exception only gets notes that name the bundle and such a change. Parts that can no longer be
    read, such as tensors on a device that failed, are listed as missing. A PulsetrainError, which says what to
    correct, leaves no bundle, unless a value was wrong after the first iteration: it may be the value of one batch.
    Ctrl-C and exits leave no bundle either.

    If the trainer has an EventRecorder, the events are the last ones of its log. Otherwise, the handler itself keeps
    them, without METRICS_LOGGED, MEDIA_LOGGED and the events of each iteration other than ITERATION_COMPLETED.

    Args:
        folder: the run folder.
        events: how many of the last events.
        faults: what a bundle is written for: "exception_raised", "anomaly_detected", or the events themselves.
        at_most: bundles per process, since anomalies may occur at each step.

    Raises:
        ConfigurationError: a number below 1, or another event.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> engine = Engine(lambda engine, batch: 1 / batch)
    >>> bundle = CrashBundle(folder.name).attach(engine)
    >>> try:
    ...     engine.run([2, 1, 0])
    ... except ZeroDivisionError:
    ...     found = read_bundle(bundle.bundles[0])
    >>> found.what, found.batch
    ('ZeroDivisionError: division by zero', 0)
    >>> folder.cleanup()
    """

    events: int
    faults: tuple[str | Events, ...]
    at_most: int

    def __init__(
        self,
        folder: str | Path,
        events: int = 1000,
        faults: Sequence[str | Events] = ("exception_raised",),
        *,
        at_most: int = 10,
    ) -> None:
        check_whole_number("CrashBundle", "events", events)
        check_whole_number("CrashBundle", "at_most", at_most)
        if isinstance(faults, str) or not faults:
            raise ConfigurationError(
                "needs a list of events, such as ['exception_raised']", "CrashBundle", faults=faults
            )
        known = {event.value: event for event in FAULTS}
        for each in faults:
            if each not in known and each not in FAULTS:
                raise unknown_name("CrashBundle", "faults", each, known)
        self.folder: Path = local_folder("CrashBundle", folder)
        self.events, self.faults, self.at_most = events, tuple(faults), at_most
        self.bundles: list[Path] = []  # written by this process
        self._kept: deque[KeptEvent] = deque(maxlen=events)
        self._recorder: EventRecorder | None = None
        self._inner: tuple[Engine, str | None, int] | None = None  # engine inside the run that raised; set, error's id
        self._engine: weakref.ref[Engine] | None = None
        self._capacity: int | None = None

    def attach(self, engine: Engine) -> Self:
        """Wait for a failure of the engine, or of one inside its run such as the evaluator.

        If the folder cannot be written, a warning says so, and the run continues without the handler.

        Raises:
            RecordingError: it is a replay, which has no process to look into.
        """
        bus: Engine | EventBus = engine.bus if isinstance(engine, Engine) else engine
        with self._attachment.to(bus, whole_bus=bus is not engine, needed=False) as subscribe:
            if isinstance(engine, ReplayedEngine):
                raise RecordingError(
                    f"CrashBundle.attach({engine.name!r}): an event log does not hold the batch and the weights of the "
                    "process that failed; attach it to the trainer itself"
                )
            make_folder("CrashBundle", self.folder)
            FolderUse("CrashBundle", subscribe, lambda: self.folder)
            self._engine = weakref.ref(engine)
            handlers: Sequence[object] = engine.handlers if is_training_run(engine) else ()
            self._recorder = next((each for each in handlers if isinstance(each, EventRecorder)), None)
            if self._recorder is None:
                for event in Events:
                    if event not in _NOT_KEPT:
                        subscribe(event, self._keep, on_error="warn")
            subscribe(Events.STARTED, self._on_started, on_error="warn")
            for fault in FAULTS:
                if fault in self.faults or fault.value in self.faults:
                    subscribe(fault, self._on_fault, phase=Phase.PERSIST, on_error="warn")
        return self

    def detach(self) -> None:
        super().detach()
        self._kept.clear()
        self._engine = self._recorder = self._inner = None

    def _keep(self, engine: Engine, event: Event) -> None:
        self._kept.append((event, scalars(engine.state.output) if event.type == _ITERATED else None))

    def _on_started(self, engine: Engine) -> None:
        outer = self._engine() if self._engine is not None else None
        if engine is outer:
            self._capacity = capacity_of(engine)

    def _on_fault(self, engine: Engine, event: Event) -> None:
        error = event.payload.error if isinstance(event.payload, ExceptionRaised) else None
        if error is not None:
            outer = self._engine() if self._engine is not None else None
            if engine is not outer and outer is not None and outer.is_running:  # the outer run raises it as well
                self._inner = engine, getattr(engine, "set_name", None), id(error)
                return
            if not isinstance(error, Exception) or _says_what_to_correct(error, engine):
                return
        if len(self.bundles) >= self.at_most:
            return
        inner, self._inner = self._inner, None
        at, set_name = inner[:2] if inner is not None and inner[2] == id(error) else (engine, None)
        try:
            failure = Failure(engine, event, error, at, set_name, self._capacity)
            writer = BundleWriter(self.folder, failure, self._write_events)
            path = writer.write()
        except Exception as failed:
            get_logger("handlers").warning(
                "the crash bundle could not be written",
                folder=str(self.folder),
                error=f"{type(failed).__name__}: {failed}",
            )
            return
        self.bundles.append(path)
        if error is not None:
            error.add_note(f"{NOTE}{path}")
            if writer.advice is not None:
                error.add_note(f"memory: {writer.advice}")

    def _write_events(self, into: Path, facts: dict[str, object]) -> None:
        engine = self._engine() if self._engine is not None else None
        if self._recorder is None or engine is None:
            _write_log(into / EVENTS, _logged(self._kept))
            return
        self._recorder.flush()
        first = engine.bus.sequence.last - 8 * self.events  # the bus numbers events that are not recorded as well
        tail = deque(EventLog(self._recorder.folder).read(seq=(first, None)), maxlen=self.events)
        recorded = [each.seq for each in tail if each.event == facts["event"] and each.engine == engine.name]
        if recorded:
            facts["seq"] = recorded[-1]  # a log that was continued has other numbers than the bus
        _write_log(into / EVENTS, tail)


def _says_what_to_correct(error: Exception, engine: Engine) -> bool:
    """Whether the error's message is enough, without the batch and the state at which it was raised."""
    by_a_batch = isinstance(error, (ConfigurationError, ArgumentTypeError)) and engine.state.iteration > 1
    return isinstance(error, PulsetrainError) and not by_a_batch


def _logged(kept: Iterable[KeptEvent]) -> list[LoggedEvent]:
    values, made = EventValues(), list[LoggedEvent]()
    for event, output in kept:
        logged = LoggedEvent(-1, event.engine, event.type, event.epoch, event.iteration, seq=event.seq, t=event.time_ns)
        made.append(logged)
        if event.payload is not None:
            values.put_payload(logged, event.payload)
        if output:
            values.put(logged, "output", dict(output))
    values.settle()
    return made


def _write_log(folder: Path, events: Sequence[LoggedEvent]) -> None:
    if not events:
        return
    with closing(LogWriter(folder, run=id_of_run(folder.parent))) as writer:
        for ord, event in enumerate(events):
            event.ord, event.open = ord, False
            writer.add(event)
        writer.end()
