"""Proves that a recorded run is reproducible: runs it again for real, and compares every event as it comes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pulsetrain.engine.environment import environment_differences
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.recording import Divergence, EventLog, LoggedEvent
from pulsetrain.engine.recording.diff.fields import differing_fields
from pulsetrain.engine.recording.diff.result import describe_event, field_table
from pulsetrain.engine.recording.replay.source import Source
from pulsetrain.handlers.run_files.run_file import describe_run, read_run_file
from pulsetrain.reproduce.diagnosis import BATCH, STATE, Cause, Evidence, causes_of
from pulsetrain.reproduce.rerun import Again, Expected, first_checkpoint, nearest_checkpoint
from pulsetrain.trainer import Trainer

__all__ = ["Verification", "verify"]

_BEFORE_THE_ITERATION = frozenset({BATCH, "get_batch_started", "get_batch_completed"})  # that the batch is for
_ROWS = 16  # of a batch that are told


@dataclass(frozen=True)
class Verification:
    """What running again has shown; true where the whole stretch came again to the bit."""

    run: Path
    start: int  # iteration behind which it was run again; 0 for the beginning
    end: int  # the last iteration that was compared
    agreed: int  # events
    divergence: Divergence | None = None  # `a` was recorded, `b` came now
    missing: LoggedEvent | None = None  # recorded, and did not come before the run ended
    rows: Sequence[Any] | None = None  # indices of the batch where it differs, as far as the data tells them
    fingerprints: Mapping[str, bool] = field(
        default_factory=dict
    )  # part of the state -> whether it is the same behind it
    causes: tuple[Cause, ...] = ()  # likeliest first
    changed: tuple[str, ...] = ()  # environment and settings that are others than in run.json; no difference by itself
    damage: tuple[str, ...] = ()  # of the log: what could not be read was not compared

    def __bool__(self) -> bool:
        return self.divergence is None and self.missing is None and not self.damage

    def __str__(self) -> str:
        return self.report()

    def report(self) -> str:
        """As text."""
        stretch = f"{self.run}, iterations {self.start + 1:,} to {self.end:,}"
        if self:
            lines = [f"{stretch}: reproduced, {self.agreed:,} events agree to the bit"]
        elif self.divergence is None and self.missing is None:
            lines = [f"{stretch}: not proven: {self.agreed:,} events agree to the bit, but the log is damaged"]
        else:
            lines = [f"{stretch}: not reproduced, after {self.agreed:,} events that agree"]
        if self.divergence is not None:
            number = f"event {self.divergence.ord:,}, " if self.divergence.ord >= 0 else ""
            lines.append(f"first difference: {number}{describe_event(self.divergence.a)}")
            lines.extend(field_table(self.divergence.fields, "recorded", "now"))
        if self.missing is not None:
            lines.append(f"the run ended before {describe_event(self.missing)} came")
        if self.rows is not None:
            more = f" and {len(self.rows) - _ROWS} more" if len(self.rows) > _ROWS else ""
            lines.append(f"batch: rows {', '.join(map(str, self.rows[:_ROWS]))}{more}")
        if self.fingerprints:
            told = [f"{name} {'same' if equal else 'differs'}" for name, equal in self.fingerprints.items()]
            lines.append(f"fingerprints behind it: {', '.join(told)}")
        lines.extend(f"{'likely cause' if not index else 'or'}: {cause}" for index, cause in enumerate(self.causes))
        if not self.causes and self.changed:
            lines.append(f"though not all is as it was: {'; '.join(self.changed)}")
        lines.extend(f"damaged: {each}" for each in self.damage)
        return "\n".join(lines)


def verify(
    run: str | os.PathLike[str],
    build_trainer: Callable[..., Trainer],
    from_iteration: int | None = None,
    to_iteration: int | None = None,
) -> Verification:
    """Run a stretch of a recorded run again, from the nearest checkpoint before it, and compare it with the log.

    Every deterministic event is compared as it comes, floats by their bits; at the first that differs it ends, and the
    stretch is run once more, to know whether the same comes twice. The run's folder is only read: what the trainer's
    EventRecorder writes goes elsewhere, and Checkpointer and loggers are detached.

    Args:
        run: the run folder.
        build_trainer: makes the Trainer as the run's was, with its handlers, an EventRecorder among them. Where it
            takes an argument, it is given a temporary folder for handlers that write.
        from_iteration: the first that has to be compared; by default the run's beginning, a fork's where it was forked.
        to_iteration: the last; by default where the log ends.

    Raises:
        RecordingError: the folder holds no log.
        CheckpointError: there is no checkpoint before the iteration, or it is damaged or does not fit.
        ConfigurationError: the stretch is empty, or the trainer has no EventRecorder.
    """
    folder = Path(run)
    for name, value in (("from_iteration", from_iteration), ("to_iteration", to_iteration)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ConfigurationError(f"verify({name}={value!r}): needs a whole number of at least 1")
    if from_iteration is not None and to_iteration is not None and to_iteration < from_iteration:
        raise ConfigurationError(f"verify(to_iteration={to_iteration}): lies before from_iteration={from_iteration}")
    log = EventLog(folder)
    if from_iteration in (None, 1):
        checkpoint = first_checkpoint(folder)
    else:
        checkpoint = nearest_checkpoint(folder, from_iteration)
    with tempfile.TemporaryDirectory(prefix="pulsetrain-verify-") as temporary:
        again = Again(build_trainer, Path(temporary) / "again", checkpoint, folder)
        changed = _changed_at_start(log, again) if checkpoint is not None else ()
        engine = again.trainer.name
        reached = Source(log).last_iteration(engine)
        if reached <= again.start or (to_iteration is not None and to_iteration > reached):
            raise ConfigurationError(
                f"verify({folder}): the log ends at iteration {reached}, what is run again begins behind "
                f"{again.start}; choose another stretch"
            )
        expected = Expected(log.read(seq=(again.after + 1, None)), engine, to_iteration, log.is_superseded)
        again.compare(expected, to_iteration)
        check = again.check
        recorded, now = read_run_file(folder), describe_run(again.trainer)
        others = [
            each
            for part in ("environment", "settings")
            for each in environment_differences(recorded.get(part) or {}, now.get(part) or {})
        ]
        damage = tuple(map(str, log.damage))
        found = Verification(folder, again.start, again.end, check.agreed, changed=tuple(others), damage=damage)
        divergence = check.divergence or _other_end(expected.end, again)
        if divergence is None:
            return replace(found, missing=check.next)
        repeats = None
        if check.divergence is not None:
            once_more = Again(build_trainer, Path(temporary) / "once_more", checkpoint, folder)
            once_more.compare(Expected(_up_to(again.log(), check.divergence.ord), engine))
            repeats = once_more.check.divergence is None
        evidence = Evidence(
            divergence,
            _next_fingerprints(log, again, divergence),
            changed,
            checkpoint is None and divergence.a.iteration <= 1,
            repeats,
            next(log.read(event=STATE), None) is not None,
            recorded,
            now,
        )
        came = divergence.b
        iteration = came.iteration + (came.event in _BEFORE_THE_ITERATION)
        rows = again.rows(iteration) if came.engine == engine and iteration else None
        marks = {}
        if evidence.state is not None:
            then, since = (event.payload for event in evidence.state)
            marks = {name: then[name] == since.get(name) for name in then}
        return replace(found, divergence=divergence, rows=rows, fingerprints=marks, causes=causes_of(evidence))


def _other_end(recorded: LoggedEvent | None, again: Again) -> Divergence | None:
    """Where the run was ended otherwise than the recorded one: by an exception or a handler, or not."""
    now = again.ending()
    if recorded is None and (now is None or (not again.check.waiting and now.event == "terminate")):
        return None
    engine, iteration = again.trainer.name, again.trainer.state.iteration
    went_on = LoggedEvent(engine=engine, event="the run went on", epoch=again.trainer.state.epoch, iteration=iteration)
    expected = recorded or again.check.next or went_on
    fields = differing_fields(expected, now or went_on)
    return Divergence(-1, expected, now or went_on, fields) if fields else None


def _up_to(log: EventLog, ord: int) -> Iterator[LoggedEvent]:
    return (event for event in log.read() if 0 <= event.ord <= ord)


def _changed_at_start(log: EventLog, again: Again) -> tuple[str, ...]:
    """The parts of the checkpoint's state that are not what the log holds fingerprints of at its iteration."""
    iterations = (again.start, again.start)
    taken = [event for event in log.read(event=STATE, iteration=iterations) if event.seq <= again.after]
    if not taken:
        return ()
    now = again.state()
    return tuple(
        name for name in ("weights", "buffers", "optimizer") if taken[-1].payload[name] != int(getattr(now, name))
    )


def _next_fingerprints(log: EventLog, again: Again, found: Divergence) -> tuple[LoggedEvent, LoggedEvent] | None:
    """Both sides' first fingerprints of a state from the difference on, where they are of one place."""
    recorded, now = (
        next((event for event in read if event.ord >= found.ord), None)
        for read in (
            log.read(event=STATE, seq=(found.a.seq, None)),
            again.log().read(event=STATE, seq=(found.b.seq, None)),
        )
    )
    if recorded is None or now is None or recorded.iteration != now.iteration:
        return None
    return recorded, now
