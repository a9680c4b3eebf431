"""One process of a run, as its log describes it while it is written: where it stands, and how fast it is."""

from __future__ import annotations

from collections import deque
from itertools import islice
from pathlib import Path

from pulsetrain.engine.recording import LoggedEvent
from pulsetrain.engine.recording.log.follower import LogFollower
from pulsetrain.engine.recording.log.stall import read_stall
from pulsetrain.engine.recording.where import Position
from pulsetrain.report.mean_time import LOADING, STEP, MeanTime
from pulsetrain.report.run_curves import RATES, RunCurves
from pulsetrain.runs.progress import BEGINNINGS, EPOCHS, bounds_of, completed_epochs_of

__all__ = ["LiveRank"]

_RECENT = 50  # iterations over which times are averaged
_TIMED = 16 * _RECENT  # newest events from which they are read
_BLOCKS = 2  # of the history of other ranks than 0, whose curves are not shown
_MEMORY = (
    "memory/device_allocated_bytes",
    "memory/host_rss_bytes",
    "memory/host_peak_bytes",
)  # the first that is there
_BOUNDS = BEGINNINGS | EPOCHS
_NOTHING = LoggedEvent(event="no event")
_MARKED = frozenset(
    {"started", "completed", "terminate", "interrupt", "exception_raised", "handler_failed", "anomaly_detected"}
)  # of other ranks than 0


class LiveRank:
    """Follows the log of one rank.

    Args:
        folder: the folder of the logs.
        rank: the rank.
        label: what messages call the folder.
    """

    engine: str
    curves: RunCurves

    def __init__(self, folder: Path, rank: int, label: Path | None = None) -> None:
        self.rank = rank
        self.log: LogFollower = LogFollower(folder, rank, recent=_BLOCKS if rank else None, label=label)
        self.engine = ""  # the training engine; "" if there was no event
        self._forget()

    def _forget(self) -> None:
        self._generation = self.log.generation
        self.curves = RunCurves(self.engine)
        self.last: LoggedEvent | None = None  # the newest event, complete or not
        self.reached: LoggedEvent | None = None  # of the training engine
        self.started: tuple[int, int] | None = None  # iteration and time of its newest start
        self.measured: dict[str, float] = {}  # newest values of rates and of memory, by their names
        self.bounds: dict[str, int] = {}  # the length of the run, as it was reported last
        self.completed_epochs: int | None = None  # as the newest event of an epoch says
        self._step, self._loading = MeanTime(*STEP, recent=_RECENT), MeanTime(*LOADING, recent=_RECENT)
        self._times: deque[int] = deque(maxlen=_RECENT)  # of the ends of iterations, nanoseconds

    def read(self, seconds: float | None = None) -> list[LoggedEvent]:
        """Read what is new; returns the complete events.

        Raises:
            RecordingError: the log has a newer format, or cannot be read.
        """
        events = self.log.read(seconds)
        if any(event.engine == "trainer" for event in events) and self.engine not in ("", "trainer"):
            self.engine = "trainer"  # which is the training engine, although another one was the first
            self.log.restart()
            events = self.log.read(seconds)
        if self.log.generation != self._generation:
            self._forget()
        self.add(events)
        for event in self.log.unfinished:
            self._note(event)
        return events

    def add(self, events: list[LoggedEvent]) -> None:
        """Note complete events."""
        if not self.engine and events:
            names = [event.engine for event in events if event.engine]
            self.engine = "trainer" if "trainer" in names else next(iter(names), "")
            self.curves = RunCurves(self.engine)
        for event in events:  # of a log of 100,000 iterations 400,000, when it is opened
            name = event.event
            if (name in _MARKED) if self.rank else self.curves.reads(name):
                self.curves.add(event)
            if name == "metrics_logged":
                self._measure(event)
            elif name in _BOUNDS and event.engine == self.engine:
                self._note_bounds(event)
        for event in events[-_TIMED:]:
            if event.engine == self.engine:
                self._time(event)
        own = (event for event in reversed(events) if event.engine == self.engine)
        for event in (*events[-1:], *islice(own, 1)):
            self._note(event)

    def _note(self, event: LoggedEvent) -> None:
        if self.last is None or event.seq >= self.last.seq:
            self.last = event
        if event.engine == self.engine and (self.reached is None or event.seq >= self.reached.seq):
            self.reached = event

    def _time(self, event: LoggedEvent) -> None:
        self._step.add(event)
        self._loading.add(event)
        if event.event == "iteration_completed":
            self._times.append(event.t)
        elif event.event == "started":
            self._times.clear()

    def _note_bounds(self, event: LoggedEvent) -> None:
        if event.event == "started":
            self.started = event.iteration, event.t
        self.bounds = bounds_of(event) or self.bounds
        completed = completed_epochs_of(event)
        self.completed_epochs = self.completed_epochs if completed is None else completed

    def _measure(self, event: LoggedEvent) -> None:
        metrics = event.payload.get("metrics") if isinstance(event.payload, dict) else None
        for name, value in metrics.items() if isinstance(metrics, dict) else ():
            if (name in RATES or name in _MEMORY) and type(value) in (float, int):
                self.measured[name] = float(value)

    @property
    def iteration(self) -> int:
        """Of the training engine's newest event."""
        return 0 if self.reached is None else self.reached.iteration

    @property
    def epoch(self) -> int:
        """Of the training engine's newest event."""
        return 0 if self.reached is None else self.reached.epoch

    @property
    def iterations_per_second(self) -> float | None:
        """Over the newest iterations; None if there were fewer than two."""
        seconds = (self._times[-1] - self._times[0]) / 1e9 if self._times else 0.0
        return (len(self._times) - 1) / seconds if seconds > 0 else None

    @property
    def step_seconds(self) -> float | None:
        """From the start of an iteration to its end, over the newest ones."""
        return self._step.seconds

    @property
    def loading_seconds(self) -> float | None:
        """That an iteration waits for its batch, over the newest ones; None if that is not recorded."""
        return self._loading.seconds

    @property
    def memory(self) -> tuple[str, float] | None:
        """What is in use: "device" or "host", and bytes; None if no MemoryMonitor reports it."""
        name = next((name for name in _MEMORY if name in self.measured), None)
        return None if name is None else (name.removeprefix("memory/").partition("_")[0], self.measured[name])

    @property
    def position(self) -> Position:
        """Where the process stands."""
        last = self.last or _NOTHING
        stall = read_stall(self.log.folder, self.rank)
        stall = stall if stall is not None and stall.seq == last.seq else None
        return Position(self.rank, last, self.reached or _NOTHING, stall, self.log.ended)
