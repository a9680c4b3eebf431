"""Compares the logs of the processes of one run, in what has to be the same in all of them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from pulsetrain.engine.errors import RecordingError
from pulsetrain.engine.recording.diff.fields import ABSENT, leaves
from pulsetrain.engine.recording.diff.result import describe_event, field_table, spans
from pulsetrain.engine.recording.log.reader import EventLog, logged_ranks
from pulsetrain.engine.recording.log.records import MEASURED, Json, LoggedEvent
from pulsetrain.engine.recording.log.thinning import FREQUENT, THINNED

__all__ = ["RanksDiff", "describe_divergence", "diff_ranks"]

_LOCAL_METRICS = ("memory/",)  # prefixes of the names of metrics that are each process's own


def _metrics(found: Json) -> Json:
    return {
        name: value
        for name, value in (found or {}).items()
        if name not in MEASURED and not name.startswith(_LOCAL_METRICS)
    }


def _in_payload(event: LoggedEvent) -> Json:
    return {"payload": {"metrics": _metrics((event.payload or {}).get("metrics"))}}


def _in_fingerprint(event: LoggedEvent) -> Json:
    found = event.payload or {}
    return {} if found.get("sharded") else {"payload": {name: found.get(name) for name in ("weights", "optimizer")}}


# what is replicated of an event, with the names of the fields; of the others, each process has its own, such as the
# loss of its share of a batch and the state of its random number generators
_REPLICATED: dict[str, Callable[[LoggedEvent], Json]] = {
    "epoch_started": lambda event: {},
    "iteration_started": lambda event: {},
    "gradients_ready": lambda event: {"payload": event.payload},
    "optimizer_step_completed": lambda event: {"payload": event.payload},
    "iteration_completed": lambda event: {"lr": event.lr},
    "metrics_logged": _in_payload,
    "validation_started": lambda event: {},
    "validation_completed": _in_payload,
    "epoch_completed": lambda event: {"metrics": _metrics(event.metrics)},
    "terminate_single_epoch": lambda event: {},
    "state_fingerprinted": _in_fingerprint,
}
_Key = tuple[int, str, str, int]  # iteration, engine, event, which one of that name in the iteration


@dataclass(frozen=True)
class RanksDiff:
    """What the processes of a run differ in; false if they agree, a report as text."""

    run: Path
    ranks: tuple[int, ...]
    agreed: int  # events that every process has and that agree before the first difference
    event: LoggedEvent | None = None  # the first one that differs, of rank 0 or else of the rank that has it
    rank: int | None = None  # the process that differs from rank 0
    fields: dict[str, tuple[Json, Json]] | None = None  # rank 0's and this one's; None if only one has the event
    damage: tuple[str, ...] = ()
    reported: str = ""  # what the run itself has found to differ

    def __bool__(self) -> bool:
        return self.event is not None or self.reported != ""

    def __str__(self) -> str:
        if self.event is None:
            lines = [f"{self.run}: ranks {spans(self.ranks)} agree in {self.agreed:,} events"]
        else:
            lines = [
                f"{self.run}: rank {self.rank} differs from rank 0 after {self.agreed:,} events that agree",
                f"first difference: {describe_event(self.event)}",
            ]
            if self.fields is None:
                lines[-1] += ", which one of the two does not have"
            else:
                lines += field_table(self.fields, "rank 0", f"rank {self.rank}")
        lines += [f"found during the run: {self.reported}"] if self.reported else []
        return "\n".join([*lines, *(f"damage: {each}" for each in self.damage)])

    def as_dict(self) -> dict[str, Json]:
        """The comparison as plain values for JSON."""
        sides = "rank 0", f"rank {self.rank}"
        fields = {
            name: {side: value for side, value in zip(sides, pair, strict=True) if value is not ABSENT}
            for name, pair in (self.fields or {}).items()
        }
        event = self.event
        found: dict[str, Json] = {
            "equal": not self, "run": str(self.run), "ranks": list(self.ranks), "agreed": self.agreed,
            "rank": self.rank, "damage": list(self.damage), "fields": fields, "reported": self.reported,
        }  # fmt: skip
        if event is not None:
            found["event"] = {
                "engine": event.engine, "event": event.event, "epoch": event.epoch, "iteration": event.iteration
            }  # fmt: skip
        return found


def diff_ranks(run: str | os.PathLike[str]) -> RanksDiff:
    """Find the first event in which a process of a run differs from rank 0.

    Compared are rates, gradients' norms, metrics, fingerprints of weights and of the optimizer's state, and which
    iterations, epochs and validations there were. Iterations that one of two logs does not reach are left out, since
    processes are killed at different moments and their number may change, and so is what one log was thinned of.

    Args:
        run: a run folder with the logs of several processes.

    What RANKS_DIVERGED has reported during the run counts, too.

    Raises:
        RecordingError: it has the log of one process alone.
    """
    ranks = logged_ranks(run)
    if ranks[0] != 0:
        raise RecordingError(f"{run}: has no log of rank 0, with which the others would be compared")
    main = EventLog(run)
    if len(ranks) < 2:
        raise RecordingError(
            f"{run}: has the log of rank {ranks[0]} alone; an EventRecorder among the handlers of a run of several "
            "processes writes one in each"
        )
    compared: list[RanksDiff] = []
    reported, damage = _diverged(main), list[str]()
    for rank in ranks[1:]:
        log = EventLog(run, rank)  # one after the other: each open log has its file mapped, and may be large
        compared.append(_compared(Path(main.run.name), tuple(ranks), main, log, rank))
        reported += _diverged(log)
        damage += [f"rank {rank}: {each}" for each in log.damage]
    damage = [f"rank 0: {each}" for each in main.damage] + damage
    found, least = [each for each in compared if each], min(each.agreed for each in compared)
    first = min(found, key=lambda each: each.agreed, default=RanksDiff(Path(main.run.name), tuple(ranks), least))
    payload = min(reported, key=lambda event: event.t).payload if reported else None
    return replace(
        first, damage=tuple(dict.fromkeys(damage)), reported="" if payload is None else describe_divergence(payload)
    )


def _diverged(log: EventLog) -> list[LoggedEvent]:
    return [event for event in log.read(event="ranks_diverged") if not log.is_superseded(event.seq)]


def describe_divergence(payload: Mapping[str, Json]) -> str:
    """The payload of RANKS_DIVERGED as text.

    >>> describe_divergence({"field": "0.weight", "ranks": [1], "values": ["a", "b"], "at_iteration": 42})
    '0.weight of rank 1, found after iteration 42'
    """
    ranks = spans(payload.get("ranks") or ())
    return f"{payload.get('field')} of rank {ranks}, found after iteration {payload.get('at_iteration')}"


def _compared(run: Path, ranks: tuple[int, ...], main: EventLog, other: EventLog, rank: int) -> RanksDiff:
    agreed = 0
    thinned = [next(log.read(event=THINNED), None) is not None for log in (main, other)]  # events of it are gone
    ours, theirs = _iterations(main), _iterations(other)
    here, there = next(ours, None), next(theirs, None)
    while here is not None:
        iteration, mine = here
        here = next(ours, None)
        while there is not None and there[0] < iteration:
            there = next(theirs, None)
        if there is None:
            break
        if there[0] > iteration:
            continue
        peer = there[1]
        there = next(theirs, None)
        is_last = here is None or there is None  # where a log ends, an iteration may be incomplete
        for key in dict.fromkeys([*mine, *peer]):
            x, y = mine.get(key), peer.get(key)
            if x is None or y is None:
                alone = x or y
                assert alone is not None
                if not is_last and not (alone.event in FREQUENT and thinned[0 if x is None else 1]):
                    return RanksDiff(run, ranks, agreed, alone, rank)
                continue
            fields = {} if x.open or y.open else _differing(x, y)
            if fields:
                return RanksDiff(run, ranks, agreed, x, rank, fields)
            agreed += 1
    return RanksDiff(run, ranks, agreed)


def _differing(x: LoggedEvent, y: LoggedEvent) -> dict[str, tuple[Json, Json]]:
    replicated = _REPLICATED[x.event]
    mine, theirs = replicated(x), replicated(y)
    return {
        path: (a, b) for name in mine for path, a, b in leaves(name, mine[name], theirs[name]) if repr(a) != repr(b)
    }


def _iterations(log: EventLog) -> Iterator[tuple[int, dict[_Key, LoggedEvent]]]:
    """The replicated events of each iteration of the training run, which have a number in it."""
    main = log.main_engine
    for iteration, events in groupby(_live(log, main), key=lambda each: each[0]):
        numbers: Counter[tuple[str, str]] = Counter()
        found: dict[_Key, LoggedEvent] = {}
        for _, event in events:
            name = event.engine, event.event
            found[iteration, *name, numbers[name]] = event
            numbers[name] += 1
        yield iteration, found


def _live(log: EventLog, main: str) -> Iterable[tuple[int, LoggedEvent]]:
    for event in log.read(engine=main):
        if event.ord >= 0 and event.event in _REPLICATED:
            yield event.iteration, event
