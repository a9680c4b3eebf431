"""A run while it is trained: its curves, its newest events, its progress and its processes, kept up to date."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from pulsetrain.engine.recording import EventLog, LoggedEvent, logged_ranks
from pulsetrain.engine.recording.log.backwards import read_backwards
from pulsetrain.engine.recording.log.records import Json
from pulsetrain.engine.recording.log.run_file import read_run_file
from pulsetrain.engine.recording.where import Position, stragglers
from pulsetrain.report.curve import Curve
from pulsetrain.report.marks import Mark
from pulsetrain.report.processes import hosts_of
from pulsetrain.runs.live_rank import LiveRank
from pulsetrain.runs.log_summary import longest_gap
from pulsetrain.runs.progress import Progress, progress_of
from pulsetrain.runs.summary import Status, check_run, is_in_progress, is_run_of, status_of

__all__ = ["LiveEvent", "LiveRun", "Where"]

_NEWEST = 2000  # events that are kept
_MATCHES = 500  # of them that are kept for a condition
_GAPS = 200  # newest events whose distances decide whether a run is stalled
_PART = 0.05  # seconds in which a part of a long log is read, so that not all its events are in memory at once
_AWAIT = 2.0  # seconds after which a process without an event holds the others up

Where = Callable[[LoggedEvent], object]


class LiveEvent(NamedTuple):
    """An event, and the rank whose log it is in."""

    rank: int
    event: LoggedEvent


class LiveRun:
    """Follows a run that may not have begun yet.

    `update` reads what is new in the log of each process. Memory is bounded: curves keep 2,000 points, least and
    greatest values among them, and only the newest events are kept.

    >>> import tempfile
    >>> from pulsetrain.engine.recording import LogWriter
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = LiveRun(Path(folder))
    ...     writer = LogWriter(Path(folder, "events"))
    ...     for n in range(2):
    ...         output = {"loss": 0.5 - n}
    ...         event = LoggedEvent(n, "trainer", "iteration_completed", iteration=n + 1, output=output, seq=n)
    ...         writer.add(event)
    ...         print(run.update(), run.progress.iteration, run.curves["loss, each iteration"].last)
    True 1 (1, 0.5)
    True 2 (2, -0.5)

    Args:
        folder: the run folder; it may not exist yet. Messages call it what `str(folder)` is.
        where: of the events in `matches`, the only ones.
        clock: seconds since 1970.

    Raises:
        RunFolderError: something else is there, or it cannot be read.
    """

    folder: Path
    label: Path
    is_there: bool

    def __init__(
        self, folder: str | os.PathLike[str], where: Where | None = None, *, clock: Callable[[], float] = time.time
    ) -> None:
        self.folder, self.label = Path(folder), Path(str(folder))
        self._clock = clock
        self._where = where
        self.ranks: dict[int, LiveRank] = {}
        self.newest: deque[LiveEvent] = deque(maxlen=_NEWEST)
        self.matches: deque[LiveEvent] = deque(maxlen=_MATCHES)
        self._recent: deque[LoggedEvent] = deque(maxlen=_GAPS)  # of rank 0
        self._generations: dict[int, int] = {}  # of the logs, by rank
        self._damage: list[str] = []  # that the log shows without being read
        self._judged: tuple[int, bool] | None = None  # for which generation and state that was found
        self._status: tuple[Status, str] | None = None
        self._settings: tuple[tuple[int, int] | None, Json] | None = None  # of run.json, and when they were read
        self.is_there = False  # whether there is a log
        if os.path.exists(self.folder) and not _may_become_a_run(self.folder):
            check_run(self.folder)

    def update(self, seconds: float | None = None) -> bool:
        """Read what is new; returns whether anything was.

        Args:
            seconds: return after about this time, although there is more to read; `share_read` is then below 1.

        Raises:
            RecordingError: a log has a newer format, or cannot be read.
        """
        before = self.status
        self._find_ranks()
        deadline = None if seconds is None else time.monotonic() + seconds
        changed = self._read_until(deadline)
        self._judge()
        if self.status is Status.KILLED:  # or its process ended after the read, and wrote more before
            changed |= self._read_until(deadline)
            self._judge()
        if self.status is Status.KILLED and self.share_read == 1.0:  # nobody will complete what is open
            left = {rank: live.log.finish() for rank, live in self.ranks.items()}
            for rank, events in left.items():
                self.ranks[rank].add(events)
            self._keep(left)
        return changed or self.status is not before

    def _read_until(self, deadline: float | None) -> bool:
        """Read what is new, until about this time; returns whether anything was."""
        changed = False
        while True:
            changed |= self._read()
            if self.share_read == 1.0 or (deadline is not None and time.monotonic() > deadline):
                return changed

    def _read(self) -> bool:
        """Read a part of what is new; returns whether anything was."""
        found = {rank: live.read(_PART) for rank, live in self.ranks.items()}
        generations = {rank: live.log.generation for rank, live in self.ranks.items()}
        self._forget({rank for rank, number in generations.items() if number != self._generations.get(rank, 0)})
        self._generations = generations
        self._keep(found)
        return any(found.values())

    def _forget(self, ranks: set[int]) -> None:
        """Forget the events of ranks whose logs are read from their beginning again."""
        for events in (self.newest, self.matches) if ranks else ():
            left = [each for each in events if each.rank not in ranks]
            events.clear()
            events.extend(left)
        if 0 in ranks:
            self._recent.clear()

    def _find_ranks(self) -> None:
        events = self.folder / "events"
        self.is_there = events.is_dir()
        if not self.is_there:
            return
        for rank in logged_ranks(self.folder):
            if rank not in self.ranks:
                self.ranks[rank] = LiveRank(events, rank, self.label / events.name)
        self.ranks = dict(sorted(self.ranks.items()))
        self.is_there = any(live.log.exists for live in self.ranks.values())

    def _keep(self, found: dict[int, list[LoggedEvent]]) -> None:
        self.newest.extend(_together(found, _NEWEST))
        self._recent.extend(found.get(0, ()))
        if self._where is not None:
            where = self._where
            matching = {rank: [event for event in events if where(event)] for rank, events in found.items()}
            self.matches.extend(_together(matching, _MATCHES))

    def _judge(self) -> None:
        """Decide on the status, and look for damage whenever the run has ended or begun."""
        main = self.main
        if main is None or main.last is None:
            self._status = None
            self._look_for_damage((sum(self._generations.values()), False))
            return
        if self.share_read < 1.0:  # the end may say how it ended
            return
        gap = longest_gap(self._recent, main.curves.engine)
        has_process = is_in_progress(self.folder)
        ending, updated = main.curves.ending, main.last.t / 1e9
        self._status = status_of(self.label, ending, updated, gap, self._clock(), has_process=has_process)
        self._look_for_damage((sum(self._generations.values()), self._status[0].is_going))

    def _look_for_damage(self, state: tuple[int, bool]) -> None:
        if state != self._judged and self.is_there:
            self._judged = state
            self._damage = [
                f"{f'rank {rank}: ' if rank else ''}{each}"
                for rank, live in self.ranks.items()
                if live.log.exists
                for each in EventLog(self.folder, rank).damage
            ]

    @property
    def has_condition(self) -> bool:
        """Whether `matches` are selected by a condition."""
        return self._where is not None

    @property
    def main(self) -> LiveRank | None:
        """The process of rank 0, whose metrics are those of the run."""
        return next(iter(self.ranks.values()), None)

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.folder.resolve().name

    @property
    def share_read(self) -> float:
        """The part of its log that has been read, from 0 to 1."""
        return min((live.log.share for live in self.ranks.values()), default=1.0)

    @property
    def status(self) -> Status | None:
        """Whether it runs, or how it ended; None if there is no event, or before the whole log has been read."""
        return None if self._status is None else self._status[0]

    @property
    def reason(self) -> str:
        """Why it ended or stalled; "" if there is nothing to say."""
        return "" if self._status is None else self._status[1]

    @property
    def updated(self) -> float | None:
        """When its newest event began, seconds since 1970."""
        times = [live.last.t for live in self.ranks.values() if live.last is not None]
        return max(times) / 1e9 if times else None

    @property
    def damage(self) -> list[str]:
        """The parts of its logs that cannot be read, or are missing."""
        found = [str(each) for live in self.ranks.values() for each in live.log.damage]
        return list(dict.fromkeys([*self._damage, *found]))

    @property
    def curves(self) -> dict[str, Curve]:
        """The curves of rank 0 by their names: see `RunCurves`."""
        return {} if self.main is None else self.main.curves.shown()

    def marks(self, row: str) -> list[tuple[int, Mark]]:
        """What happened at an iteration, each with its rank, in order.

        Args:
            row: one of `pulsetrain.report.marks.ROWS`, such as "checkpoints" or "anomalies".
        """
        found = [(rank, mark) for rank, live in self.ranks.items() for mark in live.curves.marks[row]]
        return found if len(self.ranks) < 2 else sorted(found, key=lambda each: each[1].iteration)

    @property
    def progress(self) -> Progress:
        """How far it is."""
        main = self.main
        if main is None:
            return Progress()
        if self._settings is None or self._settings[0] != main.started or self._settings[1] is None:
            self._settings = main.started, read_run_file(self.folder).get("settings")
        return progress_of(main.epoch, main.iteration, main.completed_epochs, main.bounds, self._settings[1])

    @property
    def seconds_left(self) -> float | None:
        """How long it will take, at its mean speed since its start, validations included; None if that is not known."""
        main, total = self.main, self.progress.total_iterations
        if not total or main is None or main.started is None or self.status is not Status.RUNNING:
            return None
        done, seconds = main.iteration - main.started[0], (self.updated or 0.0) - main.started[1] / 1e9
        return (total - main.iteration) * seconds / done if done > 0 and seconds > 0 else None

    @property
    def positions(self) -> list[Position]:
        """Where each process of the run's last start stands."""
        hosts = hosts_of(self.folder)
        found = [live.position for live in self.ranks.values()]
        return [each for each in found if hosts is None or each.rank < len(hosts)]

    @property
    def stragglers(self) -> list[Position]:
        """The processes that the others have been waiting for; empty if they are together, or have ended."""
        if len(self.ranks) < 2 or self.status is None or not self.status.is_going:
            return []
        found = self.positions
        last = stragglers(found)
        is_late = all(self._clock() - each.event.t / 1e9 > _AWAIT for each in last)
        return last if is_late and len(last) < len([each for each in found if not each.ended]) else []

    def filter(self, where: Where | None, seconds: float = 1.0) -> None:
        """Change the condition of `matches`, and look for the newest matching events of the whole log.

        Args:
            where: the condition; None for no condition, and no matches.
            seconds: to look for them.
        """
        self._where = where
        self.matches.clear()
        if where is None:
            return
        known = [each for each in self.newest if where(each.event)]
        main = self.ranks.get(0)
        if len(known) < _MATCHES and main is not None and main.log.exists and main.last is not None:
            until, older = time.monotonic() + seconds, list[LiveEvent]()
            first = min((each.event.seq for each in self.newest if not each.rank), default=main.last.seq + 1)
            for block in read_backwards(EventLog(self.folder), first):
                older[:0] = [LiveEvent(0, event) for event in block if where(event)]
                if len(older) + len(known) >= _MATCHES or time.monotonic() > until:
                    break
            known = older + known
        self.matches.extend(known)


def _may_become_a_run(folder: Path) -> bool:
    """Whether it is a run folder, or one that a run has only begun to fill."""
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    return is_run_of(names) or all(name[0] == "." or name == "config.yaml" for name in names)


def _together(found: dict[int, list[LoggedEvent]], limit: int) -> list[LiveEvent]:
    """The newest events of all ranks, in the order of their times."""
    events = [LiveEvent(rank, event) for rank, of_it in found.items() for event in of_it[-limit:]]
    return events if len(found) < 2 else sorted(events, key=lambda each: each.event.t)
