"""What a run folder says of its run: how far it is, how it ended, its best metrics, its settings and its origin."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import cache, lru_cache, partial
from itertools import chain, pairwise
from pathlib import Path

import msgspec

from pulsetrain.engine.errors import PulsetrainError, RunFolderError
from pulsetrain.engine.metric_words import Mode, mode_of
from pulsetrain.engine.recording.ending import ENDS, Ending, ending_of
from pulsetrain.engine.recording.log.files import NamedPath, log_files, open_file
from pulsetrain.engine.recording.log.non_finite import parse_non_finite
from pulsetrain.engine.recording.log.reader import EventLog, logged_ranks
from pulsetrain.engine.recording.log.records import Json, LoggedEvent, decode
from pulsetrain.engine.recording.log.run_file import modes_of, newer_format, read_run_file
from pulsetrain.handlers.run_files.owner_process import has_ended
from pulsetrain.runs.progress import BEGINNINGS, EPOCHS, Progress, bounds_of, completed_epochs_of, progress_of
from pulsetrain.runs.tags import read_tags

__all__ = [
    "ARCHIVE_SUFFIX",
    "PARTS",
    "RunSummary",
    "Status",
    "check_run",
    "is_run",
    "is_run_of",
    "status_of",
    "summarize",
]

ARCHIVE_SUFFIX = ".run.zip"
PARTS = ("run.json", "events")
"""What a run folder has one of, unless it has a configuration and one of _KEPT."""
_KEPT = frozenset({"checkpoints", "metrics.csv", "plots", "crash", "crash.txt"})
_JUDGED = frozenset({"validation_completed", "rollout_completed"})
_REPORTED = frozenset({*_JUDGED, "metrics_logged", "policy_updated"})
_PATIENCE = 20.0  # times the longest recent gap between two events, after which a run that is not ended is stalled
_LEAST_PATIENCE = 60.0  # seconds
_LAST, _RECENT = 16, 200  # newest events, of a run that has ended and of another one


class Status(StrEnum):
    """What is known of a run's end."""

    RUNNING = "running"
    COMPLETED = "completed"
    STOPPED = "stopped"  # before its bound: by early stopping, a signal, a handler
    FAILED = "failed"  # by an exception
    KILLED = "killed"  # its log was not closed, and its process is not there
    STALLED = "stalled"  # no event for much longer than between its other ones
    ARCHIVED = "archived"  # one file; the reason says how it ended

    @property
    def is_going(self) -> bool:
        """Whether a process trains the run."""
        return self in (Status.RUNNING, Status.STALLED)


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A run, as its folder describes it."""

    path_bytes: bytes  # of its folder or archive: a name may be any bytes
    id: str
    status: Status
    reason: str  # why it stopped or failed, or what could not be read; "" if there is nothing to say
    reached: Progress
    started: float | None  # seconds since 1970, of its first start
    updated: float | None  # of its newest event
    last: Mapping[str, float]  # the newest value of each metric
    best: Mapping[str, float]  # of each metric of validations and rollouts of which is known which values are better
    settings: Mapping[str, Json]  # "training.learning_rate" -> 0.001
    tags: tuple[str, ...]
    parent: Mapping[str, Json] | None  # "run", "id" and "iteration" of the run that it was forked from
    ranks: int

    @property
    def path(self) -> str:
        """The path of its folder or archive."""
        return os.fsdecode(self.path_bytes)

    @property
    def folder(self) -> Path:
        """The same as a Path."""
        return Path(self.path)

    @property
    def name(self) -> str:
        """The name of its folder."""
        return os.path.basename(self.path)

    @property
    def epoch(self) -> int:
        """The number of the epoch."""
        return self.reached.epoch

    @property
    def iteration(self) -> int:
        """The number of the iteration."""
        return self.reached.iteration

    @property
    def total_epochs(self) -> int | None:
        """Its length in epochs; None if it is not bounded by them."""
        return self.reached.total_epochs

    @property
    def total_iterations(self) -> int | None:
        """Its length in iterations; None if that is not known."""
        return self.reached.total_iterations

    @property
    def progress(self) -> float | None:
        """The share of its length that it has trained, from 0 to 1; None if its length is not known."""
        return self.reached.share


def is_run(folder: Path) -> bool:
    """Whether the folder has a file of a run; False if it cannot be read."""
    start = f"{folder}/"
    return any(os.path.exists(start + part) for part in PARTS) or is_run_of(
        part for part in ("config.yaml", *_KEPT) if os.path.exists(start + part)
    )


def check_run(folder: Path) -> None:
    """Refuse what is not a run folder.

    Raises:
        RunFolderError: it is not one, or it cannot be read.
    """
    if is_run(folder):
        return
    if not os.path.exists(folder):
        raise RunFolderError(f"{folder}: does not exist; name a run folder, as `pulsetrain runs` lists them")
    if os.path.isdir(folder) and not os.access(folder, os.R_OK | os.X_OK):
        raise RunFolderError(f"{folder}: cannot be read: permission denied; ask its owner for access")
    rule = f"one has {' or '.join(PARTS)}; `pulsetrain runs` lists those below a folder"
    raise RunFolderError(f"{folder}: is not a run folder; {rule}")


def is_run_of(names: Iterable[str]) -> bool:
    """The same, by what is in the folder.

    >>> is_run_of(["run.json"]), is_run_of(["config.yaml", "metrics.csv"])
    (True, True)
    >>> is_run_of(["config.yaml", "model.py", "runs"])  # a project, whose configuration trains runs
    False
    """
    found = frozenset(names)
    return not found.isdisjoint(PARTS) or ("config.yaml" in found and not found.isdisjoint(_KEPT))


def summarize(folder: Path, *, now: float | None = None) -> RunSummary:
    """Read what is known of a run: its description, and the end and the validations of its log.

    >>> import tempfile
    >>> from pulsetrain.engine.recording import LogWriter
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     writer = LogWriter(Path(folder, "events"))
    ...     for event in ("started", "terminate"):
    ...         payload = {"reason": "enough"} if event == "terminate" else None
    ...         writer.add(LoggedEvent(engine="trainer", event=event, iteration=3, payload=payload, seq=0, t=10**18))
    ...     found = summarize(Path(folder))
    >>> found.status.value, found.reason, found.iteration
    ('stopped', 'enough', 3)

    Args:
        folder: the run folder.
        now: seconds since 1970.

    Raises:
        RunFolderError: it is not a run folder, or cannot be read.
    """
    check_run(folder)
    described = read_run_file(folder)
    problem = ""
    log = None
    try:
        if any(path.exists() for path in log_files(folder / "events")):
            log = EventLog(NamedPath(folder, ""))  # the reason is listed beside the folder
    except (PulsetrainError, ValueError) as error:
        problem = str(error)
    except OSError as error:
        problem = f"the log cannot be read: {error.strerror or error}"
    seen = _Seen(log, modes_of(described)) if log is not None else _Seen(None, {})
    status, reason = status_of(folder, seen.ending, seen.updated, seen.gap, time.time() if now is None else now)
    reason = "" if problem else reason  # of a log that cannot be read, nothing is known
    if log is not None and log.damage:
        problem = f"damaged log: {log.damage[0]}; `pulsetrain events --check` lists what is lost"
    parent = described.get("parent")
    return RunSummary(
        path_bytes=os.fsencode(folder),
        id=str(described.get("id") or ""),
        status=status,
        reason="; ".join(filter(None, [reason, problem, newer_format(described)])),
        reached=seen.progress(described.get("settings")),
        started=_created(described),
        updated=seen.updated,
        last=seen.last,
        best=seen.best,
        settings=_settings(folder, described),
        tags=read_tags(folder),
        parent=_values(parent) if isinstance(parent, dict) and parent.get("run") else None,
        ranks=len(logged_ranks(folder)) if log is not None else 1,
    )


class _Seen:
    """What the log of the main rank says.

    Args:
        log: the log; None if there is none that can be read.
        modes: which values of a metric are better, as the run has decided.
    """

    def __init__(self, log: EventLog | None, modes: Mapping[str, Mode]) -> None:
        self.epoch = self.iteration = 0
        self.updated: float | None = None
        self.gap = 0.0  # seconds, the longest between two recent events
        self.last: dict[str, float] = {}
        self.best: dict[str, float] = {}
        self.ending: Ending | None = None
        self._log = log
        self._mode_of = cache(partial(mode_of, modes=modes))  # it is asked for each value
        if log is not None:
            self._lines = lru_cache(maxsize=1)(log.lines)  # of a block; many logs have a single one
            self._read(log)

    def _read(self, log: EventLog) -> None:
        main, recent = log.main_engine, self._newest(log, _LAST)
        newest = next((event for event in reversed(recent) if event.engine == main), None) or log.last(main)
        if newest is not None:
            self.epoch, self.iteration = newest.epoch, newest.iteration
        self.ending = self._ended()
        if self.ending is None:
            recent = self._newest(log, _RECENT)
            times = [event.t / 1e9 for event in recent]
            self.gap = max((b - a for a, b in pairwise(times)), default=0.0)
        last = recent[-1] if recent else log.last()  # its last block may be damaged
        self.updated = None if last is None else last.t / 1e9
        for event in self._reported(log):
            self._note(event, event.engine == main)

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
        main, headers = log.main_engine, log.headers
        yield from (each for each in reversed(log.tail) if each.event in names and _counts(log, each, main))
        for number in reversed(range(len(headers))):
            header = headers[number].engines.get(main)
            here = names.intersection(header.events) if header is not None else ()
            lines = self._lines(number) or b"" if here else b""
            for start, end in reversed(_places(lines, here)):  # one by one: the first is often enough
                yield from (each for each in _decoded(lines[start:end], names) if _counts(log, each, main))

    def _newest(self, log: EventLog, count: int) -> list[LoggedEvent]:
        """The newest events: those that are not sealed yet, and those of the last block."""
        found, block = log.tail, len(log.headers) - 1
        if len(found) < count and block >= 0:
            found = [*log.block(block, count - len(found), self._lines(block)), *found]
        return found[-count:]

    def _reported(self, log: EventLog) -> Iterator[LoggedEvent]:
        """The events with metrics, in order: of each block, only their lines are decoded."""
        for number, header in enumerate(log.headers):
            names = _REPORTED.intersection(chain.from_iterable(part.events for part in header.engines.values()))
            lines = self._lines(number) if names else None
            if lines is not None:
                found = b"\n".join(lines[start:end] for start, end in _places(lines, names))
                yield from (each for each in _decoded(found, names) if _counts(log, each))
        yield from (each for each in log.tail if each.event in _REPORTED and _counts(log, each))

    def _note(self, event: LoggedEvent, is_main: bool) -> None:
        payload = event.payload if isinstance(event.payload, dict) else {}
        metrics = payload.get("metrics")
        for name, value in metrics.items() if isinstance(metrics, dict) and is_main else ():
            number = value if type(value) is float else _number(value)
            if number is None:
                continue
            self.last[name] = number
            mode = self._mode_of(name) if event.event in _JUDGED else None
            if mode is not None and number == number:
                best = self.best.get(name)
                if best is None or (number < best if mode == "min" else number > best):
                    self.best[name] = number


def _number(value: Json) -> float | None:
    """A metric's value; None if it is not a number."""
    found = parse_non_finite(value)
    return float(found) if isinstance(found, int | float) and not isinstance(found, bool) else None


