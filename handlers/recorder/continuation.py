"""Where in its log a run continues: after the place that a checkpoint names, or at the beginning."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pulsetrain.engine import Engine, Event, Events, is_training_run
from pulsetrain.engine.distributed.ranks import is_sharded, ranks
from pulsetrain.engine.logs import get_logger
from pulsetrain.engine.recording import EventLog, LogWriter
from pulsetrain.engine.recording.log.places import last_in_common, place_after
from pulsetrain.engine.recording.log.run_file import id_of_run
from pulsetrain.engine.recording.replay.source import Source
from pulsetrain.handlers.recorder.fingerprints import FingerprintEvents
from pulsetrain.handlers.recorder.log_session import LogSession
from pulsetrain.handlers.recorder.resume_check import ResumeCheck, say_nothing_to_compare

__all__ = ["Continuation", "attempt_of", "shares_of"]


class Continuation:
    """Finds the place in the log, marks what follows it there as superseded, and says what is lost.

    Args:
        log: what is being written.
        rank: of this process.
        is_shared: whether several processes train together.
    """

    begins_again: bool

    def __init__(self, log: LogSession, rank: int, *, is_shared: bool) -> None:
        self._log, self._rank, self._is_shared = log, rank, is_shared
        self.reports = True  # False: what loads the checkpoint compares and reports itself, as `verify` does
        self.resumed_after: int | None = None  # seq in the log of the checkpoint that the run resumed from
        self.saved: Mapping[str, Any] | None = None  # the recorder's state in a checkpoint that is being loaded
        self.repeated: EventLog | None = None  # the log of the run that this one repeats
        self.begins_again = False  # whether the run in the log is repeated from its beginning
        self.starts: list[tuple[int, str]] = []  # of this run: after which iteration, and an id
        self.shares: list[object] | None = None  # see `shares_of`; None before the run

    def start(self, engine: Engine, event: Event) -> None:
        """At the beginning of the run: a run that ended before its first checkpoint starts again in its log."""
        self.saved, self.shares = None, shares_of(engine)
        if event.iteration == 0:
            if self._log.writer is None:
                self._start_again(event)
            self.starts = [(0, attempt_of(engine))]

    def resume(self, engine: Engine, event: Event) -> set[str] | None:
        """At CHECKPOINT_LOADED: continue the log after the checkpoint, and expect what it holds from there again.

        Returns:
            The engines that the checkpoint was saved inside an epoch of; None if it has no state of a recorder.
        """
        saved, self.saved, self.shares = self.saved, None, shares_of(engine)
        log, writer = self._log, self._log.open()
        log.check = self.resumed_after = None
        self.starts = [*map(tuple, (saved or {}).get("starts", ())), (event.iteration, attempt_of(engine))]
        if saved is None:
            return None
        in_epoch = set(saved["in_epoch"])
        if self._rank:
            self._continue_own_log(saved, writer, event, in_epoch)
            return in_epoch
        self.resumed_after = saved["seq"]
        is_of_this_run = saved.get("run", writer.run) == writer.run
        is_in_log = saved["seq"] <= writer.last_seq
        known = id_of_run(self._run_folder)
        is_log_of_another = writer.last_seq >= 0 and saved.get("run") == known != writer.run
        if is_of_this_run and writer.last_seq >= 0:
            log.on_disk(writer.restore_seams, map(tuple, saved.get("seams", ())), event.time_ns)
            log.bus.continue_after(writer.last_seq)
        if is_in_log and is_of_this_run:
            shares = saved.get("shares") or self.shares
            if _without_processes(shares) != _without_processes(self.shares):
                self._say_nothing_to_compare("other processes compute it now, each with its own share of a batch")
            elif not (is_training_run(engine) and engine.is_rewinding):  # else other batches follow
                log.check = ResumeCheck.of_log(log.read(), saved["seq"], event.engine, is_training_run(engine))
                if log.check is not None and shares != self.shares:
                    log.check.leave_out(FingerprintEvents.BATCH_FINGERPRINTED.value)  # of a process's shares
                if log.check is None:
                    self._say_nothing_to_compare("the log holds no event after the checkpoint")
            log.rewind(saved["seq"], saved["ord"], event.time_ns)
        elif is_log_of_another:
            self._note_foreign_log(saved, writer, event)
        elif is_of_this_run and (writer.last_seq >= 0 or "run" in saved):
            self._note_loss(saved, writer, event)
        else:
            self._say_nothing_to_compare("the run continues in another folder, whose log begins here")
            if writer.last_seq >= 0:  # of an earlier attempt to continue it here
                log.rewind(-1, saved["ord"], event.time_ns)
            else:
                writer.begin_at(saved["ord"])
        return in_epoch

    @property
    def _run_folder(self) -> Path:
        return self._log.folder.parent

    def _start_again(self, event: Event) -> None:
        """The events of the run that is in the log are superseded."""
        writer, again = self._log.open(), self.begins_again
        self.begins_again = False
        if writer.last_seq < 0 or not (again or writer.cut_off or self._is_shared):
            return
        log = self._log.read()
        last = log.last()
        # of several processes, one is killed and the others fail: all have to begin alike
        failed = self._is_shared and last is not None and last.event == Events.EXCEPTION_RAISED.value
        if not (again or writer.cut_off or failed):
            return
        begun = [each.seq for each in log.read(engine=event.engine, event=event.type, iteration=(0, 0))]
        first = next((each for each in log.read(seq=(begun[-1], None)) if each.ord >= 0), None) if begun else None
        if first is not None:
            self._log.rewind(begun[-1], first.ord, event.time_ns)

    def _continue_own_log(self, saved: Mapping[str, Any], writer: LogWriter, event: Event, in_epoch: set[str]) -> None:
        """The checkpoint has the place in rank 0's log: find the same one in this rank's."""
        is_new = writer.last_seq < 0
        log = self.repeated if is_new else self._log.read()
        if log is None:
            return
        # where the run has continued without this rank, what it had recorded after that was computed again
        last = last_in_common(log, saved.get("starts", ()), event.iteration)
        is_last = last == event.iteration
        seq, ord = place_after(
            log, event.engine, last, is_last and event.engine in in_epoch,
            after_end=saved.get("after_end") if is_last else None,
        )  # fmt: skip
        if is_new:
            self.resumed_after = seq
            writer.begin_at(ord)
            return
        self._log.bus.continue_after(writer.last_seq)
        self._log.rewind(seq, ord, event.time_ns)

    def _note_loss(self, saved: Mapping[str, Any], writer: LogWriter, event: Event) -> None:
        """The log has lost events before the checkpoint: say which, here and in the log."""
        reached = Source(self._log.read()).last_iteration(event.engine)
        self._lose("the log is older than the checkpoint", saved, writer, event, first=writer.next_ord, reached=reached)

    def _note_foreign_log(self, saved: Mapping[str, Any], writer: LogWriter, event: Event) -> None:
        """The log in the run folder is that of another run: its events are superseded, and this run's are lost."""
        self._log.rewind(-1, 0, event.time_ns)
        self._lose(f"the log is that of another run, {writer.run}", saved, writer, event, first=0, reached=0)

    def _lose(
        self, why: str, saved: Mapping[str, Any], writer: LogWriter, event: Event, *, first: int, reached: int
    ) -> None:
        reason = (
            f"{why}: events {first} to {saved['ord'] - 1} are lost, "
            f"between iteration {reached} and {event.iteration} of {event.engine!r}"
        )
        get_logger("handlers").warning("the event log has lost events", folder=str(self._log.folder), lost=reason)
        up_to = max(saved["seq"], writer.last_seq)
        self._log.on_disk(writer.lose, up_to, saved["ord"], reason, event.time_ns)
        self._log.bus.continue_after(writer.last_seq)
        self._say_nothing_to_compare(why)

    def _say_nothing_to_compare(self, reason: str) -> None:
        if self.reports:
            say_nothing_to_compare(reason)


def shares_of(engine: object) -> list[object]:
    """How many processes share a batch, and whether they share the model, too: what each loss is the mean over.

    With virtual ranks, a loss is that of the global batch: their number is the third entry.
    """
    virtual = engine.backend.virtual_ranks if is_training_run(engine) else None
    found: list[object] = [ranks().world_size, is_training_run(engine) and is_sharded(engine.model)]
    return found if virtual is None else [*found, virtual.total]


def _without_processes(shares: object) -> object:
    """What losses depend on: with virtual ranks, not on the number of processes."""
    return shares[1:] if isinstance(shares, list) and len(shares) > 2 else shares


def attempt_of(engine: Engine) -> str:
    """The id of this start of the processes; empty for an engine that is not a training run."""
    return engine.attempt if is_training_run(engine) else ""
