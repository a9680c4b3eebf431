"""What a recorder of an iteration's three events costs at the least: receivers that do ever more of its work.

None of them checks a value, keeps an order of events or seals anything.
"""

from __future__ import annotations

import mmap
import tempfile
import zlib
from typing import Any

from pulsetrain.engine import FIRST, Engine, Events, Phase
from pulsetrain.engine.events.names import Event
from pulsetrain.engine.recording import LoggedEvent
from pulsetrain.handlers.metric_values.event_values import encode_plain

__all__ = ["LineForEach", "Nothing", "OneLine", "Values"]


class Nothing:
    """Receives the events."""

    def attach(self, engine: Engine) -> None:
        """Subscribe to the events that a recorder writes in an iteration."""
        for event in (Events.ITERATION_STARTED, Events.OPTIMIZER_STEP_COMPLETED):
            engine.bus.subscribe(event, self.receive, phase=Phase.COMPUTE, order=FIRST)
        engine.bus.subscribe(Events.ITERATION_COMPLETED, self.completed, phase=Phase.COMPUTE, order=FIRST)

    def receive(self, engine: Engine, event: Event) -> None:
        """An event before the iteration's end."""

    def completed(self, engine: Any, event: Event) -> None:
        """The end of the iteration."""


class Values(Nothing):
    """Also reads the loss and the learning rates."""

    values: tuple[list[float], Any]

    def completed(self, engine: Any, event: Event) -> None:
        self.values = [value.item() for value in engine.state.output.metrics.values()], engine.learning_rates


class _Mapped(Nothing):
    """Copies bytes into a mapped file, which begins again when it is full."""

    SIZE = 1 << 18  # bytes

    def __init__(self) -> None:
        with tempfile.TemporaryFile() as file:
            file.write(b"\n" * self.SIZE)
            file.flush()
            self.mapped = mmap.mmap(file.fileno(), self.SIZE)
        self.end = 0

    def put(self, content: bytes) -> None:
        """Append."""
        end = self.end + len(content)
        if end > self.SIZE:
            self.end, end = 0, len(content)
        self.mapped[self.end : end] = content
        self.end = end


class OneLine(_Mapped):
    """Writes one line an iteration: each event adds its part, made from a template, before its receivers return."""

    sum = 1

    def receive(self, engine: Engine, event: Event) -> None:
        self.add(b'{"seq":%d,"t":%d' % (event.seq, event.time_ns))

    def completed(self, engine: Any, event: Event) -> None:
        (name, loss), *_ = engine.state.output.metrics.items()
        rates = ",".join(map(repr, engine.learning_rates))
        values = name.encode(), repr(loss.item()).encode(), rates.encode()
        self.add(b',"seq":%d,"t":%d,"output":{"%b":%b},"lr":[%b]' % (event.seq, event.time_ns, *values))
        self.put(b',"c":%d}\n' % self.sum)
        self.sum = 1

    def add(self, part: bytes) -> None:
        """To the line and to its checksum."""
        self.sum = zlib.adler32(part, self.sum)
        self.put(part)


class LineForEach(_Mapped):
    """Writes a line with a checksum for each event, as a recorder does."""

    ord = 0

    def receive(self, engine: Engine, event: Event) -> None:
        self.write(event, None, None)

    def completed(self, engine: Any, event: Event) -> None:
        self.write(event, engine.state.output.metrics, engine.learning_rates)

    def write(self, event: Event, output: Any, rates: Any) -> None:
        """The line of an event with its payload."""
        self.ord = ord = self.ord + 1
        line = encode_plain(
            LoggedEvent(
                ord, event.engine, event.type, event.epoch, event.iteration, event.payload, output, None, rates,
                seq=event.seq, t=event.time_ns,
            )
        )  # fmt: skip
        self.put(b'%b,"c":%d}\n' % (line[:-1], zlib.adler32(line)))
