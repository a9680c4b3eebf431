"""What a run folder says of its run: how far it is, how it ended, its best metrics, its settings and its origin."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from pulsetrain.engine.errors import PulsetrainError, RunFolderError
from pulsetrain.engine.recording.ending import Ending
from pulsetrain.engine.recording.log.files import NamedPath, log_files, read_file
from pulsetrain.engine.recording.log.reader import EventLog, logged_ranks
from pulsetrain.engine.recording.log.records import Json
from pulsetrain.engine.recording.log.run_file import RUN_FILE, modes_of, newer_format, read_run_file
from pulsetrain.handlers.run_files.owner_process import has_ended
from pulsetrain.runs.log_summary import LogSummary
from pulsetrain.runs.progress import Progress
from pulsetrain.runs.tags import read_tags

__all__ = [
    "ARCHIVE_SUFFIX",
    "PARTS",
    "RunSummary",
    "Status",
    "check_run",
    "is_in_progress",
    "is_run",
    "is_run_of",
    "names_of_settings",
    "status_of",
    "summarize",
]

ARCHIVE_SUFFIX = ".run.zip"
PARTS = ("run.json", "events")
"""What a run folder has one of, unless it has a configuration and one of _KEPT."""
_KEPT = frozenset({"checkpoints", "metrics.csv", "plots", "crash", "crash.txt"})
_PATIENCE = 20.0  # times the longest recent gap between two events, after which a run that is not ended is stalled
_LEAST_PATIENCE = 60.0  # seconds


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
    settings: Mapping[str, Json]  # that its config.yaml gives, such as "training.learning_rate" -> 0.001; see `setting`
    tags: tuple[str, ...]
    parent: Mapping[str, Json] | None  # "run", "id", "iteration" of the run it was forked from, and a list, "changed"
    ranks: int
    unread: bool = False  # whether a file could not be read, and may be readable the next time
    not_given: bytes = b""  # JSON, the training's settings that config.yaml does not give; the same in many runs

    @classmethod
    def unreadable(cls, path: str | Path, status: Status, reason: str) -> RunSummary:
        """That of a run of which nothing else is known."""
        rest: tuple[Any, ...] = (Progress(), None, None, {}, {}, {}, (), None, 1, True)
        return cls(os.fsencode(path), "", status, reason, *rest)

    @property
    def path(self) -> str:
        """The path of its folder or archive."""
        return os.fsdecode(self.path_bytes)

    @property
    def is_settled(self) -> bool:
        """Whether reading the same files again would give the same."""
        return not self.status.is_going and not self.unread

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

    def setting(self, name: str) -> Json:
        """The value of a setting by its dotted name; None if the run has no such setting.

        Of a setting of the training that config.yaml does not give, the default that it was trained with.
        """
        return self.settings[name] if name in self.settings else _decoded(self.not_given).get(name)

    @property
    def progress(self) -> float | None:
        """The share of its length that it has trained, from 0 to 1; None if its length is not known."""
        return self.reached.share


def names_of_settings(runs: Iterable[RunSummary]) -> dict[str, None]:
    """The dotted names of all settings of the runs: first those that configurations give."""
    names = dict.fromkeys(chain.from_iterable(run.settings for run in runs))
    for not_given in dict.fromkeys(run.not_given for run in runs):
        names |= dict.fromkeys(_decoded(not_given))
    return names


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


def summarize(folder: Path, *, now: float | None = None, named: Path | None = None) -> RunSummary:
    """Read what is known of a run: its description, and the end and the validations of its log.

    >>> import tempfile
    >>> from pulsetrain.engine.recording import LoggedEvent, LogWriter
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
        named: what commands call it, such as the archive that was unpacked into the folder; by default the folder.

    Raises:
        RunFolderError: it is not a run folder, or cannot be read.
    """
    check_run(folder)
    described = read_run_file(folder)
    problem = f"{RUN_FILE} cannot be read" if not described and os.path.exists(f"{folder}/{RUN_FILE}") else ""
    unread = bool(problem)
    has_process = is_in_progress(folder)
    log, seen, error, is_refused = _read_log(folder, described)
    if has_process and not (has_process := is_in_progress(folder)):  # it ended meanwhile, and wrote more before
        log, seen, error, is_refused = _read_log(folder, described)
    problem, unread = error or problem, unread or is_refused
    now = time.time() if now is None else now
    named = folder if named is None else named
    status, reason = status_of(named, seen.ending, seen.updated, seen.gap, now, has_process=has_process)
    reason = "" if problem and log is None else reason  # of a log that cannot be read, nothing is known
    if status is Status.KILLED and log is not None and described.get("parent") and described.get("starts") == []:
        reason = "forked, not trained yet"
    if log is not None and log.damage:
        command = shlex.join(["pulsetrain", "events", str(named), "--check"])
        problem = f"damaged log: {log.damage[0]}; `{command}` lists what is lost"
    parent = described.get("parent")
    given, not_given = _settings(folder, described)
    if given is None:
        problem, unread = problem or "config.yaml cannot be read", True
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
        settings=given or {},
        tags=read_tags(folder),
        parent=_parent(parent) if isinstance(parent, dict) and parent.get("run") else None,
        ranks=len(logged_ranks(folder)) if log is not None else 1,
        unread=unread,
        not_given=not_given,
    )


def _read_log(folder: Path, described: Mapping[str, Json]) -> tuple[EventLog | None, LogSummary, str, bool]:
    """The log of a run, what it says, why it cannot be read, and whether that is for want of permission."""
    log, problem, is_refused = None, "", False
    try:
        events = folder / "events"
        if any(path.exists() for path in log_files(events)):  # os.path.exists takes what may not be read for missing
            log = EventLog(NamedPath(events, "events"))  # the reason is listed beside the folder
    except (PulsetrainError, ValueError) as error:
        problem, is_refused = str(error), isinstance(error.__cause__, OSError)
    except OSError as error:
        problem, is_refused = f"the log cannot be read: {error.strerror or error}", True
    return log, LogSummary(log, modes_of(described) if log is not None else {}), problem, is_refused


def status_of(
    run: Path, ending: Ending | None, updated: float | None, gap: float, now: float, *, has_process: bool
) -> tuple[Status, str]:
    """The status of a run, and the reason for it; "" if there is nothing to say.

    Args:
        run: what commands call it.
        ending: how it ended, as its log says; None if the log does not say that it has.
        updated: time of its newest event, seconds since 1970; None if it has none.
        gap: seconds, the longest between two of its recent events.
        now: seconds since 1970.
        has_process: see `is_in_progress`.
    """
    if ending is not None:
        return Status(ending.kind), ending.reason if ending.kind != "completed" else ""
    if not has_process:
        return Status.KILLED, "" if updated is not None else "no event was recorded"
    if updated is not None and now - updated > max(_LEAST_PATIENCE, _PATIENCE * gap):
        command = shlex.join(["pulsetrain", "where", str(run)])
        return Status.STALLED, f"no event for {now - updated:.0f} s; `{command}` shows what it waits for"
    return Status.RUNNING, ""


def is_in_progress(folder: Path) -> bool:
    """Whether a process that trains into this run folder seems to be alive."""
    try:
        return not has_ended(read_file(folder / ".owner"))
    except OSError:
        return False


def _created(described: Mapping[str, Json]) -> float | None:
    with suppress(TypeError, ValueError, OverflowError):
        return datetime.fromisoformat(str(described.get("created"))).timestamp()
    return None


def _settings(folder: Path, described: Mapping[str, Json]) -> tuple[dict[str, Json] | None, bytes]:
    """The settings by dotted names, None if they cannot be read, and `RunSummary.not_given`.

    They are those of config.yaml, or else the training's own from run.json.
    """
    import yaml  # here, as where all runs are known it is not needed

    from pulsetrain.configuration.yaml_text import load_yaml

    settings = described.get("settings")
    try:
        found = load_yaml(read_file(folder / "config.yaml").decode(), fast=True)
        if isinstance(found, dict):
            found.pop("run", None)  # its folder, or a pattern for it
            given = found.get("training")
            return _values(found), _without(settings, given) if isinstance(settings, dict) else b""
    except (FileNotFoundError, ValueError, TypeError, RecursionError, yaml.YAMLError):  # none, or damaged
        pass
    except OSError:
        return None, b""
    return _values({"training": settings} if settings else {}), b""


def _without(settings: Mapping[str, Json], given: Json) -> bytes:
    """The settings whose names are not among the given ones, as JSON."""
    names = given if isinstance(given, dict) else {}
    rest = {name: value for name, value in settings.items() if name not in names}
    return msgspec.json.encode(rest) if rest else b""


@lru_cache(maxsize=1024)
def _decoded(not_given: bytes) -> Mapping[str, Json]:
    """The values of `RunSummary.not_given` by dotted names."""
    if not not_given:
        return {}
    try:
        return _values({"training": msgspec.json.decode(not_given)})
    except RecursionError:  # nested too deep
        return {}


def _values(settings: Mapping[str, Json]) -> dict[str, Json]:
    from pulsetrain.report.facts import flat

    return {name: _plain(value) for name, value in flat(settings)}


def _parent(described: Mapping[str, Json]) -> dict[str, Json]:
    return {name: [*map(_plain, each)] if isinstance(each, list) else _plain(each) for name, each in described.items()}


def _plain(value: Json) -> Json:
    """A value that can be remembered: of another one, its text."""
    if isinstance(value, int) and value.bit_length() > 63:
        return str(value)
    return value if isinstance(value, str | int | float | None) else msgspec.json.encode(value).decode()
