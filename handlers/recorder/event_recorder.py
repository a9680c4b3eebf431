"""Writes every event of a bus into the run folder's log."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from pulsetrain.engine.errors import ConfigurationError, PulsetrainError, RecordingError
from pulsetrain.engine.events.bus import EventBus
from pulsetrain.engine.events.engine import Engine
from pulsetrain.engine.events.names import Event, Events, identify
from pulsetrain.engine.events.subscription import FIRST, LAST, OnError, Order, Phase
from pulsetrain.engine.logs import get_logger
from pulsetrain.engine.recording import EventCheck, EventLog, LoggedEvent, LogWriter
from pulsetrain.handlers.attachment.attachment import Attachment
from pulsetrain.handlers.metric_values.event_values import EventValues, PlainTypes, summary
from pulsetrain.handlers.metric_values.step_values import METRIC_EVENTS, learning_rates, scalars
from pulsetrain.handlers.recorder.resume_check import ResumeCheck
from pulsetrain.handlers.run_files.run_file import note_start
from pulsetrain.handlers.run_files.run_folder import make_folder

__all__ = ["EventRecorder"]

LEAST_BYTES = 100_000  # of a budget: a few blocks have to stay as they are
BATCH = 100  # events with values on a device between two copies to the host
FETCHING = (Events.GET_BATCH_STARTED, Events.GET_BATCH_COMPLETED)
FREQUENT = (Events.ITERATION_STARTED, Events.GRADIENTS_READY, Events.OPTIMIZER_STEP_COMPLETED, *FETCHING)
MEASURED = (Events.EPOCH_COMPLETED, *METRIC_EVENTS)  # state.metrics is written with them: their receivers compute some
FINAL = (Events.TERMINATE, Events.COMPLETED, Events.EXCEPTION_RAISED, Events.INTERRUPT)
# where a run begins, is cut off and goes on: not the same when it is repeated in other parts
OBSERVED = (Events.STARTED, Events.PREEMPTED, Events.HANDLER_FAILED, Events.CHECKPOINT_SAVED, Events.CHECKPOINT_LOADED)
_FINAL_TYPES = frozenset(event.value for event in FINAL)
_MEASURED_TYPES = frozenset(event.value for event in MEASURED)
_OBSERVED_TYPES = frozenset(event.value for event in (*OBSERVED, *FINAL, *FETCHING))


class EventRecorder:
    """Writes the events of every engine on the bus into FOLDER/events, in the bus's order: read it with `EventLog`.

    What has been written outlives the process, killed or not. Scalars stay on their device and are copied to the host
    for 100 events at a time and at the end of each validation, rollout, epoch and run: a process that is killed loses
    those values, not the events. Non-finite floats are the strings "NaN", "Infinity", "-Infinity"; what cannot be
    written is summarised as {"__type__": ...}.

    Engines that join the bus later are recorded, too. Custom events registered later are recorded from the next
    STARTED or EPOCH_STARTED on, not before. GRADIENTS_READY is heard, so the gradients' norm is computed.

    A run that goes on from a checkpoint goes on with the log. The events that the log holds past the checkpoint are
    kept, marked as superseded, and compared with what is computed again: `resume_check`, floats by their bits.

    Args:
        folder: the run folder; a log that is there already is continued.
        include_batches: record GET_BATCH_STARTED and GET_BATCH_COMPLETED as well.
        every: record only each n-th iteration's and update's own events; all others are recorded in any case.
        max_bytes: budget of the sealed log, at least 100,000: where it is reached, old iterations' own events are
            thinned to each hundredth, and an event `log_thinned` says so.
        rank: of this process, where several train together; each writes a log of its own.
        on_error: "warn" goes on when the disk is full or gone, says so once, and writes what it has kept when it can;
            "raise" ends the run.

    Raises:
        ConfigurationError: an argument is out of range.
    """

    def __init__(
        self,
        folder: str | Path,
        include_batches: bool = False,
        every: int | None = None,
        *,
        rank: int = 0,
        max_bytes: int | None = None,
        on_error: OnError = "warn",
    ) -> None:
        if every is not None and (not isinstance(every, int) or isinstance(every, bool) or every < 1):
            raise ConfigurationError(f"EventRecorder(every={every!r}): needs a whole number of at least 1")
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
            raise ConfigurationError(f"EventRecorder(rank={rank!r}): needs a whole number, 0 or more")
        if max_bytes is not None and (not isinstance(max_bytes, int) or max_bytes < LEAST_BYTES):
            raise ConfigurationError(f"EventRecorder(max_bytes={max_bytes!r}): needs at least {LEAST_BYTES:,} bytes")
        if on_error not in ("warn", "raise"):
            raise ConfigurationError(f"EventRecorder(on_error={on_error!r}): choose 'warn' or 'raise'")
        self.folder = Path(folder) / "events"
        self.include_batches = include_batches
        self.every = every
        self.rank, self.max_bytes = rank, max_bytes
        self._on_error = on_error
        self._known: set[str] = set()  # keys of the events subscribed to
        self._writer: LogWriter | None = None
        self._values = EventValues()
        self._plain_types = PlainTypes()
        self._waiting: list[LoggedEvent] = []  # written without their values, which are on a device
        self._pending = 0  # such values
        self._told = False  # that the disk is full
        self._running: dict[int, tuple[LoggedEvent, Engine]] = {}  # by seq: their receivers are still running
        self._in_epoch: set[str] = set()  # engines
        self._begun_again: set[str] = set()  # engines whose epoch goes on behind a checkpoint
        self._outermost: Any = None  # the engine whose run contains the others'
        self._place: dict[str, Any] = {}  # how far the log had come when it was last closed
        self._saved: Mapping[str, Any] | None = None  # the state of a checkpoint that is being loaded
        self._attachment = Attachment("EventRecorder")
        self._bus: Any = None  # the one attached to, last
        self.resume_check: EventCheck | None = None  # of the checkpoint that the run goes on from
        self.resumed_behind: int | None = None  # seq of the log that the checkpoint was made in

    def attach(self, engine_or_bus: Engine | EventBus) -> Self:
        """Record every engine of the bus; an engine stands for its bus.

        Raises:
            RunFolderError: the folder cannot be written.
        """
        bus: Any = (
            engine_or_bus if isinstance(engine_or_bus, EventBus) else getattr(engine_or_bus, "bus", engine_or_bus)
        )
        with self._attachment.to(bus):
            self._bus = bus
            make_folder("EventRecorder", self.folder)
            for event in Events:
                if event not in FETCHING or self.include_batches:
                    self._subscribe(event)
                self._known.add(identify(event)[0])
            self._adopt_custom_events()
        return self

    def detach(self) -> None:
        self._end()
        self._attachment.cancel()
        self._known.clear()
        self._running.clear()

    def flush(self) -> None:
        """Copy what is on the device to the host."""
        if self._writer is not None:
            self._settle()

    def state_dict(self) -> dict[str, Any]:
        """How far the log had come."""
        writer = self._writer
        if writer is None:
            return self._place
        self._settle()
        for event, engine in self._running.values():  # killed behind this checkpoint, they have what is known now
            self._put_metrics(event, engine)
            self._on_disk(writer.update, event)
        return {"seq": self._bus.sequence.last, "ord": writer.next_ord, "in_epoch": sorted(self._in_epoch)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """CHECKPOINT_LOADED then lets the log go on from there."""
        self._saved = dict(state) or None

    def _subscribe(self, event: Any) -> None:
        def hear(event: Any, handler: Any, phase: Phase, order: Order) -> None:
            self._attachment.hear(event, handler, phase=phase, order=order)

        first = self._on_event
        if event in MEASURED or event in FINAL:
            first = self._on_exception if event is Events.EXCEPTION_RAISED else self._on_opened
            hear(event, self._on_closed, Phase.PERSIST, LAST)
        elif event is Events.ITERATION_COMPLETED:
            first = self._on_iteration
        elif event is Events.CHECKPOINT_LOADED:
            first = self._on_loaded
        elif event is Events.STARTED:
            first = self._on_started
        elif event is Events.EPOCH_STARTED:
            first = self._on_epoch_started
        sampled = self.every is not None and (event in FREQUENT or event is Events.ITERATION_COMPLETED)
        # before every other receiver: the events that those fire come behind this one
        hear(event(every=self.every) if sampled else event, first, Phase.COMPUTE, FIRST)
        if event is Events.STARTED or event is Events.EPOCH_STARTED:
            hear(event, self._adopt_custom_events, Phase.COMPUTE, FIRST)

    def _adopt_custom_events(self) -> None:
        bus = self._attachment.bus
        for engine in bus.engines if bus is not None else ():
            for event in engine.registered_events:
                key, _ = identify(event)
                if key not in self._known:
                    self._known.add(key)
                    self._subscribe(event)

    def _on_event(self, engine: Engine, event: Event) -> None:
        logged = self._logged(event)
        if logged.payload is event.payload:  # plain, so no value of it is on a device
            self._add(logged)
        else:
            self._write(logged)

    def _on_iteration(self, engine: Engine, event: Event) -> None:
        logged = self._logged(event)
        rates = learning_rates(engine)
        try:
            output = scalars(engine.state.output)
            if output:
                logged.output = self._values.of_scalars(output)
        except Exception:  # a recorder never stops a run for what it was given
            logged.output = summary(engine.state.output)
        if rates:
            self._values.put(logged, "lr", rates)
        self._write(logged)

    def _on_started(self, engine: Engine, event: Event) -> None:
        if self._outermost is None:
            # attached while one runs, the first start that is heard may be that of an engine inside it
            self._outermost = next(
                (each for each in self._bus.engines if each is not engine and each.is_running), engine
            )
        if self._outermost is engine:
            self._saved = None
            if self._writer is None and event.iteration == 0:
                self._begin_anew(event)
            self._on_disk(note_start, self.folder.parent, engine, event.iteration, self.rank)
        logged = self._logged(event)
        logged.observed = _bounds(engine)
        self._write(logged)

    def _begin_anew(self, event: Event) -> None:
        """A run begins where a log was cut off: it had no checkpoint to go on from, and its events come again."""
        writer = self._opened()
        if not writer.cut_off or writer.last_seq < 0:
            return
        log = EventLog(self.folder, self.rank)
        begun = [each.seq for each in log.read(engine=event.engine, event=event.type, iteration=(0, 0))]
        first = next((each for each in log.read(seq=(begun[-1], None)) if each.ord >= 0), None) if begun else None
        if first is not None:
            self._on_disk(writer.rewind, begun[-1], first.ord, self._next_seq(writer), event.time_ns)

    def _on_epoch_started(self, engine: Engine, event: Event) -> None:
        logged = self._logged(event, observed=event.engine in self._begun_again)
        self._begun_again.discard(event.engine)
        self._in_epoch.add(event.engine)
        logged.observed = _bounds(engine)
        self._write(logged)

    def _on_loaded(self, engine: Engine, event: Event) -> None:
        """The log goes on behind the checkpoint; what it holds past it comes again."""
        saved, self._saved = self._saved, None
        writer = self._opened()
        self.resume_check = self.resumed_behind = None
        if saved is not None:
            self.resumed_behind = saved["seq"]
            self._in_epoch = set(saved["in_epoch"])
            self._begun_again = set(saved["in_epoch"])
            if saved["seq"] <= writer.last_seq:  # else the run goes on in another folder
                log = EventLog(self.folder, self.rank)
                if getattr(engine, "rewinding", None) is None:  # else other batches come than those in the log
                    self.resume_check = ResumeCheck.of_log(log, saved["seq"], event.engine)
                self._on_disk(writer.rewind, saved["seq"], saved["ord"], self._next_seq(writer), event.time_ns)
            else:
                writer.next_ord = saved["ord"]
        self._write(self._logged(event))

    def _on_opened(self, engine: Engine, event: Event) -> None:
        if event.type == Events.EPOCH_COMPLETED.value:
            self._in_epoch.discard(event.engine)
        logged = self._logged(event)
        logged.open = True
        self._running[event.seq] = logged, engine
        self._write(logged)

    def _on_closed(self, engine: Engine, event: Event) -> None:
        running = self._running.pop(event.seq, None)
        if running is None or self._writer is None:
            return
        self._put_metrics(*running)
        self._settle()
        self._complete(running[0])
        if engine is self._outermost and event.type in _FINAL_TYPES:
            self._end()

    def _put_metrics(self, logged: LoggedEvent, engine: Engine) -> None:
        if engine.state.metrics and logged.event in _MEASURED_TYPES:
            self._values.put(logged, "metrics", engine.state.metrics)
            self._values.settle()
            self._pending = 0  # those that wait have their values now, and are completed at the next copy

    def _on_exception(self, engine: Engine, event: Event) -> None:
        # what this engine was firing is over; its last receivers were never reached
        for seq in [seq for seq, (_, opener) in self._running.items() if opener is engine]:
            logged, _ = self._running.pop(seq)
            self._values.put(logged, "error", event.payload.error)
            self._put_metrics(logged, engine)
            self._complete(logged)
        self._write(self._logged(event))
        if engine is self._outermost:
            self._end()

    def _opened(self) -> LogWriter:
        """The log's writer: between two runs another recorder may have the log.

        Raises:
            RunFolderError: another recorder writes the log, or the folder cannot be written.
            RecordingError: the log is of a newer format.
        """
        if self._writer is None:
            self._writer = LogWriter(self.folder, self.rank, self.max_bytes)
            self._bus.continue_after(self._writer.last_seq)
        return self._writer

    def _next_seq(self, writer: LogWriter) -> int:
        """Take a number of the bus's sequence that the log does not have yet."""
        seq: int = max(self._bus.sequence.last, writer.last_seq) + 1
        self._bus.continue_after(seq)
        return seq

    def _end(self) -> None:
        """The outermost run is over: close the log; what comes nevertheless opens it again."""
        self._outermost = None
        if self._writer is not None:
            self._place = self.state_dict()
            writer, self._writer = self._writer, None
            try:
                self._on_disk(writer.end)
            finally:
                writer.close()
                self._told = False

    def _logged(self, event: Event, *, observed: bool = False) -> LoggedEvent:
        writer, seq = self._writer, event.seq
        if writer is None:
            writer = self._opened()
        if seq <= writer.last_seq:  # given before the log was opened, or before a seam
            seq = self._next_seq(writer)
        if observed or event.type in _OBSERVED_TYPES or event.observed:
            place = -1
        else:
            place = writer.next_ord
            writer.next_ord = place + 1
        payload = event.payload
        logged = LoggedEvent(
            place, event.engine, event.type, event.epoch, event.iteration, payload, seq=seq, t=event.time_ns
        )
        if payload is not None and not self._plain_types.holds(payload):
            self._values.put_payload(logged, payload)
        return logged

    def _write(self, logged: LoggedEvent) -> None:
        """`_add` for an event that may have values on a device."""
        if len(self._values.pending) > self._pending:
            self._pending = len(self._values.pending)
            logged.open = True
            self._waiting.append(logged)
        self._add(logged)
        if len(self._waiting) >= BATCH:
            self._settle()

    def _add(self, logged: LoggedEvent) -> None:
        writer = self._writer
        try:
            writer.add(logged)  # type: ignore[union-attr]  # `_logged` has opened it
        except RecordingError:  # a payload whose values are not what its type says
            self._values.put_payload(logged, logged.payload)
            self._on_disk(self._add_in_any_case, logged)
        except OSError as error:
            self._cannot_write(error)
        if self.resume_check is not None and not logged.open:
            self.resume_check.see(logged)

    def _add_in_any_case(self, logged: LoggedEvent) -> None:
        writer = self._opened()
        try:
            writer.add(logged)
        except RecordingError:
            for name in ("payload", "output", "metrics", "lr"):
                if getattr(logged, name) is not None:
                    setattr(logged, name, summary(getattr(logged, name)))
            logged.engine, logged.event = ascii(logged.engine)[1:-1], ascii(logged.event)[1:-1]
            writer.add(logged)

    def _settle(self) -> None:
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        self._values.settle()
        self._pending = 0
        running = {logged.seq for logged, _ in self._running.values()}
        for logged in waiting:
            if logged.seq not in running:
                self._complete(logged)

    def _complete(self, logged: LoggedEvent) -> None:
        self._on_disk(self._opened().complete, logged)
        if self.resume_check is not None:
            self.resume_check.see(logged)

    def _on_disk(self, write: Callable[..., None], *arguments: Any) -> None:
        try:
            write(*arguments)
        except OSError as error:
            self._cannot_write(error)

    def _cannot_write(self, error: OSError) -> None:
        """A full disk costs nothing as long as the writer can keep what it has not written; it is told once."""
        if self._on_error == "raise" or isinstance(error, PulsetrainError):
            raise error
        if not self._told:
            self._told = True
            get_logger("handlers").warning(
                "the event log cannot be written; the run goes on, and the events are kept in memory for now",
                folder=str(self.folder),
                error=str(error),
            )


def _bounds(engine: Engine) -> dict[str, Any] | None:
    """How long the run is to be, as far as it is known: for whoever replays it."""
    state = engine.state
    known = {name: getattr(state, name, None) for name in ("max_epochs", "max_iters", "epoch_length")}
    known["total_iterations"] = getattr(engine, "total_iterations", None)
    return {name: value for name, value in known.items() if isinstance(value, int)} or None
