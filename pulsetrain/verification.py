"""Checks that a recorded run is reproducible: runs it again, and compares every event."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pulsetrain.engine.argument_checks import check_whole_number
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.recording import Divergence, EventLog, LoggedEvent
from pulsetrain.engine.recording.diff.environments import environment_differences
from pulsetrain.engine.recording.diff.fields import differing_fields
from pulsetrain.engine.recording.diff.result import describe_event, field_table
from pulsetrain.engine.recording.log.run_file import RUN_FILE, read_run_file
from pulsetrain.engine.recording.replay.source import Source
from pulsetrain.export.event_formats import format_rows
from pulsetrain.handlers.run_files.run_file import RunFacts, run_facts
from pulsetrain.reproduce.diagnosis import BATCH, CONTINUED, STATE, Cause, Evidence, diagnose
from pulsetrain.reproduce.rerun import ExpectedEvents, Rerun, first_checkpoint, nearest_checkpoint
from pulsetrain.state.run_state import MAY_CHANGE
from pulsetrain.trainer import Trainer

__all__ = ["Verification", "verify"]

_BEFORE_THE_ITERATION = frozenset({BATCH, "get_batch_started", "get_batch_completed"})  # fired for its next batch


@dataclass(frozen=True)
class Verification:
    """The result of running again; true if all compared events and checkpoints were reproduced bit for bit."""

    run: Path
    start: int  # the last iteration before the rerun; 0 for the beginning
    end: int  # the last iteration that was compared
    agreed: int  # events that agree
    divergence: Divergence | None = None  # `a` was recorded, `b` is of the rerun
    missing: LoggedEvent | None = None  # a recorded event that the rerun ended without
    checkpoints: tuple[int, ...] = ()  # iterations whose checkpoints have the same tensors
    tensor: str | None = None  # the first one that differs from its checkpoint's
    rows: Sequence[object] | None = None  # indices of the batch where they differ, if the order is known
    fingerprints: Mapping[str, bool] = field(default_factory=dict)  # part of the state -> whether it is the same
    causes: tuple[Cause, ...] = ()  # likeliest first
    changed: tuple[str, ...] = ()  # environment and settings that differ from run.json: possible causes
    not_compared: tuple[str, ...] = ()  # types of events that only one of the two runs has, such as gradients_ready
    damage: tuple[str, ...] = ()  # of the log: damaged parts were not compared
    unseen: str = ""  # iterations that were asked for and not compared

    def __bool__(self) -> bool:
        return not self.differs and not self.damage and not self.unseen

    @property
    def differs(self) -> bool:
        """Whether anything that was compared differs."""
        return self.divergence is not None or self.missing is not None or self.tensor is not None

    def __str__(self) -> str:
        return self.report()

    def report(self) -> str:
        """As text."""
        stretch = f"{self.run}, iterations {self.start + 1:,} to {self.end:,}"
        if self:
            lines = [f"{stretch}: reproduced, {self.agreed:,} events agree bit for bit"]
            steps = ", ".join(f"{step:,}" for step in self.checkpoints)
            what = f"those of iteration {steps} agree bit for bit" if steps else "not compared, there is none here"
            lines.append(f"tensors of checkpoints: {what}")
        elif not self.differs:
            but = "the log is damaged" if self.damage else self.unseen
            lines = [f"{stretch}: not proven: {self.agreed:,} events agree bit for bit, but {but}"]
        else:
            lines = [f"{stretch}: not reproduced, after {self.agreed:,} events that agree"]
        if self.not_compared:
            lines.append(f"not compared, since only one of the two runs has them: {', '.join(self.not_compared)}")
        if self.divergence is not None:
            number = f"event {self.divergence.a.ord:,}, " if self.divergence.ord >= 0 else ""
            lines.append(f"first difference: {number}{describe_event(self.divergence.a)}")
            lines.extend(field_table(self.divergence.fields, "recorded", "now"))
        if self.tensor is not None:
            lines.append(f"first tensor that differs: {self.tensor}")
        if self.missing is not None:
            lines.append(f"the run ended before {describe_event(self.missing)}")
        if self.rows is not None:
            lines.append(f"batch: {format_rows(self.rows)}")
        if self.fingerprints:
            parts = [f"{name} {'same' if equal else 'differs'}" for name, equal in self.fingerprints.items()]
            lines.append(f"fingerprints after it: {', '.join(parts)}")
        lines.extend(f"{'likely cause' if not index else 'or'}: {cause}" for index, cause in enumerate(self.causes))
        if not self.causes and self.changed:
            lines.append(f"although these have changed: {'; '.join(self.changed)}")
        lines.extend(f"damaged: {each}" for each in self.damage)
        return "\n".join(lines)


def verify(
    run: str | os.PathLike[str],
    build_trainer: Callable[..., Trainer],
    from_iteration: int | None = None,
    to_iteration: int | None = None,
) -> Verification:
    """Run part of a recorded run again, from the nearest checkpoint before it, and compare it with the log.

    Every deterministic event is compared, floats by their bits, and the weights, buffers and optimizer's tensors with
    each checkpoint of these iterations. The rerun ends at the first difference, and is repeated
    once to find out whether two reruns agree. The run's folder is only read: the trainer's EventRecorder writes to a
    temporary folder, and Checkpointer and loggers are detached.

    >>> import torch
    >>> from pulsetrain import TrainingConfig
    >>> from pulsetrain.engine import SupervisedStrategy
    >>> from pulsetrain.handlers import EventRecorder
    >>> def build(folder):
    ...     torch.manual_seed(0)
    ...     data = [(torch.ones(2, 4), torch.zeros(2, 1))] * 3
    ...     config = TrainingConfig(max_epochs=1, optimizer="sgd", seed=0)
    ...     return Trainer(
    ...         torch.nn.Linear(4, 1), data, strategy=SupervisedStrategy("mse"), config=config,
    ...         handlers=[EventRecorder(folder)],
    ...     )
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     state = build(Path(folder)).train()
    ...     found = verify(folder, build)
    >>> bool(found), found.start, found.end
    (True, 0, 3)

    Args:
        run: the run folder.
        build_trainer: makes the run's Trainer with the same handlers, an EventRecorder among them. If it takes an
            argument, it is called with a temporary folder for handlers that write.
        from_iteration: the first iteration to compare; by default the run's first, or that of the fork.
        to_iteration: the last iteration to compare; by default the log's last.

    Raises:
        RecordingError: the folder holds no log.
        CheckpointError: there is no checkpoint before the iteration, or it is damaged or does not fit the trainer.
        ConfigurationError: there is no iteration to compare, or the trainer has no EventRecorder.
    """
    folder = Path(run)
    for name, value in (("from_iteration", from_iteration), ("to_iteration", to_iteration)):
        check_whole_number("verify", name, value, or_none=True)
    if from_iteration is not None and to_iteration is not None and to_iteration < from_iteration:
        rule = "is before {from_iteration}; choose a later one"
        raise ConfigurationError(rule, "verify", to_iteration=to_iteration, from_iteration=from_iteration)
    log = EventLog(folder)
    checkpoint = first_checkpoint(folder) if from_iteration in (None, 1) else nearest_checkpoint(folder, from_iteration)
    with tempfile.TemporaryDirectory(prefix="pulsetrain-verify-") as temporary:
        rerun = Rerun(build_trainer, Path(temporary) / "rerun", checkpoint, folder)
        changed = _changed_at_start(log, rerun) if checkpoint is not None else ()
        engine = rerun.trainer.name
        reached = _last_iteration(log, engine)
        if reached <= rerun.start and log.damage:
            return Verification(folder, rerun.start, rerun.start, 0, damage=tuple(map(str, log.damage)))
        if to_iteration is not None and to_iteration > reached:
            rule = f"{folder}: the log ends at iteration {reached}; choose an earlier one"
            raise ConfigurationError(rule, "verify", to_iteration=to_iteration)
        if reached <= rerun.start:
            raise ConfigurationError(
                f"verify({folder}): the log ends at iteration {reached}, and the rerun would start after "
                f"{rerun.start}; choose other iterations"
            )
        expected = ExpectedEvents(log.read(seq=(rerun.after + 1, None)), engine, to_iteration, log.is_superseded)
        rerun.compare(expected, to_iteration)
        check = rerun.check
        recorded, now = read_run_file(folder), run_facts(rerun.trainer)
        others = _differences(recorded, now)
        damage = tuple(map(str, log.damage))  # after all has been read
        found = Verification(
            *(folder, rerun.start, rerun.end, check.agreed),
            changed=tuple(others),
            not_compared=tuple(check.left_out),
            damage=damage,
        )
        divergence = check.divergence or _other_end(expected.end, rerun)
        goal = to_iteration or max(reached, rerun.end)
        if divergence is None and check.next is None and rerun.end < goal:
            found = replace(found, unseen=f"iterations {rerun.end + 1} to {goal} were not compared")
        if divergence is None:
            tensors = rerun.tensors
            steps, tensor = (tuple(tensors.agreed), tensors.difference) if tensors is not None else ((), None)
            return replace(found, missing=check.next, checkpoints=steps, tensor=tensor)
        repeats = None
        if check.divergence is not None:
            second = Rerun(build_trainer, Path(temporary) / "second", checkpoint, folder)
            before = (event for event in rerun.log().read() if 0 <= event.ord <= divergence.ord)
            second.compare(ExpectedEvents(before, engine))
            repeats = second.check.divergence is None
        evidence = Evidence(
            divergence,
            _next_fingerprints(log, rerun, divergence),
            changed,
            checkpoint is None and divergence.a.iteration <= 1,
            repeats,
            next(log.read(event=STATE), None) is not None,
            recorded,
            now,
        )
        differing = divergence.b
        iteration = differing.iteration + (differing.event in _BEFORE_THE_ITERATION)
        rows = rerun.rows(iteration) if differing.engine == engine and iteration else None
        fingerprints = {}
        if evidence.state is not None:
            then, since = (event.payload for event in evidence.state)
            fingerprints = {name: then[name] == since.get(name) for name in then}
        causes = diagnose(evidence)
        return replace(found, divergence=divergence, rows=rows, fingerprints=fingerprints, causes=causes)


def _last_iteration(log: EventLog, engine: str) -> int:
    """The iteration of the engine's last event; events that a resumed run has replaced do not count."""
    if not log.superseded:
        return Source(log).last_iteration(engine)
    return max((event.iteration for event in log.read(engine=engine) if event.ord >= 0), default=0)


