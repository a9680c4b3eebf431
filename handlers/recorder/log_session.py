"""The log while a recorder writes it: its writer, values that are still on a device, and a disk that fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from pulsetrain.engine import Engine, Event, EventBus, Events, OnError, PulsetrainError, RecordingError
from pulsetrain.engine.logs import get_logger
from pulsetrain.engine.recording import EventCheck, EventLog, LoggedEvent, LogWriter
from pulsetrain.engine.recording.log.run_file import id_of_run
from pulsetrain.handlers.metric_values.event_values import EventValues, PlainTypes, encode_plain, summary
from pulsetrain.handlers.metric_values.step_values import METRIC_EVENTS
from pulsetrain.handlers.run_files.ownership import take
from pulsetrain.handlers.run_files.run_folder import writing

__all__ = ["FETCHING", "FINAL", "MEASURED", "LogSession"]

BATCH = 100  # events with values on a device between two copies to the host,
INTERVAL = 200_000_000  # and nanoseconds: each copy waits for the device
FETCHING = (Events.GET_BATCH_STARTED, Events.GET_BATCH_COMPLETED)
MEASURED = (Events.EPOCH_COMPLETED, *METRIC_EVENTS)  # written with state.metrics, which their receivers add to
FINAL = (Events.TERMINATE, Events.COMPLETED, Events.EXCEPTION_RAISED, Events.INTERRUPT)
# where a run starts, is cut off and continues: different when it is repeated in other parts
_OBSERVED = (Events.STARTED, Events.PREEMPTED, Events.HANDLER_FAILED, Events.CHECKPOINT_SAVED, Events.CHECKPOINT_LOADED)
_OBSERVED_TYPES = frozenset(event.value for event in (*_OBSERVED, *FINAL, *FETCHING))
_MEASURED_TYPES = frozenset(event.value for event in MEASURED)


class LogSession:
    """Makes log entries of events and writes them.

    Args:
        folder: the log's.
        rank: of this process.
        max_bytes: budget of the sealed log.
        on_error: "warn" keeps what cannot be written in memory, and warns once; "raise" raises a RunFolderError.
    """

    bus: EventBus
    """Whose events are recorded; the recorder sets it."""
    folder: Path
    rank: int

    def __init__(self, folder: Path, rank: int, max_bytes: int | None, on_error: OnError) -> None:
        self.folder, self.rank = folder, rank
        self.writer: LogWriter | None = None
        self.values: EventValues = EventValues()
        self.check: EventCheck | None = None  # compares what is written with what is expected
        self._max_bytes, self._on_error = max_bytes, on_error
        self._plain_types = PlainTypes()
        self._running: dict[int, tuple[LoggedEvent, Engine]] = {}  # by seq: their receivers are still running
        self._waiting: list[LoggedEvent] = []  # written without their values, which are on a device
        self._pending = 0  # number of such values
        self._settled_at = 0  # time of the event by which they were last copied, nanoseconds
        self._reported = False  # that the disk fails

    def open(self) -> LogWriter:
        """The log's writer, opened where it is not: between two runs another recorder may write the log.

        Raises:
            RunFolderError: another run owns the run folder, or it cannot be written.
            RecordingError: the log has a newer format.
        """
        if self.writer is None:
            if not self.rank:  # other ranks only add their logs
                take(self.folder.parent, self.bus, "EventRecorder")
            self.writer = LogWriter(self.folder, self.rank, self._max_bytes, id_of_run(self.folder.parent))
            self.bus.continue_after(self.writer.last_seq)
        return self.writer

    def read(self) -> EventLog:
        """The log as it is on disk now."""
        return EventLog(self.folder, self.rank)

    def entry(self, event: Event, *, observed: bool = False) -> LoggedEvent:
        """The event's entry, not written yet, with its place in the order.

        Args:
            observed: whether the event need not be reproduced when the run is repeated.
        """
        writer, seq = self.writer, event.seq
        if writer is None:
            writer = self.open()
        if seq <= writer.last_seq:  # numbered before the log was opened, or before a rewind
            seq = max(self.bus.sequence.last, writer.last_seq) + 1
            self.bus.continue_after(seq)
        if observed or event.type in _OBSERVED_TYPES or event.observed:
            place = -1
        else:
            place = writer.next_ord
            writer.next_ord = place + 1
        logged = LoggedEvent(place, event.engine, event.type, event.epoch, event.iteration, seq=seq, t=event.time_ns)
        if event.payload is not None:
            self.values.put_payload(logged, event.payload)
        return logged

    def record(
        self, event: Event, output: Mapping[str, object] | None = None, rates: tuple[Tensor | float, ...] | None = None
    ) -> bool:
        """Write an event in one step, as `write(entry(event))` would, if all of its values are on the host and plain.

        Almost every event of a run on the CPU is written here: what else an event may need is left out.

        Args:
            output: numbers of the step's output, see `are_numbers`.
            rates: of the step.

        Returns:
            Whether it was written. If not, nothing has changed.
        """
        writer, payload = self.writer, event.payload
        if (
            writer is None
            or event.seq <= writer.last_seq
            or event.observed
            or event.type in _OBSERVED_TYPES
            or self.check is not None
            or self._waiting
            or (payload is not None and not self._plain_types.fits(payload))
        ):
            return False
        place, seq, t = writer.next_ord, event.seq, event.time_ns
        logged = LoggedEvent(
            place, event.engine, event.type, event.epoch, event.iteration, payload, output, None, rates, seq=seq, t=t
        )
        try:
            line = encode_plain(logged)
        except Exception:  # whatever reading a tensor raises
            return False
        if not line.isascii():
            return False
        logged.payload = logged.output = None  # which might keep a step's tensors in memory
        writer.next_ord = place + 1
        try:
            writer.append(logged, line)
        except OSError as error:
            self._cannot_write(error)
        return True

    def write(self, logged: LoggedEvent) -> None:
        """Write an entry; one with values on a device waits for them, and is completed later."""
        if len(self.values.pending) > self._pending:
            self._pending = len(self.values.pending)
            logged.open = True
            self._waiting.append(logged)
        writer = self.writer
        try:
            writer.add(logged)  # type: ignore[union-attr]  # `entry` has opened it
        except RecordingError:  # the encoder knows a limit that `values` does not
            self.on_disk(self._write_summarised, logged)
        except OSError as error:
            self._cannot_write(error)
        if self.check is not None and not logged.open:
            self.check.see(logged)
        if (self._waiting and not 0 <= logged.t - self._settled_at < INTERVAL) or len(self._waiting) >= BATCH:
            self._settled_at = logged.t
            self.settle()

    def begin(self, logged: LoggedEvent, event: Event, engine: Engine) -> None:
        """Write the entry of an event before its receivers run; `finish` completes it after them."""
        logged.open = True
        self._running[event.seq] = logged, engine
        self.write(logged)

    def finish(self, seq: int) -> bool:
        """Complete the entry that `begin` wrote, with what the receivers computed; false where there is none."""
        running = self._running.pop(seq, None)
        if running is None or self.writer is None:
            return False
        self._put_metrics(*running)
        self.settle()
        self._complete(running[0])
        return True

    def fail(self, engine: Engine, error: BaseException) -> None:
        """Complete the engine's entries whose last receivers were never called, because of an error."""
        for seq in [seq for seq, (_, owner) in self._running.items() if owner is engine]:
            logged, _ = self._running.pop(seq)
            self.values.put(logged, "error", error)
            self._put_metrics(logged, engine)
            self._complete(logged)

    def settle(self) -> None:
        """Copy values from the device to the host, in one copy, and complete the entries that wait for them."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        self.values.settle()
        self._pending = 0
        running = {logged.seq for logged, _ in self._running.values()}
        for logged in waiting:
            if logged.seq not in running:
                self._complete(logged)

    def update(self) -> None:
        """Write what is known so far, for a process that is killed after this."""
        self.settle()
        for logged, engine in self._running.values():
            self._put_metrics(logged, engine)
            self.on_disk(self.open().update, logged)

    def rewind(self, after: int, ord: int, time_ns: int) -> None:
        """Mark the events after a seq as superseded; the next one gets this `ord`."""
        seq = self.bus.sequence.last + 1
        self.bus.continue_after(seq)
        self.on_disk(self.open().rewind, after, ord, seq, time_ns)

    def close(self) -> None:
        """Seal the log and release it; another event opens it again."""
        if self.writer is None:
            return
        writer, self.writer = self.writer, None
        try:
            self.on_disk(writer.end)
        finally:
            writer.close()
            self._reported = False

    def forget(self) -> None:
        """Drop the entries whose receivers are still running."""
        self._running.clear()

    def leave(self) -> None:
        """In a forked process: the log stays open in the parent alone."""
        self.writer = self.check = None
        self.forget()
        self._waiting.clear()

    def on_disk(self, write: Callable[..., None], *arguments: object) -> None:
        """Call a function that writes, and treat an OSError as `on_error` says."""
        try:
            write(*arguments)
        except OSError as error:
            self._cannot_write(error)

    def _put_metrics(self, logged: LoggedEvent, engine: Engine) -> None:
        if engine.state.metrics and logged.event in _MEASURED_TYPES:
            self.values.put(logged, "metrics", engine.state.metrics)
            self.values.settle()
            self._pending = 0  # the entries that wait have their values now, and are completed at the next copy

    def _complete(self, logged: LoggedEvent) -> None:
        self.on_disk(self.open().complete, logged)
        if self.check is not None:
            self.check.see(logged)

    def _write_summarised(self, logged: LoggedEvent) -> None:
        writer = self.open()
        try:
            writer.add(logged)
        except RecordingError:
            for name in ("payload", "output", "metrics", "lr"):
                if getattr(logged, name) is not None:
                    setattr(logged, name, summary(getattr(logged, name)))
            logged.engine, logged.event = ascii(logged.engine)[1:-1], ascii(logged.event)[1:-1]
            writer.add(logged)

    def _cannot_write(self, error: OSError) -> None:
        if self._on_error == "raise" or isinstance(error, PulsetrainError):
            with writing("EventRecorder", self.folder):
                raise error
        if not self._reported:
            self._reported = True
            get_logger("handlers").warning(
                "the event log cannot be written; the run continues, and the events are kept in memory for now",
                folder=str(self.folder),
                error=str(error),
            )
