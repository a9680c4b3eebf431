"""What the log of a run says of it: how far it is, how it ended, its best metrics; decodes only the lines that do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache, lru_cache, partial
from itertools import pairwise

import msgspec

from pulsetrain.engine.metric_words import Mode, mode_of
from pulsetrain.engine.recording.ending import ENDS, Ending, ending_of
from pulsetrain.engine.recording.log.non_finite import parse_non_finite
from pulsetrain.engine.recording.log.reader import EventLog
from pulsetrain.engine.recording.log.records import Json, LoggedEvent, decode
from pulsetrain.runs.progress import BEGINNINGS, EPOCHS, Progress, bounds_of, completed_epochs_of, progress_of

__all__ = ["LogSummary", "longest_gap"]

_JUDGED = frozenset({"validation_completed", "rollout_completed"})
_REPORTED = frozenset({*_JUDGED, "metrics_logged", "policy_updated"})
_LAST, _RECENT = 16, 200  # newest events, of a run that has ended and of another one


class LogSummary:
    """What the log of the main rank says.

    Args:
        log: the log; None if there is none that can be read.
        modes: which values of a metric are better, as the run has decided.
    """

    def __init__(self, log: EventLog | None, modes: Mapping[str, Mode]) -> None:
        self.epoch: int = 0
        self.iteration: int = 0
        self.updated: float | None = None
        self.gap: float = 0.0  # seconds, the longest between two recent events
        self.last: dict[str, float] = {}
        self.best: dict[str, float] = {}
        self.ending: Ending | None = None
        self._log = log
        self._mode_of = cache(partial(mode_of, modes=modes))  # it is asked for each value
        if log is not None:
            self._lines = lru_cache(maxsize=1)(log.lines)  # of a block; many logs have a single one
            self._main, self._is_continued = log.main_engine, bool(log.superseded)
            parts = [header.engines.get(self._main) for header in log.headers]
            self._types = [frozenset(part.events if part is not None else ()) for part in parts]  # of each block
            self._read(log)

    def _read(self, log: EventLog) -> None:
        recent = self._newest(log, _LAST)
        newest = next((event for event in reversed(recent) if event.engine == self._main), None) or log.last(self._main)
        if newest is not None:
            self.epoch, self.iteration = newest.epoch, newest.iteration
        self.ending = self._ended()
        if self.ending is None:
            recent = self._newest(log, _RECENT)
            self.gap = longest_gap(recent, self._main)
        last = recent[-1] if recent else log.last()  # its last block may be damaged
        self.updated = None if last is None else last.t / 1e9
        for event in self._reported(log):
            self._note(event)

    def _ended(self) -> Ending | None:
        """How the run ended; None if it has not, or has been continued."""
        begun = next(self._backwards(BEGINNINGS), None)
        ended = None
        for event in self._backwards(ENDS):
            if event.iteration < self.iteration or (begun is not None and event.seq < begun.seq):
                break
            ended = event
            if event.event != "completed":  # which also follows other ends, after any number of events
                break
        return None if ended is None else ending_of(ended)

    def progress(self, settings: Json) -> Progress:
        """How far the run is.

        Args:
            settings: those in run.json.
        """
        bounds = next(filter(None, map(bounds_of, self._backwards(BEGINNINGS))), {})
        completed = None if bounds.get("total_iterations") else next(self._backwards(EPOCHS), None)
        epochs = None if completed is None else completed_epochs_of(completed)
        return progress_of(self.epoch, self.iteration, epochs, bounds, settings)

    def _backwards(self, names: frozenset[str]) -> Iterator[LoggedEvent]:
        """The main engine's events of these types, the newest first; superseded ones are left out."""
        log = self._log
        if log is None:
            return
        yield from reversed(self._counting(log, log.tail, names))
        for number in reversed(range(len(self._types))):
            here = names & self._types[number]
            lines = self._lines(number) if here else None
            for line in _backwards(lines or b"", here):  # one by one: the first is often enough
                yield from self._counting(log, _decoded(line), names)

    def _newest(self, log: EventLog, count: int) -> list[LoggedEvent]:
        """The newest events: those that are not sealed yet, and those of the last block."""
        found, block = log.tail, len(self._types) - 1
        if len(found) < count and block >= 0:
            found = [*log.block(block, count - len(found), self._lines(block)), *found]
        return found[-count:]

    def _reported(self, log: EventLog) -> Iterator[LoggedEvent]:
        """The main engine's events with metrics, in order: of each block, only their lines are decoded."""
        for number, types in enumerate(self._types):
            here = _REPORTED & types
            lines = self._lines(number) if here else None
            if lines is not None:
                yield from self._counting(log, _decoded(_lines_of(lines, here)), _REPORTED)
        yield from self._counting(log, log.tail, _REPORTED)

    def _counting(self, log: EventLog, events: Iterable[LoggedEvent], names: frozenset[str]) -> list[LoggedEvent]:
        """The main engine's events of these types, without those that a resumed run has computed again."""
        found = [each for each in events if each.event in names and each.engine == self._main]
        if self._is_continued:
            found = [each for each in found if each.ord < 0 or not log.is_superseded(each.seq)]
        return found

    def _note(self, event: LoggedEvent) -> None:
        metrics = event.payload.get("metrics") if isinstance(event.payload, dict) else None
        is_judged = event.event in _JUDGED
        for name, value in metrics.items() if isinstance(metrics, dict) else ():
            number = value if type(value) is float else _number(value)
            if number is None:
                continue
            self.last[name] = number
            mode = self._mode_of(name) if is_judged else None
            if mode is not None and number == number:
                best = self.best.get(name)
                if best is None or (number < best if mode == "min" else number > best):
                    self.best[name] = number


