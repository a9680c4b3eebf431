"""Exports a recorded run as a trace for ui.perfetto.dev and chrome://tracing: JSON in the Trace Event Format."""

from __future__ import annotations

import gzip
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from pulsetrain.engine.recording import EventLog, LoggedEvent
from pulsetrain.engine.recording.log.records import Json
from pulsetrain.export.scalars import FirstSources

__all__ = ["trace_events", "write_perfetto"]

# the slices: first event, last event, name, and depth; a slice's end also ends the deeper ones
_SPANS = (
    ("started", "completed", "run", 0),
    ("epoch_started", "epoch_completed", "epoch", 1),
    ("iteration_started", "iteration_completed", "iteration", 2),
    ("validation_started", "validation_completed", "validation", 3),
    ("get_batch_started", "get_batch_completed", "batch", 3),
    ("rollout_started", "rollout_completed", "rollout", 4),
)
_BEGINS = {first: (name, depth) for first, _, name, depth in _SPANS}
_ENDS = {last: (name, depth) for _, last, name, depth in _SPANS}
_RAISED = "exception_raised"  # ends all open slices
_SAVED = "checkpoint_saved"
_COUNTED = frozenset({"gradients_ready", "optimizer_step_completed"})  # shown only by counters
_COUNTERS = ("learning_rate", "grad_norm", "return", "reward", "kl")
_PROCESS = 1
_SAVES = 1000  # first thread id of the checkpoints' tracks: a save may overlap with training

_encode = msgspec.json.Encoder().encode

Span = tuple[str, int]  # name and depth
TraceEvent = dict[str, Json]


def write_perfetto(log: EventLog, path: Path, name: str) -> int:
    """Write the trace, compressed if the path ends with .gz. Memory does not grow with the run.

    Args:
        log: the log.
        path: the file, which is overwritten.
        name: name of the run.

    Returns:
        The number of exported events.

    Raises:
        OSError: the file cannot be written.
    """
    count = 0

    def counted() -> Iterator[LoggedEvent]:
        nonlocal count
        for event in log.read():
            count += 1
            yield event

    with gzip.open(path, "wb", compresslevel=4) if path.name.endswith(".gz") else path.open("wb") as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[')
        between = b"\n"
        for each in trace_events(counted(), log.main_engine, name):
            file.write(between + _encode(each))
            between = b",\n"
        file.write(b"\n]}\n")
    return count


def trace_events(events: Iterable[LoggedEvent], main: str, name: str) -> Iterator[TraceEvent]:
    """The trace's events: a track for each engine, and one for its checkpoints; times relative to the first event.

    >>> events = [LoggedEvent(engine="trainer", event="interrupt", t=10**18)]
    >>> [each["name"] for each in trace_events(events, "trainer", "runs/a")]
    ['process_name', 'thread_name', 'interrupt']

    Args:
        events: from `EventLog.read`.
        main: the engine of the training run.
        name: name of the run.
    """
    yield _named("process_name", 0, name)
    trace = _Trace(main)
    for event in events:
        yield from trace.of(event)
    yield from trace.rest()


class _Trace:
    """The open slices of each track, and the current time."""

    def __init__(self, main: str) -> None:
        self._main = main
        self._start = self._now = -1  # nanoseconds
        self._tracks: dict[str, int] = {}
        self._open: dict[str, list[Span]] = {}
        self._saved: dict[str, int] = {}  # time of each engine's last checkpoint
        self._counted: dict[str, float] = {}  # current value of each counter
        self._sources = FirstSources()

    def of(self, event: LoggedEvent) -> Iterator[TraceEvent]:
        if self._start < 0:
            self._start = event.t
        now = self._now = max(self._now, event.t)  # else a clock set back would end slices before they begin
        track = self._tracks.get(event.engine)
        if track is None:
            track = self._tracks[event.engine] = len(self._tracks) + 1
            self._open[event.engine] = []
            yield _named("thread_name", track, event.engine or "log")
        kind = event.event
        if kind in _BEGINS:
            span = _BEGINS[kind]
            yield from self._end(event.engine, span[1])
            self._open[event.engine].append(span)
            yield self._made("B", span[0], track, now, {"epoch": event.epoch, "iteration": event.iteration})
        elif kind in _ENDS and _ENDS[kind] in self._open[event.engine]:
            yield from self._end(event.engine, _ENDS[kind][1], _values(event))
        elif kind == _SAVED:
            yield from self._save(event, track)
        elif kind not in _COUNTED:
            yield {**self._made("i", kind, track, now, _values(event)), "s": "t"}
        if kind == _RAISED:
            yield from self._end(event.engine, 0)
        yield from self._counters(event)

    def rest(self) -> Iterator[TraceEvent]:
        """The ends of the slices that are still open."""
        for engine in self._open:
            yield from self._end(engine, 0)

    def _end(self, engine: str, depth: int, values: dict[str, Json] | None = None) -> Iterator[TraceEvent]:
        """End the open slices from this depth on; the values belong to the outermost."""
        spans = self._open[engine]
        while spans and spans[-1][1] >= depth:
            name, at = spans.pop()
            outermost = not spans or spans[-1][1] < depth
            yield self._made("E", name, self._tracks[engine], self._now, values if outermost and at == depth else None)

    def _save(self, event: LoggedEvent, track: int) -> Iterator[TraceEvent]:
        if event.engine not in self._saved:
            yield _named("thread_name", _SAVES + track, f"{event.engine}: checkpoints")
        values = _values(event)
        seconds = values.get("seconds")
        took = int(seconds * 1e9) if isinstance(seconds, (int, float)) else 0
        start = max(self._now - took, self._saved.get(event.engine, self._start))
        self._saved[event.engine] = self._now
        made = self._made("X", "checkpoint", _SAVES + track, start, values)
        yield {**made, "dur": (self._now - start) / 1e3}

    def _counters(self, event: LoggedEvent) -> Iterator[TraceEvent]:
        for name, value in self._sources.scalars(event, self._main).items():
            if not name.endswith("loss") and name.rpartition("/")[2] not in _COUNTERS:
                continue
            if value != self._counted.get(name) and math.isfinite(value):  # JSON has no NaN
                self._counted[name] = value
                yield self._made("C", name, 0, self._now, {"value": value})

    def _made(self, phase: str, name: str, track: int, t: int, values: dict[str, Json] | None) -> TraceEvent:
        made = {"ph": phase, "name": name, "pid": _PROCESS, "tid": track, "ts": (t - self._start) / 1e3}
        return made if values is None else {**made, "args": values}


def _values(event: LoggedEvent) -> dict[str, Json]:
    values: dict[str, Json] = {"seq": event.seq, "epoch": event.epoch, "iteration": event.iteration}
    for name in ("payload", "output", "metrics", "error"):
        value = getattr(event, name)
        if type(value) is dict and name != "error":
            values.update(value)
        elif value is not None:
            values[name] = value
    return values


def _named(kind: str, track: int, name: str) -> TraceEvent:
    return {"ph": "M", "name": kind, "pid": _PROCESS, "tid": track, "args": {"name": name}}
