"""Checks that a recorded run is reproducible: runs it again, and compares every event."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from pulsetrain.engine.argument_checks import check_whole_number
from pulsetrain.engine.checkpoint import Location
from pulsetrain.engine.checkpoint.reader import step_of
from pulsetrain.engine.distributed.collectives import ControlGroup
from pulsetrain.engine.distributed.joining import join
from pulsetrain.engine.distributed.ranks import ranks
from pulsetrain.engine.errors import ConfigurationError, RecordingError
from pulsetrain.engine.recording import Divergence, EventLog, LoggedEvent
from pulsetrain.engine.recording.diff.environments import environment_differences
from pulsetrain.engine.recording.diff.fields import differing_fields
from pulsetrain.engine.recording.log.reader import logged_ranks
from pulsetrain.engine.recording.log.run_file import RUN_FILE, read_run_file
from pulsetrain.engine.recording.replay.source import Source
from pulsetrain.handlers.run_files.run_file import RunFacts, run_facts
from pulsetrain.reproduce.diagnosis import BATCH, CONTINUED, STATE, Evidence, diagnose
from pulsetrain.reproduce.findings import Verification
from pulsetrain.reproduce.processes import check_processes
from pulsetrain.reproduce.rerun import ExpectedEvents, Rerun, first_checkpoint, nearest_checkpoint
from pulsetrain.state.run_state import MAY_CHANGE
from pulsetrain.trainer import Trainer

__all__ = ["Verification", "verify"]

_BEFORE_THE_ITERATION = frozenset({BATCH, "get_batch_started", "get_batch_completed"})  # fired for its next batch


def verify(
    run: str | os.PathLike[str],
    build_trainer: Callable[..., Trainer],
    from_iteration: int | None = None,
    to_iteration: int | None = None,
) -> Verification:
    """Run part of a recorded run again, from the nearest checkpoint before it, and compare it with the log.

    Every deterministic event is compared, floats by their bits, and the weights, buffers and optimizer's tensors with
    each checkpoint of these iterations. The rerun ends at the first difference, and is repeated once to find out
    whether two reruns agree. The run's folder is only read: the trainer's EventRecorder writes to a temporary folder,
    and Checkpointer and loggers are detached.

    A run of several processes is repeated by the same number: each calls this, as under `torchrun`, and compares its
    own log. All get the same result, which is true if every log was reproduced; `rank` is the process that differs
    first. A run with virtual ranks may be repeated by any number of processes that divides the number of virtual ranks.
    If a different number has trained these iterations, the log of rank 0 is compared.

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
        run: the run folder; messages name it as `str(run)`.
        build_trainer: makes the run's Trainer with the same handlers, an EventRecorder among them. If it takes an
            argument, it is called with a temporary folder for handlers that write.
        from_iteration: the first iteration to compare; by default the run's first, or that of the fork.
        to_iteration: the last iteration to compare; by default the log's last.

    Raises:
        RecordingError: the folder holds no log.
        CheckpointError: there is no checkpoint before the iteration, or it is damaged or does not fit the trainer.
        ConfigurationError: there is no iteration to compare, the trainer has no EventRecorder, or a different number of
            processes has trained the run.
        PeerFailed, Exception: one of several processes has failed in the rerun.
    """
    folder, shown = Path(run), Path(str(run))
    checkpoint, trained_by = check_request(run, from_iteration, to_iteration, ranks().world_size)
    control = join()
    rank, count = control.ranks
    alike = set(trained_by) == {count}
    compares = alike or control.ranks.is_main
    log = _log_of(run, control) if alike else EventLog(run, 0)
    if isinstance(log, str):
        first = step_of(checkpoint) if checkpoint is not None else 0
        return Verification(shown, first, first, 0, unseen=log)
    with tempfile.TemporaryDirectory(prefix="pulsetrain-verify-") as temporary:
        rerun = Rerun(build_trainer, Path(temporary) / "rerun", checkpoint, folder, alike=alike)
        changed = _changed_at_start(log, rerun) if checkpoint is not None else ()
        engine = rerun.trainer.name
        ends = control.gather(_end_of(log, engine))
        last, unseen = _last_to_compare(ends, shown, rerun.start, to_iteration)
        if last <= rerun.start:
            damage = tuple(each for end in ends for each in end.damage)
            return Verification(shown, rerun.start, rerun.start, 0, damage=damage, unseen=unseen)
        bound = last if control.is_shared else to_iteration
        recorded_events = log.read(seq=(rerun.after + 1, None)) if compares else iter(())
        expected = ExpectedEvents(recorded_events, engine, bound, log.is_superseded)
        rerun.compare(expected, bound)
        check = rerun.check
        recorded, now = read_run_file(folder), run_facts(rerun.trainer)
        others = _differences(recorded, now)
        damage = tuple(map(str, log.damage))  # after all has been read
        goal = last if control.is_shared else to_iteration or max(last, rerun.end)
        found = Verification(
            *(shown, rerun.start, min(rerun.end, goal), check.agreed),
            changed=tuple(others),
            not_compared=tuple(check.left_out) if alike else (),
            damage=damage,
            compared="" if alike else _compared(trained_by, count),
            unseen=unseen,
        )
        divergence = check.divergence or (None if rerun.cut_short else _other_end(expected.end, rerun))
        repeats = None
        if any(control.gather(check.divergence is not None)):
            second = Rerun(build_trainer, Path(temporary) / "second", checkpoint, folder, alike=alike)
            upto = -1 if check.divergence is None else check.divergence.ord
            before = (event for event in rerun.log().read() if 0 <= event.ord <= upto)
            second.compare(ExpectedEvents(before, engine))
            repeats = second.check.divergence is None
        if divergence is None:
            if rerun.cut_short:
                unseen = f"iterations after {rerun.end} were not compared, since another process differs"
            elif control.is_shared and compares and not check.agreed:
                unseen = "the log of this process holds no event that can be compared"
            elif check.next is None and rerun.end < goal:
                unseen = f"iterations {rerun.end + 1} to {goal} were not compared"
            elif control.is_shared and ends[rank].reached < goal:
                unseen = f"the log of this process ends at iteration {ends[rank].reached}, and another one at {goal}"
            tensors = rerun.tensors
            steps, tensor = (tuple(tensors.agreed), tensors.difference) if tensors is not None else ((), None)
            missing = None if rerun.cut_short else check.next
            found = replace(found, missing=missing, checkpoints=steps, tensor=tensor, unseen=unseen)
            return found.with_others(control) if alike else control.broadcast(found)
        evidence = Evidence(
            divergence,
            _next_fingerprints(log, rerun, divergence),
            changed,
            checkpoint is None and divergence.a.iteration <= 1,
            repeats,
            next(log.read(event=STATE), None) is not None,
            recorded,
            now,
            () if alike else trained_by,
        )
        differing = divergence.b
        iteration = differing.iteration + (differing.event in _BEFORE_THE_ITERATION)
        rows = rerun.rows(iteration) if differing.engine == engine and iteration else None
        fingerprints = {}
        if evidence.state is not None:
            then, since = (event.payload for event in evidence.state)
            fingerprints = {name: then[name] == since.get(name) for name in then if name != "sharded"}
        causes = diagnose(evidence)
        found = replace(found, divergence=divergence, rows=rows, fingerprints=fingerprints, causes=causes)
        return found.with_others(control) if alike else control.broadcast(found)


def check_request(
    run: str | os.PathLike[str], from_iteration: int | None, to_iteration: int | None, processes: int
) -> tuple[Location | None, list[int]]:
    """Refuse what cannot be verified, before anything is trained.

    Returns:
        The checkpoint to start from, if any, and the numbers of processes that have trained the iterations.

    Args:
        run: the run folder.
        from_iteration: as for `verify`.
        to_iteration: as for `verify`.
        processes: how many are to repeat the run.

    Raises:
        RecordingError, CheckpointError, ConfigurationError: as `verify`.
    """
    for name, value in (("from_iteration", from_iteration), ("to_iteration", to_iteration)):
        check_whole_number("verify", name, value, or_none=True)
    if from_iteration is not None and to_iteration is not None and to_iteration < from_iteration:
        rule = "is before {from_iteration}; choose a later one"
        raise ConfigurationError(rule, "verify", to_iteration=to_iteration, from_iteration=from_iteration)
    log = EventLog(run, logged_ranks(run)[0])
    newest = log.last(log.main_engine) if not log.rank else None  # another rank may have been left out since
    checkpoint = first_checkpoint(run) if from_iteration in (None, 1) else nearest_checkpoint(run, from_iteration)
    first = 1 if checkpoint is None else step_of(checkpoint) + 1
    last = to_iteration if to_iteration is not None or newest is None else newest.iteration
    return checkpoint, check_processes(run, first, last, processes)


def _compared(trained_by: Sequence[int], here: int) -> str:
    """Which log is compared where other numbers of processes have trained a run than repeat it."""
    numbers = " and then ".join(map(str, trained_by))
    return (
        f"the log of rank 0, without what depends on a process's shares (digests of batches); the run was trained by "
        f"{numbers} process{'' if numbers == '1' else 'es'}, and repeated by {here}"
    )


def _log_of(run: str | os.PathLike[str], control: ControlGroup) -> EventLog | str:
    """The log of this process; in each, why nothing can be compared if one of them has none.

    Raises:
        RecordingError: as `EventLog`, of one process.
    """
    failure, log = "", None
    try:
        log = EventLog(run, control.ranks.rank)
    except RecordingError as error:
        if not control.is_shared:
            raise
        failure = str(error)
    failures = list(filter(None, control.gather(failure)))
    if failures or log is None:
        return f"nothing was trained: {'; '.join(failures)}"
    return log


class _End(NamedTuple):
    """Where the log of a process ends."""

    reached: int  # iteration
    failed: tuple[int, int] | None  # the iteration in which an error ended the run, and when
    damage: tuple[str, ...]


def _end_of(log: EventLog, engine: str) -> _End:
    ends = list(log.read(engine=engine, event={"exception_raised", "started"}))
    failed = (ends[-1].iteration, ends[-1].t) if ends and ends[-1].event == "exception_raised" else None
    return _End(_last_iteration(log, engine), failed, tuple(map(str, log.damage)))


def _last_to_compare(ends: Sequence[_End], run: Path, start: int, to_iteration: int | None) -> tuple[int, str]:
    """The last iteration to compare, at most `start` if nothing is to be trained; and what is not compared, if known.

    Args:
        ends: of the logs of all processes.
        run: what messages call the run.
        start: the iteration after which the rerun would start.
        to_iteration: the last one that is asked for.

    Raises:
        ConfigurationError: the logs do not reach it, or end before the rerun would start.
    """
    reached = max(each.reached for each in ends)
    short = [rank for rank, each in enumerate(ends) if each.reached <= start]
    if reached <= start and any(each.damage for each in ends):
        return start, ""
    if to_iteration is not None and to_iteration > reached:
        rule = f"{run}: the log ends at iteration {reached}; choose an earlier one"
        raise ConfigurationError(rule, "verify", to_iteration=to_iteration)
    if reached <= start:
        raise ConfigurationError(
            f"verify({run}): the log ends at iteration {reached}, and the rerun would start after "
            f"{start}; choose other iterations"
        )
    if short:
        return start, f"the log of rank {short[0]} ends at iteration {ends[short[0]].reached}, and nothing was trained"
    last = to_iteration or reached
    failed = [(*end.failed, rank) for rank, end in enumerate(ends) if end.failed is not None and len(ends) > 1]
    iteration, _, rank = min(failed, default=(last + 1, 0, 0))
    if iteration <= last:
        return iteration - 1, f"an error ended rank {rank} in iteration {iteration}, which is not repeated"
    return last, ""


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
        for part in ("environment", "parallel", "settings")
        if part in recorded
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
