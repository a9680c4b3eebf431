"""Proves that a recorded run is reproducible: runs it again for real, and compares every event as it comes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.environment import environment_differences
from engine.errors import ConfigurationError
from engine.recording import Divergence, EventLog, LoggedEvent
from engine.recording.diff_result import field_table, place_of
from handlers.run_file import describe_run, read_run_file
from pulsetrain.again import Again, first_checkpoint, nearest_checkpoint
from pulsetrain.causes import BATCH, STATE, Cause, Evidence, causes_of
from pulsetrain.trainer import Trainer

__all__ = ["Verification", "verify"]

_CUT_OFF = frozenset({"terminate", "interrupt", "exception_raised"})  # what comes behind is not of the run itself
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
    causes: tuple[Cause, ...] = ()  # likeliest first
    environment: tuple[str, ...] = ()  # what is another than when the run was recorded; no difference by itself

    def __bool__(self) -> bool:
        return self.divergence is None and self.missing is None

    def __str__(self) -> str:
        return self.report()

    def report(self) -> str:
        """As text."""
        stretch = f"{self.run}, iterations {self.start + 1:,} to {self.end:,}"
        if self:
            lines = [f"{stretch}: reproduced, {self.agreed:,} events agree to the bit"]
        else:
            lines = [f"{stretch}: not reproduced, after {self.agreed:,} events that agree"]
        if self.divergence is not None:
            lines.append(f"first difference: event {self.divergence.ord:,}, {place_of(self.divergence.a)}")
            lines.extend(field_table(self.divergence.fields, "recorded", "now"))
        if self.missing is not None:
            lines.append(f"the run ended before {place_of(self.missing)} came")
        if self.rows is not None:
            more = f" and {len(self.rows) - _ROWS} more" if len(self.rows) > _ROWS else ""
            lines.append(f"batch: rows {', '.join(map(str, self.rows[:_ROWS]))}{more}")
        lines.extend(f"{'likely cause' if not index else 'or'}: {cause}" for index, cause in enumerate(self.causes))
        if self and self.environment:
            lines.append(f"though the environment differs: {'; '.join(self.environment)}")
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
    log = EventLog(folder)
    checkpoint = first_checkpoint(folder) if from_iteration is None else nearest_checkpoint(folder, from_iteration)
    with tempfile.TemporaryDirectory(prefix="pulsetrain-verify-") as temporary:
        again = Again(build_trainer, Path(temporary) / "again", checkpoint)
        changed = _changed_at_start(log, again) if checkpoint is not None else ()
        again.compare(_expected(log, again.trainer.name, again.after, to_iteration), to_iteration)
        check = again.check
        if not check.agreed and not check.waiting:
            upto = "" if to_iteration is None else f" up to iteration {to_iteration}"
            raise ConfigurationError(
                f"verify({folder}): the log holds nothing behind iteration {again.start}{upto}; choose another stretch"
            )
        recorded, now = read_run_file(folder), describe_run(again.trainer)
        environment = tuple(environment_differences(recorded.get("environment") or {}, now["environment"]))
        found = Verification(folder, again.start, again.end, check.agreed, environment=environment)
        if check.divergence is None:
            return replace(found, missing=check.next)
        once_more = Again(build_trainer, Path(temporary) / "once_more", checkpoint)
        once_more.compare(_up_to(again.log(), check.divergence.ord))
        evidence = Evidence(
            check.divergence,
            _next_fingerprints(log, again, check.divergence),
            changed,
            once_more.check.divergence is None,
            next(log.read(event=STATE), None) is not None,
            recorded,
            now,
        )
        came = check.divergence.b
        iteration = came.iteration + (came.event in _BEFORE_THE_ITERATION)
        rows = again.rows(iteration) if came.engine == again.trainer.name and iteration else None
        return replace(found, divergence=check.divergence, rows=rows, causes=causes_of(evidence))


def _expected(log: EventLog, engine: str, after: int, last: int | None) -> Iterator[LoggedEvent]:
    """The deterministic events behind a seq, up to an iteration, or to where the run was cut off."""
    for event in log.read(seq=(after + 1, None)):
        cut_off = event.event in _CUT_OFF and not log.is_superseded(event.seq)
        if event.engine == engine and (cut_off or (last is not None and event.iteration > last)):
            return
        if event.ord >= 0 and not event.open:
            yield event


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