def _differences(recorded: RunFacts, now: RunFacts) -> list[str]:
    """What differs between run.json and the trainer that ran again; of a resumed run not what a resume may change."""
    if not recorded:
        return [f"unknown, since {RUN_FILE} is missing"]
    ignored = () if len(recorded.get("starts") or ()) < 2 else MAY_CHANGE
    return [
        each
        for part in ("environment", "settings")
        for each in environment_differences(
            *(
                {key: value for key, value in (side.get(part) or {}).items() if key not in ignored}
                for side in (recorded, now)
            )
        )
    ]


def _other_end(recorded: LoggedEvent | None, rerun: Rerun) -> Divergence | None:
    """The difference if only one of the runs was ended by an exception or a handler, or both by different ones."""
    now = rerun.ending()
    if recorded is None and (now is None or (not rerun.check.waiting and now.event == "terminate")):
        return None
    state = rerun.trainer.state
    continued = LoggedEvent(engine=rerun.trainer.name, event=CONTINUED, epoch=state.epoch, iteration=state.iteration)
    expected = recorded or rerun.check.next or continued
    fields = differing_fields(expected, now or continued)
    return Divergence(-1, expected, now or continued, fields) if fields else None


def _changed_at_start(log: EventLog, rerun: Rerun) -> tuple[str, ...]:
    """The parts of the checkpoint's state that differ from the log's fingerprint at its iteration."""
    iterations = (rerun.start, rerun.start)
    recorded = [event for event in log.read(event=STATE, iteration=iterations) if event.seq <= rerun.after]
    if not recorded:
        return ()
    now = rerun.state()
    return tuple(
        name for name in ("weights", "buffers", "optimizer") if recorded[-1].payload[name] != int(getattr(now, name))
    )


def _next_fingerprints(log: EventLog, rerun: Rerun, found: Divergence) -> tuple[LoggedEvent, LoggedEvent] | None:
    """Both sides' first state fingerprints from the difference on, if they are of the same iteration."""
    recorded, now = (
        next((event for event in read if event.ord >= first.ord), None)
        for first, read in (
            (found.a, log.read(event=STATE, seq=(found.a.seq, None))),
            (found.b, rerun.log().read(event=STATE, seq=(found.b.seq, None))),
        )
    )
    if recorded is None or now is None or recorded.iteration != now.iteration:
        return None
    return recorded, now
