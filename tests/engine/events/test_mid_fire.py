"""What happens inside a firing: handlers added and removed, nested events, subclasses that watch."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from ignite.engine import Engine as IgniteEngine
from ignite.engine import Events as IgniteEvents

from pulsetrain.engine import Engine, EventEnum, Events, Phase
from pulsetrain.engine.events.payloads import ExceptionRaised, Terminated


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardMeasured:
    mean: float


class RolloutEvents(EventEnum):
    ROLLOUT_STARTED = "rollout_started"
    REWARD_MEASURED = "reward_measured", RewardMeasured


@pytest.fixture
def rollout(engine):
    engine.register_events(
        *RolloutEvents,
        event_to_attr={RolloutEvents.ROLLOUT_STARTED: "rollout", RolloutEvents.REWARD_MEASURED: "reward"},
    )
    return engine


# ----------------------------------------------------------------------------------------- changes in mid-fire


@pytest.mark.parametrize("phase", [Phase.COMPUTE, Phase.PERSIST], ids=["an earlier phase", "a later phase"])
@pytest.mark.parametrize("shape", ["plain", "with event", "filtered"])
def test_a_handler_added_while_its_event_fires_runs_in_that_fire(engine, phase, shape):
    seen = []

    @engine.on(Events.ITERATION_COMPLETED(once=2) if shape == "filtered" else Events.ITERATION_COMPLETED)
    def add(engine):
        if engine.state.iteration == 2:
            handler = (
                (lambda engine, event: seen.append(event.iteration))
                if shape == "with event"
                else (lambda engine: seen.append(engine.state.iteration))
            )
            engine.add_event_handler(Events.ITERATION_COMPLETED, handler, phase=phase)

    engine.run(range(4))
    assert seen == [2, 3, 4]


def test_what_an_added_handler_adds_runs_too(engine):
    seen = []

    def add(depth):
        seen.append(depth)
        if depth < 5:
            engine.add_event_handler(Events.STARTED, add, depth + 1)

    engine.add_event_handler(Events.STARTED, add, 1)
    engine.fire(Events.STARTED)
    assert seen == [1, 2, 3, 4, 5]


def test_an_added_handler_whose_filter_is_not_due_waits(engine):
    seen = []
    engine.on(Events.ITERATION_COMPLETED(once=2))(
        lambda engine: engine.add_event_handler(
            Events.ITERATION_COMPLETED(every=3), lambda: seen.append(engine.state.iteration)
        )
    )
    engine.run(range(6))
    assert seen == [3, 6]


@pytest.mark.parametrize("filtered", [False, True], ids=["unfiltered", "filtered"])
def test_a_handler_removed_while_its_event_fires_still_runs_once(engine, filtered):
    seen = []
    event = Events.ITERATION_COMPLETED(every=2) if filtered else Events.ITERATION_COMPLETED
    engine.on(Events.ITERATION_COMPLETED(once=2))(lambda: handle.remove())
    handle = engine.add_event_handler(event, lambda: seen.append(engine.state.iteration))
    engine.run(range(6))
    assert seen == ([2] if filtered else [1, 2])


@pytest.mark.parametrize("kind", [IgniteEngine, Engine], ids=["ignite", "ours"])
def test_adding_and_removing_in_mid_fire_works_as_in_ignite(kind):
    engine = kind(lambda engine, batch: None)
    seen = []

    def removed():
        seen.append("removed")

    @engine.on(IgniteEvents.STARTED)
    def first():
        seen.append("first")
        engine.remove_event_handler(removed, IgniteEvents.STARTED)

    @engine.on(IgniteEvents.COMPLETED)
    def adding():
        engine.add_event_handler(IgniteEvents.COMPLETED, lambda: seen.append("added"))

    engine.add_event_handler(IgniteEvents.STARTED, removed)
    engine.run([1])
    assert seen == ["first", "removed", "added"]


# ------------------------------------------------------------------------------------------------- nesting


def test_a_nested_event_comes_between_its_causes_handlers(rollout, recorder):
    seen = []
    rollout.on(RolloutEvents.ROLLOUT_STARTED)(lambda: seen.append("before"))
    rollout.on(RolloutEvents.ROLLOUT_STARTED)(
        lambda engine: engine.fire(RolloutEvents.REWARD_MEASURED, RewardMeasured(mean=1.0))
    )
    rollout.on(RolloutEvents.ROLLOUT_STARTED)(lambda engine, event: seen.append(("after", event.seq)))
    rollout.on(RolloutEvents.REWARD_MEASURED)(lambda engine, event: seen.append(("inside", event.seq)))
    rollout.fire(RolloutEvents.ROLLOUT_STARTED)
    assert seen == ["before", ("inside", 2), ("after", 1)]


def test_an_event_may_fire_itself(rollout):
    seen = []
    event = RolloutEvents.ROLLOUT_STARTED

    @rollout.on(event(every=1))
    def again(engine, event):
        seen.append(engine.state.rollout)
        if engine.state.rollout < 4:
            engine.fire(RolloutEvents.ROLLOUT_STARTED)

    rollout.on(event(every=2))(lambda engine: seen.append(("even", engine.state.rollout)))
    rollout.fire(event)
    assert [value for value in seen if isinstance(value, int)] == [1, 2, 3, 4]
    assert ("even", 4) in seen


# -------------------------------------------------------------------------------- subclasses of the Engine


class Watching(Engine):
    def __init__(self, *args, **kwargs):
        self.watched = []
        super().__init__(*args, **kwargs)

    def _fire_event(self, event_name, *args, **kwargs):
        self.watched.append((event_name.name, args, kwargs))
        super()._fire_event(event_name, *args, **kwargs)


def test_a_subclass_overriding_fire_event_sees_every_event_with_and_without_receivers():
    engine = Watching(lambda engine, batch: None)
    engine.run([1, 2])
    step = ["GET_BATCH_STARTED", "GET_BATCH_COMPLETED", "ITERATION_STARTED", "ITERATION_COMPLETED"]
    assert [name for name, _, _ in engine.watched] == [
        "STARTED",
        "EPOCH_STARTED",
        *step,
        *step,
        "EPOCH_COMPLETED",
        "COMPLETED",
    ]


def test_such_a_subclass_gets_ignites_own_arguments_and_its_handlers_the_payload():
    engine = Watching(lambda engine, batch: None)
    seen = []
    engine.on(Events.TERMINATE_SINGLE_EPOCH)(lambda engine, event: seen.append(event.payload.iter_counter))
    engine.on(Events.EXCEPTION_RAISED)(lambda engine, event: seen.append(type(event.payload)))
    engine.on(Events.ITERATION_COMPLETED(once=1))(engine.terminate_epoch)
    engine.on(Events.COMPLETED)(lambda: {}["missing"])
    engine.run([1, 2])
    assert ("TERMINATE_SINGLE_EPOCH", (), {"iter_counter": 1}) in engine.watched
    assert [type(args[0]) for name, args, _ in engine.watched if name == "EXCEPTION_RAISED"] == [KeyError]
    assert seen == [1, ExceptionRaised]


def test_such_a_subclass_fires_the_same_numbers(make_engine):
    numbers = []
    for watched in (Watching(lambda engine, batch: None), make_engine()):
        seen = []
        watched.on(Events.ITERATION_COMPLETED | Events.COMPLETED)(
            lambda engine, event, seen=seen: seen.append(event.seq)
        )
        watched.run([1, 2])
        watched.fire_event(Events.COMPLETED)
        numbers.append(seen)
    assert numbers[0] == numbers[1]


def test_such_a_subclass_may_fire_another_event_first():
    class Announcing(Engine):
        def _fire_event(self, event_name, *args, **kwargs):
            if event_name == Events.TERMINATE:
                self.fire_event(Events.INTERRUPT)
            super()._fire_event(event_name, *args, **kwargs)

    engine = Announcing(lambda engine, batch: None)
    seen = []
    engine.on(Events.INTERRUPT | Events.TERMINATE)(lambda engine, event: seen.append((event.type, event.payload)))
    engine.on(Events.ITERATION_COMPLETED)(lambda: engine.terminate(reason="why"))
    engine.run([1, 2])
    assert seen == [("interrupt", None), ("terminate", Terminated(reason="why"))]


def test_a_number_belongs_to_its_event_also_where_a_subclass_fires_another_first():
    class Announcing(Engine):
        def _fire_event(self, event_name, *args, **kwargs):
            if event_name == Events.STARTED:
                self.fire_event(Events.INTERRUPT)
            super()._fire_event(event_name, *args, **kwargs)

    engine = Announcing(lambda engine, batch: None)
    seen = []
    engine.on(Events.STARTED | Events.INTERRUPT)(lambda engine, event: seen.append((event.type, event.seq)))
    engine.fire(Events.STARTED)
    assert seen == [("interrupt", 2), ("started", 1)]


def test_filters_hold_in_such_a_subclass_too():
    engine = Watching(lambda engine, batch: None)
    seen = []
    engine.on(Events.ITERATION_COMPLETED(every=2))(lambda: seen.append(engine.state.iteration))
    engine.run(range(5))
    assert seen == [2, 4]
