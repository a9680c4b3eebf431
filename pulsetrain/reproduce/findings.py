"""What was found when a recorded run was repeated: that all agrees, or the first difference and its likely causes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pulsetrain.engine.distributed.collectives import ControlGroup
from pulsetrain.engine.recording import Divergence, LoggedEvent
from pulsetrain.engine.recording.diff.result import describe_event, field_table
from pulsetrain.export.event_formats import format_rows
from pulsetrain.reproduce.diagnosis import Cause

__all__ = ["Verification"]


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
    compared: str = ""  # which log, if not that of each process
    unseen: str = ""  # iterations that were asked for and not compared
    rank: int | None = None  # the process, if there are several: the first that differs, or else is not proven
    others: tuple[Verification, ...] = ()  # of the other processes

    def __bool__(self) -> bool:
        return self.proves and all(self.others)

    @property
    def differs(self) -> bool:
        """Whether anything that was compared differs, in any process."""
        return self.differs_here or any(each.differs for each in self.others)

    @property
    def differs_here(self) -> bool:
        """Whether anything that this process compared differs."""
        return self.divergence is not None or self.missing is not None or self.tensor is not None

    @property
    def proves(self) -> bool:
        """Whether this process has compared everything, and it agrees."""
        return not self.differs_here and not self.damage and not self.unseen

    def __str__(self) -> str:
        return self.report()

    def report(self) -> str:
        """As text."""
        stretch = str(self.run)
        if self.end > self.start:
            stretch += f", iterations {self.start + 1:,} to {self.end:,}"
        if self:
            events = f"{self.agreed + sum(each.agreed for each in self.others):,} events"
            of = f" of {1 + len(self.others)} processes" if self.others else ""
            lines = [f"{stretch}: reproduced, {events}{of} agree bit for bit"]
            steps = ", ".join(f"{step:,}" for step in self.checkpoints)
            what = f"those of iteration {steps} agree bit for bit" if steps else "not compared, there is none here"
            lines.append(f"tensors of checkpoints: {what}")
        else:
            lines = [f"{stretch}{'' if self.rank is None else f', rank {self.rank}'}: {self.outcome}"]
        if self.compared:
            lines.append(f"compared: {self.compared}")
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
        for other in () if self else self.others:
            first = "" if other.divergence is None else f": {describe_event(other.divergence.a)}"
            lines.append(f"rank {other.rank}: {other.outcome}{first}")
            lines.extend(f"  damaged: {each}" for each in other.damage)
        return "\n".join(lines)

    @property
    def outcome(self) -> str:
        """What was found in this process."""
        if self.differs_here:
            return f"not reproduced, after {self.agreed:,} events that agree"
        agreed = f"{self.agreed:,} events agree bit for bit"
        if self.proves:
            return f"reproduced, {agreed}"
        return f"not proven: {agreed}, but {'the log is damaged' if self.damage else self.unseen}"

    def with_others(self, control: ControlGroup) -> Verification:
        """The result of all processes, the same in each, which have to call this; of one process, its own."""
        every = [replace(each, rank=rank) for rank, each in enumerate(control.gather(self))]
        if len(every) == 1:
            return self
        first = min(every, key=lambda each: (not each.differs_here, each.proves, each.at, each.rank))
        return replace(first, others=tuple(each for each in every if each is not first))

    @property
    def at(self) -> int:
        """The iteration of the first difference."""
        event = self.missing if self.divergence is None else self.divergence.a
        return self.end if event is None else event.iteration
