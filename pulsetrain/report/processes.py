"""The processes of a run that several have trained: where each one ended, how long it took, and whether they agree."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pulsetrain.engine.errors import RecordingError
from pulsetrain.engine.recording import EventLog, LoggedEvent
from pulsetrain.engine.recording.diff.ranks import describe_divergence, diff_ranks
from pulsetrain.engine.recording.diff.result import describe_event
from pulsetrain.engine.recording.ending import format_error
from pulsetrain.engine.recording.log.records import Json
from pulsetrain.engine.recording.log.run_file import read_run_file
from pulsetrain.engine.recording.where import Position, positions, stragglers
from pulsetrain.report.mean_time import LOADING, STEP, MeanTime

__all__ = ["Process", "Processes", "hosts_of", "read_processes"]

_STARTED, _RAISED, _DIVERGED = "started", "exception_raised", "ranks_diverged"
_READ = frozenset({_STARTED, _RAISED, _DIVERGED, *STEP, *LOADING})


@dataclass(frozen=True)
class Process:
    """What is known about one process."""

    rank: int
    host: str  # "" if run.json does not say
    position: Position | None  # None if its log is missing
    state: str  # that its run has ended, what it did after its last event, or that the others wait for it
    is_waited_for: bool
    step: float | None  # seconds from the start of an iteration to its end, on average
    loading: float | None  # seconds that an iteration waits for its batch, on average


@dataclass(frozen=True)
class Processes:
    """The processes of a run, by rank, and what they say together."""

    each: tuple[Process, ...]
    agreement: str  # of their logs, or the first difference
    agree: bool
    error: str  # the first one, with its rank; "" if there is none
    diverged: str  # the first value that differed during the run; "" if none was found
    damage: tuple[str, ...]  # of the logs of other ranks than 0, or that one is missing


def read_processes(run: str | os.PathLike[str]) -> Processes | None:
    """Read the logs of all processes; None if one has trained the run.

    Args:
        run: the run folder.

    Raises:
        RecordingError: a log has a newer format.
    """
    hosts = hosts_of(Path(run))
    found = {each.rank: each for each in positions(run)}
    ranks = sorted({*found, *range(len(hosts or ()))})
    if len(ranks) < 2:
        return None
    present = [each for each in found.values() if hosts is None or each.rank < len(hosts)]
    last = stragglers(present)
    waiting = len(last) < sum(not each.ended for each in present)
    processes, raised, diverged, damage = [], [], [], []
    for rank in ranks:
        step, loading = MeanTime(*STEP), MeanTime(*LOADING)
        if rank in found:
            log = EventLog(run, rank)
            error: LoggedEvent | None = None
            for event in log.read(engine=log.main_engine, event=_READ):
                step.add(event)
                loading.add(event)
                if event.event in (_STARTED, _RAISED):  # a run that was resumed has left its error
                    error = event if event.event == _RAISED else None
                elif event.event == _DIVERGED and not log.is_superseded(event.seq):
                    diverged.append(event)
            raised += [(error.t, rank, error)] if error is not None else []
            damage += [f"rank {rank}: {each}" for each in log.damage if rank]
        else:
            damage.append(f"rank {rank}: its log is missing")
        position = found.get(rank)
        host, state = hosts[rank] if hosts and rank < len(hosts) else "", _state(position)
        waited_for = waiting and position in last
        if waited_for:
            state += "; the others wait for it"
        elif position is not None and position not in present:
            state = "not in the last start of the run"
        processes.append(Process(rank, host, position, state, waited_for, step.seconds, loading.seconds))
    agreement, agree = _agreement(run)
    return Processes(tuple(processes), agreement, agree, _first_error(raised), _first(diverged), tuple(damage))


def hosts_of(run: Path) -> list[str] | None:
    """The hosts of the run's last start, by rank, [""] for one process; None if run.json does not say."""
    starts = read_run_file(run).get("starts")
    if not isinstance(starts, list) or not starts:
        return None
    processes: list[Json] = _mapping(starts[-1]).get("processes") or [{}]
    return [str(_mapping(each).get("host", "")) for each in processes]


def _state(position: Position | None) -> str:
    if position is None:
        return "its log is missing"
    if position.ended:
        return "its run has ended"
    return f"{position.activity}: {position.place}" if position.place else position.activity


def _agreement(run: str | os.PathLike[str]) -> tuple[str, bool]:
    try:
        found = diff_ranks(run)
    except RecordingError as error:
        return str(error).removeprefix(f"{run}: "), False
    return str(found).removeprefix(f"{run}: "), not found


def _first_error(raised: list[tuple[int, int, LoggedEvent]]) -> str:
    if not raised:
        return ""
    _, rank, event = min(raised, key=lambda each: each[:2])
    return f"rank {rank}, {describe_event(event)}: {format_error(_mapping(event.payload).get('error'))}"


def _first(diverged: list[LoggedEvent]) -> str:
    if not diverged:
        return ""
    return describe_divergence(_mapping(min(diverged, key=lambda event: event.t).payload))


def _mapping(value: Json) -> Mapping[str, Json]:
    return value if isinstance(value, Mapping) else {}