def _number(value: Json) -> float | None:
    """A metric's value; None if it is not a number."""
    found = parse_non_finite(value)
    if not isinstance(found, int | float) or isinstance(found, bool):
        return None
    try:
        return float(found)
    except OverflowError:  # an integer of more than 308 digits
        return None


def longest_gap(events: Iterable[LoggedEvent], engine: str) -> float:
    """Seconds, the longest between two events after the engine's newest start: before it, no process may have run."""
    times: list[float] = []
    for event in events:
        if event.event == "started" and event.engine == engine:
            times.clear()
        times.append(event.t / 1e9)
    return max((b - a for a, b in pairwise(times)), default=0.0)


def _mark(name: str) -> bytes:
    """What the lines of events of this type hold, and perhaps, as a text, those of a few others."""
    return f'"event":"{name}"'.encode()


def _lines_of(lines: bytes, names: Iterable[str]) -> bytes:
    """The lines that hold a mark of these types, in order."""
    places: set[tuple[int, int]] = set()
    for mark in map(_mark, names):
        at = lines.find(mark)
        while at >= 0:
            start, end = lines.rfind(b"\n", 0, at) + 1, lines.find(b"\n", at)
            places.add((start, end))
            at = lines.find(mark, end)
    return b"\n".join([lines[start:end] for start, end in sorted(places)])


def _backwards(lines: bytes, names: Iterable[str]) -> Iterator[bytes]:
    """The same lines, the last one first; those before it are not looked for until they are needed."""
    places = {mark: lines.rfind(mark) for mark in map(_mark, names)}
    while (at := max(places.values(), default=-1)) >= 0:
        start = lines.rfind(b"\n", 0, at) + 1
        yield lines[start : lines.find(b"\n", at)]
        places = {mark: lines.rfind(mark, 0, start) if each >= start else each for mark, each in places.items()}


def _decoded(lines: bytes) -> list[LoggedEvent]:
    try:
        return decode(lines)
    except msgspec.DecodeError:  # although the block's checksum is right
        return []
