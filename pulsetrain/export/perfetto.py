"""A recorded run as a trace that ui.perfetto.dev and chrome://tracing open: JSON in the Trace Event Format."""

from __future__ import annotations

import gzip
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, cast

import msgspec

from pulsetrain.engine.events.names import Events
from pulsetrain.engine.recording import EventLog, LoggedEvent
from pulsetrain.export.scalars import FirstHand

__all__ = ["trace_events", "write_perfetto"]

# what lasts: its first event, its last, its name, and how deep it lies: what lies deeper ends with it
_SPANS = (
    (Events.STARTED, Events.COMPLETED, "run", 0),
    (Events.EPOCH_STARTED, Events.EPOCH_COMPLETED, "epoch", 1),
    (Events.ITERATION_STARTED, Events.ITERATION_COMPLETED, "iteration", 2),
    (Events.VALIDATION_STARTED, Events.VALIDATION_COMPLETED, "validation", 3),
    (Events.GET_BATCH_STARTED, Events.GET_BATCH_COMPLETED, "batch", 3),
    (Events.ROLLOUT_STARTED, Events.ROLLOUT_COMPLETED, "rollout", 4),
)
_BEGINS = {first.value: (name, depth) for first, _, name, depth in _SPANS}
_ENDS = {last.value: (name, depth) for _, last, name, depth in _SPANS}
_BROKEN_OFF = frozenset({Events.EXCEPTION_RAISED.value})  # ends whatever lasts
_SAVED = Events.CHECKPOINT_SAVED.value
_COUNTED = frozenset({Events.GRADIENTS_READY.value, Events.OPTIMIZER_STEP_COMPLETED.value})  # told by counters alone
_COUNTERS = ("learning_rate", "grad_norm", "return", "reward", "kl")
_PROCESS = 1
_SAVES = 1000  # thread ids of the tracks of checkpoints, which may overlap with the training

_encode = msgspec.json.Encoder().encode

Span = tuple[str, int]


def write_perfetto(log: EventLog, path: Path, name: str) -> int:
    """Write the trace; compressed where the path ends with .gz. Memory does not grow with the run.

    Args:
        log: the log.
        path: the file, which is written over.
        name: the run's.

    Returns:
        How many events of the log it holds.

    Raises:
        OSError: the file cannot be written.
    """
    count = 0

    def counted() -> Iterator[LoggedEvent]:
        nonlocal count
        for event in log.read():
            count += 1
            yield event

    with _opened(path) as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[')
        between = b"\n"
        for each in trace_events(counted(), log.main_engine, name):
            file.write(between + _encode(each))
            between = b",\n"
        file.write(b"\n]}\n")
    return count


def trace_events(events: Iterable[LoggedEvent], main: str, name: str) -> Iterator[dict[str, Any]]:
    """What the trace holds, one by one: a track for each engine, and one for its checkpoints; times from the first on.

    Args:
        events: as `EventLog.read` gives them.
        main: the engine whose run it is.
        name: the run's.
    """
    yield _named("process_name", 0, name)
    trace = _Trace(main)
    for event in events:
        yield from trace.of(event)
    yield from trace.rest()


class _Trace:
    """Which slices last, on which track, and what time it is."""

    def __init__(self, main: str) -> None:
        self._main = main
        self._start = self._now = -1  # nanoseconds
        self._tracks: dict[str, int] = {}
        self._lasting: dict[str, list[Span]] = {}
        self._saved: dict[str, int] = {}  # when an engine's last checkpoint was there
        self._counted: dict[str, float] = {}  # what each counter shows
        self._first_hand = FirstHand()

    def of(self, event: LoggedEvent) -> Iterator[dict[str, Any]]:
        if self._start < 0:
            self._start = event.t
        now = self._now = max(self._now, event.t)  # a clock that was set back would end slices before they begin
        track = self._tracks.get(event.engine)
        if track is None:
            track = self._tracks[event.engine] = len(self._tracks) + 1
            self._lasting[event.engine] = []
            yield _named("thread_name", track, event.engine or "log")
        kind = event.event
        if kind in _BEGINS:
            span = _BEGINS[kind]
            yield from self._end(event.engine, span[1])
            self._lasting[event.engine].append(span)
            yield self._made("B", span[0], track, now, {"epoch": event.epoch, "iteration": event.iteration})
        elif kind in _ENDS and _ENDS[kind] in self._lasting[event.engine]:
            yield from self._end(event.engine, _ENDS[kind][1], _values(event))
        elif kind == _SAVED:
            yield from self._save(event, track)
        elif kind not in _COUNTED:
            yield {**self._made("i", kind, track, now, _values(event)), "s": "t"}
        if kind in _BROKEN_OFF:
            yield from self._end(event.engine, 0)
        yield from self._counters(event)

    def rest(self) -> Iterator[dict[str, Any]]:
        """The ends of what the log does not see the end of."""
        for engine in self._lasting:
            yield from self._end(engine, 0)

    def _end(self, engine: str, depth: int, values: dict[str, Any] | None = None) -> Iterator[dict[str, Any]]:
        """End what lasts from this depth on; the values are those of the outermost."""
        lasting = self._lasting[engine]
        while lasting and lasting[-1][1] >= depth:
            name, at = lasting.pop()
            outermost = not lasting or lasting[-1][1] < depth
            yield self._made("E", name, self._tracks[engine], self._now, values if outermost and at == depth else None)

    def _save(self, event: LoggedEvent, track: int) -> Iterator[dict[str, Any]]:
        if event.engine not in self._saved:
            yield _named("thread_name", _SAVES + track, f"{event.engine}: checkpoints")
        values = _values(event)
        seconds = values.get("seconds")
        took = int(seconds * 1e9) if isinstance(seconds, (int, float)) else 0
        start = max(self._now - took, self._saved.get(event.engine, self._start))
        self._saved[event.engine] = self._now
        made = self._made("X", "checkpoint", _SAVES + track, start, values)
        yield {**made, "dur": (self._now - start) / 1e3}

    def _counters(self, event: LoggedEvent) -> Iterator[dict[str, Any]]:
        for name, value in self._first_hand.of(event, self._main).items():
            if not name.endswith("loss") and name.rpartition("/")[2] not in _COUNTERS:
                continue
            if value != self._counted.get(name) and math.isfinite(value):  # JSON has no NaN
                self._counted[name] = value
                yield self._made("C", name, 0, self._now, {"value": value})

    def _made(self, phase: str, name: str, track: int, t: int, values: dict[str, Any] | None) -> dict[str, Any]:
        made = {"ph": phase, "name": name, "pid": _PROCESS, "tid": track, "ts": (t - self._start) / 1e3}
        return made if values is None else {**made, "args": values}


def _values(event: LoggedEvent) -> dict[str, Any]:
    values: dict[str, Any] = {"seq": event.seq, "epoch": event.epoch, "iteration": event.iteration}
    for name in ("payload", "output", "metrics", "error"):
        value = getattr(event, name)
        if type(value) is dict and name != "error":
            values.update(value)
        elif value is not None:
            values[name] = value
    return values


def _named(kind: str, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": _PROCESS, "tid": track, "args": {"name": name}}


def _opened(path: Path) -> IO[bytes]:
    if path.name.endswith(".gz"):
        return cast(IO[bytes], gzip.open(path, "wb", compresslevel=4))
    return path.open("wb")
