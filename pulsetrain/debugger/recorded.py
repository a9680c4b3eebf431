"""Steps through a recorded run, forward and back, with breaks and watched values: `pulsetrain debug` in Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pulsetrain.debugger.faults import Fault, find_faults
from pulsetrain.debugger.handlers import RecordedHandlers, recorded_handlers
from pulsetrain.debugger.navigation import BEGINNING, Places
from pulsetrain.engine.errors import ConfigurationError, unknown_name
from pulsetrain.engine.recording import EventLog, LoggedEvent, Replay
from pulsetrain.engine.recording.log.predicate import predicate
from pulsetrain.engine.recording.log.tables import columns
from pulsetrain.engine.recording.replay.payloads import whole
from pulsetrain.engine.recording.replay.state import ReplayedState
from pulsetrain.export.scalars import RETOLD, scalars_of

__all__ = ["Break", "Debugger"]

_FIELDS = LoggedEvent.__struct_fields__
_COUNTERS = ("update", "validation_round", "rollout_round", "save")


@dataclass(frozen=True)
class Break:
    """Where to stop."""

    number: int
    event: str | None  # its type; None for any
    condition: str | None
    wanted: Callable[[LoggedEvent], bool]

    def __str__(self) -> str:
        condition = "" if self.condition is None else f" if {self.condition}"
        return f"{self.number}: {'any event' if self.event is None else self.event}{condition}"

    def stops_at(self, event: LoggedEvent) -> bool:
        """Whether it is this one."""
        return (self.event is None or event.event == self.event) and self.wanted(event)


class Breaks(dict[int, Break]):
    """Those that were set, by their numbers."""

    def add(self, event: str | None, condition: str | None) -> Break:
        """Set one.

        Raises:
            ConfigurationError: there is neither, or the condition cannot be understood.
        """
        if event is None and condition is None:
            raise ConfigurationError("add_break(): needs an event or a condition; next() stops at each")
        wanted = _always if condition is None else predicate(condition)
        number = max(self, default=0) + 1
        self[number] = made = Break(number, event, condition, wanted)
        return made

    def remove(self, number: int) -> None:
        """Delete one.

        Raises:
            ConfigurationError: there is no such break.
        """
        if number not in self:
            there = ", ".join(map(str, self)) or "none"
            raise ConfigurationError(f"delete_break({number}): no such break; there are {there}")
        del self[number]

    def at(self, event: LoggedEvent | None) -> Break | None:
        """The first that stops at the event."""
        return next((each for each in self.values() if event is not None and each.stops_at(event)), None)


class Debugger:
    """Stands at an event of a recorded run, and moves: one event on or back, to a place, to the next break.

    `event` is the one that it stands at, `state` what the engine knew behind it. After a run that ended in an exception
    or with a loss that is no number it begins right before that, else at the beginning, where there is no event yet.
    What a resumed run has computed again is passed over. The run is only read, and back costs no more than forward.

        debugger = Debugger("runs/a")
        debugger.add_break("validation_completed", 'metrics["val/loss"] > 3')
        while debugger.continue_():
            print(debugger.here, debugger.state.metrics)

    Args:
        run: a run folder, or an open log.
        engine: whose state and iterations count; by default "trainer", or the first in the log.
        rank: whose log, where several processes have recorded.

    Raises:
        RecordingError: there is no log, it is of a newer format, or it has no such engine.
    """

    end = "the end of the log"

    def __init__(self, run: str | Path | EventLog, *, engine: str | None = None, rank: int = 0) -> None:
        self.replay = Replay(run, engine=engine, rank=rank)
        self.log = self.replay.log
        self.engine = self.replay.name
        folder = self.log.folder
        self.folder = folder.parent if folder.name == "events" else folder
        self.breaks = Breaks()
        self.watches: list[str] = []
        self.hit: Break | None = None  # that the last continue_() or reverse_continue() stopped at
        self._places = Places(self.log, self.engine)
        self._at = BEGINNING  # the event's seq
        self.faults: list[Fault] = find_faults(self._places.past, self.engines, self.engine, self._places.end)
        if self.faults:
            self.goto(seq=self.faults[0].event.seq)
            self.back()

    @property
    def event(self) -> LoggedEvent | None:
        """The one that this stands at; None at the beginning."""
        return self.replay.event if self._at > BEGINNING else None

    @property
    def state(self) -> ReplayedState:
        """What the engine knew behind the event: epoch, iteration, output, metrics, counters."""
        return self.replay.state

    @property
    def here(self) -> str:
        """The place in words."""
        event = self.event
        if event is None:
            return f"the beginning of {self.folder}: {len(self.log):,} events"
        return f"seq {event.seq}: {event.engine}'s {event.event}, epoch {event.epoch}, iteration {event.iteration}"

    def next(self, count: int = 1) -> LoggedEvent | None:
        """Go on by so many events, or to the last there is; returns it, None where this stood at the last already."""
        found = self._places.ahead(self._at, _whole("next", "count", count, 1))
        return None if found is None else self._move(found)

    def back(self, count: int = 1) -> LoggedEvent | None:
        """Go back by so many events, or to the beginning, where there is none: it returns None then."""
        return self._move(self._places.before(self._at, _whole("back", "count", count, 1)))

    def goto(
        self,
        *,
        iteration: int | None = None,
        epoch: int | None = None,
        seq: int | None = None,
        start: bool = False,
        end: bool = False,
    ) -> LoggedEvent | None:
        """Go to the first event of an iteration or epoch of this engine, to one by its seq, or to an end of the log.

        Where the log does not hold it, since it was sampled or thinned, it is the next that there is.

        Returns:
            The event; None at the beginning.

        Raises:
            ConfigurationError: none, or more than one of them; or the log does not go that far.
        """
        places: dict[str, Any] = {"iteration": iteration, "epoch": epoch, "seq": seq}
        places |= {"start": start or None, "end": end or None}
        given = {name: value for name, value in places.items() if value is not None}
        if len(given) != 1:
            raise ConfigurationError(f"goto({', '.join(given)}): needs one of iteration, epoch, seq, start, end")
        [(name, value)] = given.items()
        if name == "start":
            return self._move(None)
        last = self._places.end
        found = last if name == "end" else self._places.first(name, _whole("goto", name, value, 0))
        if found is not None:
            return self._move(found)
        if last is None:
            raise ConfigurationError(f"goto({name}={value}): the log of {self.folder} holds no events")
        if name == "epoch":
            last = self._places.past.last(self.engine, None, last.seq) or last
        reached = self.replay.last_iteration if name == "iteration" else getattr(last, name)
        raise ConfigurationError(f"goto({name}={value}): the log ends before; its last {name} is {reached}")

    def add_break(self, event: str | None = None, condition: str | None = None) -> Break:
        """Have `continue_` and `reverse_continue` stop at events.

        Args:
            event: their type, such as "validation_completed"; None for any.
            condition: on the event's fields, such as 'metrics["val/loss"] > 3': see
                pulsetrain.engine.recording.log.predicate.

        Raises:
            ConfigurationError: the log holds no such event, or the condition cannot be understood.
        """
        if event is not None:
            self._check_event("add_break", event)
        return self.breaks.add(event, condition)

    def delete_break(self, number: int) -> None:
        """Stop there no more.

        Raises:
            ConfigurationError: there is no such break.
        """
        self.breaks.remove(number)

    def continue_(self) -> LoggedEvent | None:
        """Go on to the next break; returns its event, or None where there is none: this stands at the end then."""
        found = self._stop(forward=True)
        self._move(found if found is not None else self._places.end)
        return found

    def reverse_continue(self) -> LoggedEvent | None:
        """Go back to the last break; returns its event, or None where there is none: this is the beginning then."""
        return self._move(self._stop(forward=False))

    def back_to(self, event: str) -> LoggedEvent | None:
        """Go back to the last event of this type; None, and no move, where there is none.

        Raises:
            ConfigurationError: the log holds no such event.
        """
        return self._to("back_to", event, forward=False)

    def next_to(self, event: str) -> LoggedEvent | None:
        """Go on to the next event of this type; None, and no move, where there is none.

        Raises:
            ConfigurationError: the log holds no such event.
        """
        return self._to("next_to", event, forward=True)

    def around(self, count: int = 5) -> tuple[list[LoggedEvent], list[LoggedEvent]]:
        """The last events up to this one, that included, and the next ones."""
        return self._places.around(self._at, _whole("around", "count", count, 0))

    def add_watch(self, name: str) -> None:
        """Have `watched` tell a value.

        Args:
            name: a metric's, such as train/loss, or a field of the event, such as payload.grad_norm.

        Raises:
            ConfigurationError: there is no such metric and no such field.
        """
        self._check_value("add_watch", name)
        if name not in self.watches:
            self.watches.append(name)

    def watched(self) -> dict[str, Any]:
        """What is watched, as it is here."""
        return {name: self.value(name) for name in self.watches}

    def value(self, name: str) -> Any:
        """A metric as it was last, or a field of this event; None where there was none yet, or the event has none.

        Raises:
            ConfigurationError: there is no such metric and no such field.
        """
        name = self._check_value("value", name)
        if name not in self.metric_names:
            return _field(self.event, name)
        tells = [self._places.past.last(*each, self._at) for each in self.metric_names[name]]
        newest = max((event for event in tells if event is not None), key=lambda event: event.seq, default=None)
        return None if newest is None else scalars_of(whole(newest), self.engine).get(name)

    def facts(self) -> Mapping[str, Any]:
        """The state by name: place, bounds, counters, metrics, the last output and learning rates."""
        state = self.state
        facts: dict[str, Any] = {"epoch": state.epoch, "iteration": state.iteration}
        facts |= {name: getattr(state, name) for name in ("max_epochs", "epoch_length")}
        for name in _COUNTERS:
            facts[name] = getattr(state, name, None)
        rates = [group["lr"] for group in self.replay.optimizer.param_groups]
        facts["learning_rate"] = rates[0] if len(rates) == 1 else rates or None
        facts |= {"output": dict(state.output) if state.output is not None else None, "metrics": dict(state.metrics)}
        return {**facts, "stop_reason": state.stop_reason}

    def handlers(self, *, at_most: int | None = None) -> RecordedHandlers:
        """The run's handlers, and their state in the last checkpoint before this iteration.

        Args:
            at_most: bytes of a checkpoint that is read for them; None for any.
        """
        return recorded_handlers(self.folder, self.state.iteration, at_most)

    @property
    def engines(self) -> list[str]:
        """Those of the log."""
        return self.log.engines

    @cached_property
    def event_names(self) -> list[str]:
        """The types of events that the log holds."""
        return sorted({name for engine in self.engines for name in self._places.types(engine)})

    @cached_property
    def metric_names(self) -> Mapping[str, Sequence[tuple[str, frozenset[str]]]]:
        """The metrics of the log by their full names: what their first and last events tell; and whose these are."""
        found: dict[str, list[tuple[str, frozenset[str]]]] = {}
        end = self._places.end
        for engine in self.engines:
            for kind in sorted(self._places.types(engine), key=lambda kind: kind in RETOLD):
                types = frozenset({kind})
                ends = [next(self.log.read(engine=engine, event=kind), None)]
                ends.append(self._places.past.last(engine, types, end.seq) if end is not None else None)
                scalars = [scalars_of(whole(event), self.engine) for event in ends if event is not None]
                for name in dict.fromkeys(name for each in scalars for name in each):
                    if kind not in RETOLD or name not in found:
                        found.setdefault(name, []).append((engine, types))
        return found

    def _move(self, event: LoggedEvent | None) -> LoggedEvent | None:
        """Stand at the event; at the beginning for None."""
        if event is not None:
            self.replay.seek(event.seq)
            self._at = event.seq
            return self.replay.step()
        if self._places.start is not None:
            self.replay.seek(self._places.start)
        self._at = BEGINNING
        return None

    def _to(self, place: str, event: str, *, forward: bool) -> LoggedEvent | None:
        self._check_event(place, event)
        found = self._places.find(self._at, lambda each: each.event == event, {event}, forward=forward)
        return None if found is None else self._move(found)

    def _stop(self, *, forward: bool) -> LoggedEvent | None:
        """The next event that a break stops at, or the last before."""
        breaks = list(self.breaks.values())
        types = None if any(each.event is None for each in breaks) else {str(each.event) for each in breaks}
        found = None
        if breaks:
            found = self._places.find(
                self._at, lambda event: any(each.stops_at(event) for each in breaks), types, forward=forward
            )
        self.hit = self.breaks.at(found)
        return found

    def _check_event(self, place: str, event: str) -> None:
        if event not in self.event_names:
            raise unknown_name(place, "event", event, self.event_names)

    def _check_value(self, place: str, name: str) -> str:
        """The name in full; val_loss stands for val/loss."""
        if name in self.metric_names or name.partition(".")[0] in _FIELDS:
            return name
        full = next((each for each in self.metric_names if each.replace("/", "_") == name), None)
        if full is None:
            raise unknown_name(place, "name", name, [*self.metric_names, *_FIELDS])
        return full


def _field(event: LoggedEvent | None, name: str) -> Any:
    """A field of the event or a part of one; None where it has none."""
    if event is None or name in _FIELDS:
        return getattr(event, name, None)
    parts = columns([event])
    if name in parts:
        return parts[name][0]
    inner = {part.removeprefix(f"{name}."): values[0] for part, values in parts.items() if part.startswith(f"{name}.")}
    return inner or None


def _always(event: LoggedEvent) -> bool:
    return True


def _whole(place: str, name: str, value: Any, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigurationError(f"{place}({name}={value!r}): needs a whole number of at least {least}")
    return value
