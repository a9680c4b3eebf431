"""Which events an engine may fire, and which attribute of its state counts each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ignite.engine.events import EventEnum as IgniteEventEnum

from pulsetrain.engine.errors import ConfigurationError, nearest
from pulsetrain.engine.events.names import LOOP_COUNTERS, READ_ONLY, EventLike, identify

__all__ = ["EventRegistry"]


class EventRegistry:
    """The registered events of one engine and their counters."""

    name: str
    run_number: int  # of runs that have started from iteration 0
    state: Any  # a State, with an attribute for each counter of a custom event

    def __init__(self) -> None:
        self._registered: dict[str, EventLike] = {}
        self._by_name: dict[str, EventLike] = {}
        self._counters: dict[str, str] = {}

    def register_events(self, *event_names: EventLike, event_to_attr: Mapping[Any, str] | None = None) -> None:
        """Allow custom events on this engine.

        Args:
            event_names: members of an EventEnum, or strings.
            event_to_attr: the attribute of the state that counts an event, by event. `fire` advances it before the
                filters are applied. If several events share one, the first that was registered advances it; the others
                carry the same number, and advance it only if the first was not fired.

        Raises:
            TypeError: a name is neither a string nor a member of an EventEnum.
            ValueError: event_to_attr is not a dictionary, or has an event that this call does not register.

        >>> from pulsetrain.engine import Engine, EventEnum
        >>> class Games(EventEnum):
        ...     GAME_WON = "game_won"
        >>> engine = Engine(lambda engine, batch: engine.fire(Games.GAME_WON) if batch > 4 else None)
        >>> engine.register_events(*Games, event_to_attr={Games.GAME_WON: "wins"})
        >>> engine.run([3, 5, 8]).wins
        2
        """
        if not (event_to_attr is None or isinstance(event_to_attr, dict)):
            raise ValueError(f"Expected event_to_attr to be dictionary. Got {type(event_to_attr)}.")
        for event in event_to_attr or ():
            if event not in event_names:
                names = ", ".join(map(str, event_names)) or "none"
                raise ConfigurationError(
                    f"not among the events registered by this call: {names}",
                    "register_events",
                    event_to_attr={event: ...},
                )
        for index, event in enumerate(event_names):  # all are checked before the first is registered
            if not isinstance(event, (str, IgniteEventEnum)):
                raise TypeError(
                    f"Value at {index} of event_names should be a str or EventEnum, but given {event}; "
                    "pass the members of an enum, not the enum: register_events(*MyEvents)"
                )
        for event in event_names:
            self._by_name.setdefault(event if isinstance(event, str) else event._name_, event)
            key, resolved = self._identify(event)
            self._registered.setdefault(key, resolved)
            counter = event_to_attr.get(event) if event_to_attr else None
            if counter is not None and self._counters.get(key) != counter:
                self._counters.pop(key, None)  # of the events of this counter it is the last to be registered
                self._counters[key] = counter
        self._initialise_counters()

    @property
    def registered_events(self) -> tuple[EventLike, ...]:
        """The events that may be fired on this engine, in the order of their registration."""
        return tuple(self._registered.values())

    @property
    def _allowed_events(self) -> list[EventLike]:
        return [*self._registered.values()]  # ignite's name for it

    def has_registered_events(self, event: object) -> bool:
        """Whether the event may be fired on this engine."""
        try:
            return self._identify(event)[0] in self._registered
        except TypeError:
            return False

    def counter_of(self, event: EventLike) -> str | None:
        """The state attribute that the event's filters read, or None."""
        return self._counters.get(self._identify(event)[0])

    def counter_value(self, event: EventLike) -> int:
        """The counter's present value, 0 for an event without one."""
        counter = self.counter_of(event)
        return getattr(self.state, counter, 0) if counter is not None else 0

    def require_counter(self, event: EventLike) -> None:
        """Check that the event can be filtered.

        Raises:
            ValueError: the event has no counter on this engine.
        """
        if self.counter_of(event) is None:
            raise ValueError(
                f"{event}: a filter needs a counter, and this event has none on {self.name!r}; "
                "register it with register_events(..., event_to_attr={event: 'attribute'})"
            )

    def fire(self, event: EventLike, payload: object = None, *, observed: bool = False) -> None:
        """Fire the event, as a `Dispatcher` does."""
        raise NotImplementedError

    def _initialise_counters(self) -> None:
        for counter in self._counters.values():
            if not hasattr(self.state, counter):
                setattr(self.state, counter, 0)

    def _counting(self, key: str, event: EventLike) -> tuple[str | None, bool, bool]:
        """The event's counter, whether firing it always advances the counter, and whether it follows another event."""
        counter = self._counters.get(key)
        if counter is None or counter in LOOP_COUNTERS or event in READ_ONLY:
            return counter, False, False
        first = next(k for k, name in self._counters.items() if name == counter)
        return counter, first == key, first != key

    def _identify(self, event: object) -> tuple[str, EventLike]:
        return identify(event, self._by_name)

    def _require_registered(self, event: EventLike) -> tuple[str, EventLike]:
        if self.has_registered_events(event):
            return self._identify(event)
        hint = "custom events are allowed by register_events()"
        names = {each if isinstance(each, str) else each._name_: each for each in self._registered.values()}
        if isinstance(event, str) and (near := nearest(event, names)):
            hint = f"did you mean {names[near[0]]!r}?"
        raise ValueError(f"Event {event} is not a valid event for this {type(self).__name__}; {hint}")

    def _assert_allowed_event(self, event: EventLike) -> None:
        self._require_registered(event)  # ignite's name for it
