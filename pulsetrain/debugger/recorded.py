"""Steps through a recorded run, forward and back, with breaks and watched values: `pulsetrain debug` in Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from pulsetrain.debugger.faults import Fault, find_faults
from pulsetrain.debugger.handlers import RecordedHandlers, recorded_handlers
from pulsetrain.debugger.navigation import BEFORE_FIRST, Navigator
from pulsetrain.debugger.stepping import SteppingDebugger
from pulsetrain.engine.argument_checks import check_whole_number
from pulsetrain.engine.errors import ConfigurationError, unknown_name
from pulsetrain.engine.recording import EventLog, LoggedEvent, Replay
from pulsetrain.engine.recording.log.reader import logged_ranks
from pulsetrain.engine.recording.log.records import Json
from pulsetrain.engine.recording.replay.payloads import plain, whole
from pulsetrain.engine.recording.replay.state import ReplayedState
from pulsetrain.export.event_formats import field_value
from pulsetrain.export.scalars import SUMMARIES, scalars_of

__all__ = ["Debugger"]

_FIELDS = LoggedEvent.__struct_fields__
_COUNTERS = ("update", "validation_round", "rollout_round", "save")


class Debugger(SteppingDebugger):
    """Is at an event of a recorded run, and moves: by events, to an iteration, to the next break.

    `event` is the current event, and `state` the engine's state after it. If the run ended in an exception or with a
    NaN loss, the debugger starts right before that; else at the beginning, before the first event. Superseded events
    are left out. The run is only read, and moving back costs no more than moving forward.

    >>> import tempfile
    >>> from pulsetrain.engine.recording import LogWriter
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     writer = LogWriter(Path(folder))
    ...     for i, loss in enumerate([0.5, 4.5, 0.25]):
    ...         event = LoggedEvent(i, "trainer", "iteration_completed", 1, i + 1, output={"loss": loss}, seq=i)
    ...         writer.add(event)
    ...     writer.close()
    ...     debugger = Debugger(folder)
    ...     made = debugger.add_break("iteration_completed", 'output["loss"] > 4')
    ...     while debugger.continue_():
    ...         print(debugger.here)
    seq 1: trainer's iteration_completed, epoch 1, iteration 2

    Args:
        run: a run folder, or an open log.
        engine: the engine whose state and iterations count; by default "trainer", or the first in the log.
        rank: the rank whose log to read.

    Raises:
        RecordingError: there is no log, it has a newer format, or it has no such engine.
    """

    end = "the end of the log"  # the message after the last event

    def __init__(self, run: str | Path | EventLog, *, engine: str | None = None, rank: int = 0) -> None:
        super().__init__()
        self.replay: Replay = Replay(run, engine=engine, rank=rank)
        self.log: EventLog = self.replay.log
        self.engine: str = self.replay.name
        self.folder: Path = self.log.run_folder
        self._navigator = Navigator(self.log, self.engine)
        self._at = BEFORE_FIRST  # seq of the current event
        self.faults: list[Fault] = find_faults(
            self._navigator.past, self.engines, self.engine, self._navigator.last_event
        )
        if self.faults:
            self.goto(seq=self.faults[0].event.seq)
            self.back()

    @property
    def event(self) -> LoggedEvent | None:
        """The current event; None at the beginning."""
        return self.replay.event if self._at > BEFORE_FIRST else None

    @property
    def state(self) -> ReplayedState:
        """The engine's state after the event: epoch, iteration, output, metrics, counters."""
        return self.replay.state

    @property
    def here(self) -> str:
        """The current position in words."""
        event, rank = self.event, f"rank {self.log.rank}, " if len(self.ranks) > 1 else ""
        if event is None:
            return f"{rank}the beginning of {self.folder}: {len(self.log):,} events"
        return (
            f"{rank}seq {event.seq}: {event.engine}'s {event.event}, epoch {event.epoch}, iteration {event.iteration}"
        )

    def next(self, count: int = 1) -> LoggedEvent | None:
        """Move forward by this many events, or to the last; returns it, or None if it already was the current one."""
        check_whole_number("next", "count", count)
        found = self._navigator.ahead(self._at, count)
        return None if found is None else self._move(found)

    def back(self, count: int = 1) -> LoggedEvent | None:
        """Move back by this many events, or to the beginning; returns the event, or None at the beginning."""
        check_whole_number("back", "count", count)
        return self._move(self._navigator.before(self._at, count))

    def move_to(self, name: str, value: int) -> LoggedEvent | None:
        if name == "start":
            return self._move(None)
        last = self._navigator.last_event
        found = last if name == "end" else self._navigator.first(name, value)
        if found is not None:
            return self._move(found)
        if last is None:
            raise ConfigurationError(f"the log of {self.folder} holds no events", "goto", **{name: value})
        if name == "epoch":
            last = self._navigator.past.last(self.engine, None, last.seq) or last
        reached = self.replay.last_iteration if name == "iteration" else getattr(last, name)
        raise ConfigurationError(f"the log ends before; its last {name} is {reached}", "goto", **{name: value})

    def search(
        self, wanted: Callable[[LoggedEvent], bool], types: set[str] | None, *, forward: bool, or_end: bool
    ) -> LoggedEvent | None:
        found = self._navigator.find(self._at, wanted, types, forward=forward)
        if found is not None or or_end:
            self._move(found if found is not None or not forward else self._navigator.last_event)
        return found

    def around(self, count: int = 5) -> tuple[list[LoggedEvent], list[LoggedEvent]]:
        """The last events up to the current one, and the next ones."""
        check_whole_number("around", "count", count, at_least=0)
        return self._navigator.around(self._at, count)

    def watched(self) -> dict[str, Json]:
        """The current values of what is watched, by name."""
        return {name: self.value(name) for name in self.watches}

    def value(self, name: str) -> Json:
        """The latest value of a metric, or a field of the event; None if there is none.

        Raises:
            ConfigurationError: there is no such metric and no such field.
        """
        name = self._full_name("value", name)
        if name not in self.metric_names:
            return None if self.event is None else plain(field_value(self.event, name))
        latest = [self._navigator.past.last(*source, self._at) for source in self.metric_names[name]]
        newest = max((event for event in latest if event is not None), key=lambda event: event.seq, default=None)
        return None if newest is None else scalars_of(whole(newest), self.engine).get(name)

    def facts(self) -> Mapping[str, Json]:
        """The engine's state by name: position, limits, counters, metrics, last output and learning rates."""
        state = self.state
        facts: dict[str, Json] = {"epoch": state.epoch, "iteration": state.iteration}
        facts |= {name: getattr(state, name) for name in ("max_epochs", "epoch_length")}
        for name in _COUNTERS:
            facts[name] = getattr(state, name, None)
        rates = [group["lr"] for group in self.replay.optimizer.param_groups]
        facts["learning_rate"] = rates[0] if len(rates) == 1 else rates or None
        facts |= {"output": dict(state.output) if state.output is not None else None, "metrics": dict(state.metrics)}
        return {**facts, "stop_reason": state.stop_reason}

    def handlers(self, *, max_bytes: int | None = None) -> RecordedHandlers:
        """The run's handlers, and their states in the last checkpoint before this iteration.

        Args:
            max_bytes: size of the largest checkpoint to read; None for any.
        """
        return recorded_handlers(self.folder, self.state.iteration, max_bytes)

    @cached_property
    def ranks(self) -> list[int]:
        """The ranks that have a log: those of the processes that trained together."""
        return logged_ranks(self.log.folder)

    @property
    def engines(self) -> list[str]:
        """Names of the engines in the log."""
        return self.log.engines

    @cached_property
    def event_names(self) -> list[str]:
        """The types of events in the log."""
        return self.log.event_types()

    @cached_property
    def metric_names(self) -> Mapping[str, Sequence[tuple[str, frozenset[str]]]]:
        """The metrics in the first and last events of each type, by full name: which engine's events hold them."""
        found: dict[str, list[tuple[str, frozenset[str]]]] = {}
        end = self._navigator.last_event
        for engine in self.engines:
            for kind in sorted(self._navigator.types(engine), key=lambda kind: kind in SUMMARIES):
                types = frozenset({kind})
                ends = [next(self.log.read(engine=engine, event=kind), None)]
                ends.append(self._navigator.past.last(engine, types, end.seq) if end is not None else None)
                scalars = [scalars_of(whole(event), self.engine) for event in ends if event is not None]
                for name in dict.fromkeys(name for each in scalars for name in each):
                    if kind not in SUMMARIES or name not in found:
                        found.setdefault(name, []).append((engine, types))
        return found

    def _move(self, event: LoggedEvent | None) -> LoggedEvent | None:
        """Make the event the current one; None moves to the beginning."""
        if event is not None:
            self.replay.seek(event.seq)
            self._at = event.seq
            return self.replay.step()
        if self._navigator.first_seq is not None:
            self.replay.seek(self._navigator.first_seq)
        self._at = BEFORE_FIRST
        return None

    def check_watch(self, caller: str, name: str) -> None:
        self._full_name(caller, name)

    def _full_name(self, caller: str, name: str) -> str:
        """The name of a metric or field; val_loss is short for val/loss."""
        if name in self.metric_names or name.partition(".")[0] in _FIELDS:
            return name
        full = next((each for each in self.metric_names if each.replace("/", "_") == name), None)
        if full is None:
            raise unknown_name(caller, "name", name, [*self.metric_names, *_FIELDS])
        return full