def _counts(log: EventLog, event: LoggedEvent, engine: str | None = None) -> bool:
    """Whether the event is of the engine, or of any, and no resumed run has computed it again."""
    return engine in (None, event.engine) and not (event.ord >= 0 and log.is_superseded(event.seq))


def _places(lines: bytes, names: Iterable[str]) -> list[tuple[int, int]]:
    """Where the lines of events of these types begin and end, in order, and perhaps those of a few others."""
    places: list[tuple[int, int]] = []
    for mark in (f'"event":"{name}"'.encode() for name in names):
        at = lines.find(mark)
        while at >= 0:
            start, end = lines.rfind(b"\n", 0, at) + 1, lines.find(b"\n", at)
            places.append((start, end))
            at = lines.find(mark, end)
    return sorted(set(places))


def _decoded(lines: bytes, names: frozenset[str]) -> list[LoggedEvent]:
    """The events of these types."""
    try:
        events = decode(lines)
    except msgspec.DecodeError:  # although the block's checksum is right
        return []
    return [each for each in events if each.event in names]  # the mark may be in a text of another event


def status_of(folder: Path, ending: Ending | None, updated: float | None, gap: float, now: float) -> tuple[Status, str]:
    """The status of a run, and the reason for it; "" if there is nothing to say.

    Args:
        folder: the run folder.
        ending: how it ended, as its log says; None if the log does not say that it has.
        updated: time of its newest event, seconds since 1970; None if it has none.
        gap: seconds, the longest between two of its recent events.
        now: seconds since 1970.
    """
    if ending is not None:
        return Status(ending.kind), ending.reason if ending.kind != "completed" else ""
    owner = _owner(folder)
    if owner is None or has_ended(owner):
        return Status.KILLED, "" if updated is not None else "no event was recorded"
    if updated is not None and now - updated > max(_LEAST_PATIENCE, _PATIENCE * gap):
        return Status.STALLED, f"no event for {now - updated:.0f} s; `pulsetrain where` shows what it waits for"
    return Status.RUNNING, ""


