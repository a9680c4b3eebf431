"""Writes every event of a bus to the run folder, one JSON object a line."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import msgspec

from engine.bus import EventBus
from engine.errors import ConfigurationError
from engine.events import Event, Events, event_key
from engine.logs import get_logger
from engine.loop import Engine
from engine.subscription import OnError, Phase
from handlers.attachment import Attachment
from handlers.event_values import EventValues
from handlers.readings import learning_rates, scalars
from handlers.resume_check import ResumeCheck
from handlers.run_folder import make_folder

__all__ = ["EventRecorder"]

BATCH = 100  # events between two copies from the device
FETCHING = (Events.GET_BATCH_STARTED, Events.GET_BATCH_COMPLETED)
FREQUENT = (Events.ITERATION_STARTED, Events.GRADIENTS_READY, Events.OPTIMIZER_STEP_COMPLETED, *FETCHING)
MEASURED = (Events.EPOCH_COMPLETED, Events.VALIDATION_COMPLETED)  # their receivers compute metrics
FINAL = (Events.TERMINATE, Events.COMPLETED, Events.EXCEPTION_RAISED, Events.INTERRUPT)
_MEASURED_TYPES = tuple(event.value for event in MEASURED)


class Record(msgspec.Struct, omit_defaults=True):
    """One line; what an event does not have is left out."""

    seq: int
    t: int  # host wall clock, nanoseconds since 1970
    engine: str
    event: str
    epoch: int
    iteration: int
    payload: Any = None
    output: Any = None  # ITERATION_COMPLETED: the scalars of the step's output
    metrics: Any = None  # EPOCH_COMPLETED and VALIDATION_COMPLETED: state.metrics after every receiver
    lr: Any = None  # ITERATION_COMPLETED: the rates of the engine's optimizer then, so those of its next update


class _Place(msgspec.Struct, frozen=True):
    """What tells a record from every other one."""

    seq: int
    t: int


class EventRecorder:
    """Appends the events of every engine on the bus to FOLDER/events/events.jsonl, in the bus's order.

    Scalars stay on their device and are copied to the host for 100 events at a time and at the end of each validation,
    epoch and run: a process that is killed loses what came after. Non-finite floats are the strings "NaN", "Infinity",
    "-Infinity"; what cannot be written is summarised as {"__type__": ...}.

    Engines that join the bus later are recorded, too. Custom events registered later are recorded from the next
    STARTED or EPOCH_STARTED on, not before. GRADIENTS_READY is heard, so the gradients' norm is computed.

    A run that goes on from a checkpoint computes again what the log holds past it: `resume_check` compares both, floats
    by their bits, and the agreement or the first difference is logged.

    Args:
        folder: the run folder; a log that is there already is continued.
        include_batches: record GET_BATCH_STARTED and GET_BATCH_COMPLETED as well.
        every: record only each n-th iteration's and update's own events; all others are recorded in any case.
        on_error: "raise" ends the run when the log cannot be written, "warn" goes on.

    Raises:
        ConfigurationError: `every` is no positive whole number.
    """

    def __init__(
        self,
        folder: str | Path,
        include_batches: bool = False,
        every: int | None = None,
        *,
        on_error: OnError = "raise",
    ) -> None:
        if every is not None and (not isinstance(every, int) or isinstance(every, bool) or every < 1):
            raise ConfigurationError(f"EventRecorder(every={every!r}): needs a whole number of at least 1")
        self.path = Path(folder) / "events" / "events.jsonl"
        self.include_batches = include_batches
        self.every = every
        self._on_error = on_error
        self._known: set[str] = set()  # keys of the events subscribed to
        self._lines: list[Record | bytes] = []  # in the bus's order, not yet written
        self._open: dict[int, tuple[Record, Engine]] = {}  # by seq: their receivers are still running
        self._unwritten: list[str] = []  # when the checkpoint was made that is being loaded
        self._values = EventValues()
        self._fresh = 0  # events since the last flush
        self._encoder = msgspec.json.Encoder()
        self._attachment = Attachment("EventRecorder")
        self.resume_check: ResumeCheck | None = None  # of the checkpoint that the run goes on from

    def attach(self, engine_or_bus: Engine | EventBus) -> Self:
        """Record every engine of the bus; an engine stands for its bus.

        Raises:
            RunFolderError: the folder cannot be written.
        """
        bus = engine_or_bus if isinstance(engine_or_bus, EventBus) else getattr(engine_or_bus, "bus", engine_or_bus)
        with self._attachment.to(bus):
            make_folder("EventRecorder", self.path.parent)
            self._end_cut_line()
            for event in Events:
                if event not in FETCHING or self.include_batches:
                    self._subscribe(event)
                self._known.add(event_key(event))
            self._adopt_custom_events()
        return self

    def detach(self) -> None:
        self._attachment.cancel()
        self._known.clear()
        self._open.clear()
        self.flush()

    def flush(self) -> None:
        """Copy what is on the device to the host, and write every event whose turn has come."""
        self._fresh = 0
        self._values.settle()
        encode = self._encoder.encode
        self._lines = [
            line if isinstance(line, bytes) or line.seq in self._open else encode(line) + b"\n" for line in self._lines
        ]
        # an open event keeps its place: what came behind it waits, encoded
        end = next((i for i, line in enumerate(self._lines) if not isinstance(line, bytes)), len(self._lines))
        if end:
            written: list[Any] = self._lines[:end]
            with self.path.open("ab") as file:  # opened each time: there is nothing to close when a run ends badly
                file.write(b"".join(written))
            del self._lines[:end]
            if self.resume_check is not None:
                self._compare(self.resume_check, written)

    def state_dict(self) -> dict[str, Any]:
        """What cannot be in the log yet: the event in which the checkpoint is made, and those behind it.

        Whatever came before is written first, so that the log of a process killed later has all up to the checkpoint.
        """
        self.flush()
        lines: list[Any] = []
        for line in self._lines:
            if isinstance(line, Record):
                record, engine = msgspec.structs.replace(line), self._open[line.seq][1]
                self._put_metrics(record, engine)
                lines.append(record)
            else:
                lines.append(line)
        self._values.settle()
        encode = self._encoder.encode
        return {"unwritten": [(line if isinstance(line, bytes) else encode(line) + b"\n").decode() for line in lines]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """CHECKPOINT_LOADED then completes the log."""
        self._unwritten = list(state["unwritten"])

    def _subscribe(self, event: Any) -> None:
        def hear(event: Any, handler: Any, phase: Phase, position: float) -> None:
            self._attachment.hear(event, handler, phase=phase, on_error=self._on_error, position=position)

        first = self._on_event
        if event in MEASURED or event in FINAL:
            first = self._on_exception if event is Events.EXCEPTION_RAISED else self._on_opened
            hear(event, self._on_closed, Phase.PERSIST, math.inf)
        elif event is Events.ITERATION_COMPLETED:
            first = self._on_iteration
        elif event is Events.CHECKPOINT_LOADED:
            first = self._on_loaded
        sampled = self.every is not None and (event in FREQUENT or event is Events.ITERATION_COMPLETED)
        # before every other receiver: the events that those fire come behind this one
        hear(event(every=self.every) if sampled else event, first, Phase.COMPUTE, -math.inf)
        if event is Events.STARTED or event is Events.EPOCH_STARTED:
            hear(event, self._adopt_custom_events, Phase.COMPUTE, -math.inf)

    def _adopt_custom_events(self) -> None:
        bus = self._attachment.bus
        for engine in bus.engines if bus is not None else ():
            for event in engine.registered_events:
                key = event_key(event)
                if key not in self._known:
                    self._known.add(key)
                    self._subscribe(event)

    def _on_event(self, engine: Engine, event: Event) -> None:
        self._add(self._record(event))

    def _on_iteration(self, engine: Engine, event: Event) -> None:
        record = self._record(event)
        output, rates = scalars(engine.state.output), learning_rates(engine)
        if output:
            self._values.put_scalars(record, "output", output)
        if rates:
            self._values.put(record, "lr", rates)
        self._add(record)

    def _on_loaded(self, engine: Engine, event: Event) -> None:
        self.flush()
        self._write_unwritten()
        self.resume_check = ResumeCheck.of_log(self.path, Path(event.payload.path).name)
        self._add(self._record(event))

    def _compare(self, check: ResumeCheck, lines: list[bytes]) -> None:
        """Say it once: where the first difference is, or that everything the log held has come again."""
        if check.difference is not None or not check.waiting:
            return
        for line in lines:
            check.see(line)
        if check.difference is not None:
            get_logger("handlers").warning(
                "resumed, but what is computed again is not what the log holds: the runs differ from here on",
                first=check.difference,
                agreed_before=check.agreed,
            )
        elif not check.waiting:
            get_logger("handlers").info(
                "resumed exactly: what the log held past the checkpoint was computed again, to the bit",
                events=check.agreed,
            )

    def _on_opened(self, engine: Engine, event: Event) -> None:
        record = self._record(event)
        self._open[event.seq] = record, engine
        self._add(record)

    def _on_closed(self, engine: Engine, event: Event) -> None:
        opened = self._open.pop(event.seq, None)
        if opened is not None:
            self._put_metrics(*opened)
        self.flush()

    def _put_metrics(self, record: Record, engine: Engine) -> None:
        if engine.state.metrics and record.event in _MEASURED_TYPES:
            self._values.put(record, "metrics", engine.state.metrics)

    def _on_exception(self, engine: Engine, event: Event) -> None:
        # what this engine was firing is over; its last receivers were never reached
        for seq in [seq for seq, (_, opener) in self._open.items() if opener is engine]:
            del self._open[seq]
        self._add(self._record(event))
        self.flush()

    def _record(self, event: Event) -> Record:
        record = Record(event.seq, event.time_ns, event.engine, event.type, event.epoch, event.iteration)
        if event.payload is not None:
            self._values.put(record, "payload", event.payload)
        return record

    def _add(self, record: Record) -> None:
        self._lines.append(record)
        self._fresh += 1
        if self._fresh >= BATCH:
            self.flush()

    def _write_unwritten(self) -> None:
        """Complete the log of a process that was killed in the very event in which its checkpoint was made."""
        lines, self._unwritten = self._unwritten, []
        if not lines or not self.path.exists() or not self.path.stat().st_size:
            return  # nothing is owed, or the run goes on in another folder
        with self.path.open("rb+") as file:
            there = {_place(line) for line in file}
            file.write("".join(line for line in lines if _place(line.encode()) not in there).encode())

    def _end_cut_line(self) -> None:
        """A process that was killed in mid-write leaves a line without an end: keep it apart from what follows."""
        if self.path.exists() and self.path.stat().st_size:
            with self.path.open("rb+") as file:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")


def _place(line: bytes) -> _Place | None:
    try:
        return msgspec.json.decode(line, type=_Place)
    except msgspec.DecodeError:
        return None  # cut by a crash
