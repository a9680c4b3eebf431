"""What the tests of the event core share: recorders instead of mocks, and steps that do nothing."""

from __future__ import annotations

from typing import Any

import pytest
from ignite.engine import Engine as IgniteEngine
from ignite.engine import Events as IgniteEvents

from pulsetrain.engine import Engine, Event, EventBus, Events


class Recorder:
    """Keeps every event that an engine or a whole bus fires."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def attach(self, target: Any, *events: Any) -> Recorder:
        """Subscribe to these events of an engine or a bus, or to all of them."""
        for event in events or Events:
            if isinstance(target, EventBus):
                target.subscribe(event, self._take)
            else:
                target.bus.subscribe(event, self._take, sender=target)
        return self

    def _take(self, engine: Engine, event: Event) -> None:
        self.events.append(event)

    @property
    def types(self) -> list[str]:
        return [event.type for event in self.events]

    def of(self, event: Any) -> list[Event]:
        return [record for record in self.events if record.type == event.value]


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def make_recorder() -> type[Recorder]:
    return Recorder


def _nothing(engine: Any, batch: Any) -> None:
    return None


@pytest.fixture
def engine() -> Engine:
    """An engine whose step does nothing."""
    return Engine(_nothing)


@pytest.fixture
def make_engine() -> Any:
    """Make engines whose step does nothing; takes `step=` and what Engine takes."""

    def make(step: Any = _nothing, **kwargs: Any) -> Engine:
        return Engine(step, **kwargs)

    return make


@pytest.fixture(params=[IgniteEngine, Engine], ids=["ignite", "ours"])
def either(request: pytest.FixtureRequest) -> Any:
    """The class of ignite's engine, then of ours: for what both do alike."""
    return request.param


@pytest.fixture
def log_of() -> Any:
    """Write down the names of ignite's events as an engine of either kind fires them."""

    def attach(engine: Any, *events: Any) -> list[str]:
        log: list[str] = []
        for event in events or IgniteEvents:

            def note(*_: Any, name: str = event.name, **__: Any) -> None:
                log.append(name)

            if event not in (IgniteEvents.EXCEPTION_RAISED,):  # a handler of that one takes the exception
                engine.add_event_handler(event, note)
        return log

    return attach