def _owner(folder: Path) -> bytes | None:
    """The file that a run in progress keeps in its folder."""
    try:
        with open_file(folder / ".owner") as file:
            return file.read()
    except OSError:
        return None


def _created(described: Mapping[str, Json]) -> float | None:
    with suppress(TypeError, ValueError, OverflowError):
        return datetime.fromisoformat(str(described.get("created"))).timestamp()
    return None


def _settings(folder: Path, described: Mapping[str, Json]) -> dict[str, Json]:
    """Those of config.yaml, or else the training's own from run.json, by dotted names."""
    import yaml  # here, as where all runs are known it is not needed

    from pulsetrain.configuration.yaml_text import load_yaml

    try:
        with open_file(folder / "config.yaml") as file:
            found = load_yaml(file.read().decode(), fast=True)
        if isinstance(found, dict):
            found.pop("run", None)  # its folder, or a pattern for it
            return _values(found)
    except (OSError, ValueError, TypeError, RecursionError, yaml.YAMLError):  # damaged
        pass
    settings = described.get("settings")
    return _values({"training": settings} if settings else {})


def _values(settings: Mapping[str, Json]) -> dict[str, Json]:
    from pulsetrain.report.facts import flat

    return {name: _plain(value) for name, value in flat(settings)}


def _plain(value: Json) -> Json:
    """A value that can be remembered: of another one, its text."""
    if isinstance(value, int) and value.bit_length() > 63:
        return str(value)
    return value if isinstance(value, str | int | float | None) else msgspec.json.encode(value).decode()
