"""Firing: payloads, counters, records, changes in mid-fire, nesting, subclasses that watch."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest
import torch
from ignite.engine import Events as IgniteEvents

import pulsetrain.engine.events.dispatch as dispatch_module
from pulsetrain.engine import Event, EventBus, EventEnum, Events, Phase
from pulsetrain.engine.events.payloads import (
    GradientsReady,
    MetricsLogged,
    OptimizerStepCompleted,
    Terminated,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardMeasured:
    mean: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BetterReward(RewardMeasured):
    pass


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


# ------------------------------------------------------------------------------------------------- payloads


def test_a_payload_reaches_the_handler_as_the_object_that_was_fired(rollout):
    seen = []
    rollout.on(RolloutEvents.REWARD_MEASURED)(lambda engine, event: seen.append(event.payload))
    payload = RewardMeasured(mean=0.7)
    rollout.fire(RolloutEvents.REWARD_MEASURED, payload)
    assert seen[0] is payload


@pytest.mark.parametrize("subscribed", [False, True], ids=["unsubscribed", "subscribed"])
@pytest.mark.parametrize(
    ("event", "payload"),
    [
        (RolloutEvents.REWARD_MEASURED, None),
        (RolloutEvents.REWARD_MEASURED, {"mean": 0.7}),
        (RolloutEvents.REWARD_MEASURED, Terminated(reason="other")),
        (RolloutEvents.REWARD_MEASURED, BetterReward(mean=0.7)),
        (RolloutEvents.REWARD_MEASURED, RewardMeasured),
        (RolloutEvents.ROLLOUT_STARTED, RewardMeasured(mean=0.7)),
        (Events.EPOCH_COMPLETED, 0),
        (Events.TERMINATE, "reason"),
    ],
    ids=str,
)
def test_a_payload_of_another_type_is_a_type_error_with_and_without_receivers(rollout, event, payload, subscribed):
    if subscribed:
        rollout.on(event)(lambda engine, event: None)
    for send in (rollout.fire, rollout.post):
        with pytest.raises(TypeError, match=r"this event carries \w+") as caught:
            send(event, payload)
        assert str(event) in str(caught.value)
        assert type(payload).__name__ in str(caught.value)
    assert rollout.state.reward == 0  # refused before it was counted
    assert not rollout._posts


@pytest.mark.parametrize("event", ["nothing", None, 3, RolloutEvents.ROLLOUT_STARTED], ids=str)
def test_firing_or_posting_an_event_that_is_not_registered_is_refused_at_once(engine, event):
    for send in (engine.fire, engine.post, engine.hears, engine.fire_event):
        with pytest.raises((ValueError, TypeError), match=r"not an event|not a valid event"):
            send(event)


def test_registering_the_enum_instead_of_its_members_is_a_type_error(engine):
    with pytest.raises(TypeError, match=r"register_events\(\*MyEvents\)"):
        engine.register_events(RolloutEvents)
    with pytest.raises(ValueError, match="Expected event_to_attr to be dictionary"):
        engine.register_events(*RolloutEvents, event_to_attr="rollout")


def test_events_may_be_strings_as_in_ignite(engine):
    seen = []
    engine.register_events("sampled", event_to_attr={"sampled": "samples"})
    engine.on("sampled")(lambda engine, event: seen.append((event.type, engine.state.samples)))
    engine.fire("sampled")
    engine.fire_event("sampled")
    assert seen == [("sampled", 1), ("sampled", 1)]
    assert engine.has_registered_events("sampled")
    assert not engine.has_registered_events("other")


# ------------------------------------------------------------------------------------------------- counters


def test_fire_advances_the_counter_before_filters_look(rollout):
    seen = []
    rollout.on(RolloutEvents.REWARD_MEASURED(every=2))(lambda engine: seen.append(engine.state.reward))
    for _ in range(5):
        rollout.fire(RolloutEvents.REWARD_MEASURED, RewardMeasured(mean=0.0))
    assert seen == [2, 4]
    assert rollout.state.reward == 5
    assert rollout.state.rollout == 0


def test_an_event_without_receivers_is_counted_too(rollout):
    rollout.fire(RolloutEvents.ROLLOUT_STARTED)
    assert rollout.state.rollout == 1


def test_counters_belong_to_one_engine(make_engine):
    class Counted(EventEnum):
        HAPPENED = "happened"

    bus = EventBus()
    one, other, third = (make_engine(bus=bus) for _ in range(3))
    one.register_events(*Counted, event_to_attr={Counted.HAPPENED: "ones"})
    other.register_events(*Counted, event_to_attr={Counted.HAPPENED: "others"})
    third.register_events(*Counted)
    one.fire(Counted.HAPPENED)
    one.fire(Counted.HAPPENED)
    other.fire(Counted.HAPPENED)
    third.fire(Counted.HAPPENED)
    assert (one.state.ones, other.state.others) == (2, 1)
    assert not hasattr(one.state, "others")
    assert third.counter_of(Counted.HAPPENED) is None


def test_the_first_registered_of_two_events_that_share_a_counter_advances_it(engine):
    class Phased(EventEnum):
        BEGUN = "begun"
        ENDED = "ended"

    engine.register_events(*Phased, event_to_attr={Phased.BEGUN: "phase", Phased.ENDED: "phase"})
    seen = []
    engine.on(Phased.BEGUN(every=2) | Phased.ENDED(every=2))(
        lambda engine, event: seen.append((event.type, engine.state.phase))
    )
    for _ in range(3):
        engine.fire(Phased.BEGUN)
        engine.fire(Phased.ENDED)
    assert seen == [("begun", 2), ("ended", 2)]


def test_an_updates_two_events_carry_one_number(engine):
    seen = []
    both = Events.GRADIENTS_READY(every=2) | Events.OPTIMIZER_STEP_COMPLETED(every=2)
    engine.on(both)(lambda engine, event: seen.append((event.type, engine.state.update)))
    for _ in range(4):
        engine.fire(Events.GRADIENTS_READY, GradientsReady(grad_norm=torch.tensor(1.0)))
        engine.fire(Events.OPTIMIZER_STEP_COMPLETED, OptimizerStepCompleted(learning_rates=(0.1,)))
    assert seen == [(kind, n) for n in (2, 4) for kind in ("gradients_ready", "optimizer_step_completed")]


def test_the_loops_own_counters_are_the_loops_to_move(engine):
    seen = []
    engine.on(Events.METRICS_LOGGED(every=2))(lambda engine: seen.append(engine.state.iteration))
    engine.on(Events.ITERATION_COMPLETED)(lambda engine: engine.fire(Events.METRICS_LOGGED, MetricsLogged(metrics={})))
    engine.run(range(5))
    assert seen == [2, 4]
    engine.fire(Events.ITERATION_COMPLETED)
    engine.fire(Events.EPOCH_STARTED)
    assert (engine.state.epoch, engine.state.iteration) == (1, 5)


def test_fire_event_leaves_the_counter_to_the_caller_as_ignite_does(rollout):
    seen = []
    rollout.on(RolloutEvents.ROLLOUT_STARTED(every=2))(lambda engine: seen.append(engine.state.rollout))
    for value in (1, 2, 3, 6):
        rollout.state.rollout = value
        rollout.fire_event(RolloutEvents.ROLLOUT_STARTED)
    assert seen == [2, 6]
    assert rollout.state.rollout == 6


def test_a_handler_that_moves_the_counter_is_seen_by_the_filters_after_it(rollout):
    seen = []
    event = RolloutEvents.ROLLOUT_STARTED

    @rollout.on(event)
    def skip(engine):
        engine.state.rollout += 1

    rollout.on(event(every=3))(lambda engine: seen.append(engine.state.rollout))
    for _ in range(6):
        rollout.fire(event)  # 1 -> 2, 3 -> 4, 5 -> 6 ...
    assert seen == [6, 12]


def test_a_counter_registered_later_counts_from_then_on(engine):
    engine.register_events(*RolloutEvents)
    engine.fire(RolloutEvents.ROLLOUT_STARTED)
    engine.register_events(RolloutEvents.ROLLOUT_STARTED, event_to_attr={RolloutEvents.ROLLOUT_STARTED: "rollout"})
    seen = []
    engine.on(RolloutEvents.ROLLOUT_STARTED(every=2))(lambda engine: seen.append(engine.state.rollout))
    for _ in range(4):
        engine.fire(RolloutEvents.ROLLOUT_STARTED)
    assert seen == [2, 4]


def test_the_state_answers_for_counters_as_ignites_does(rollout):
    rollout.fire(RolloutEvents.ROLLOUT_STARTED)
    assert rollout.state.get_event_attrib_value(RolloutEvents.ROLLOUT_STARTED) == 1
    assert rollout.state.get_event_attrib_value(IgniteEvents.EPOCH_STARTED(every=3)) == 0
    with pytest.raises(RuntimeError, match="Unknown event name"):
        rollout.state.get_event_attrib_value(Events.TERMINATE)


# ---------------------------------------------------------------------------------------------- the record


def test_the_record_says_what_happened_where_and_when(make_engine):
    trainer = make_engine(name="trainer")
    seen = []
    trainer.on(Events.ITERATION_COMPLETED(once=3))(lambda engine, event: seen.append(event))
    before = time.time_ns()
    trainer.run(range(2), max_epochs=2)
    after = time.time_ns()
    [event] = seen
    assert isinstance(event, Event)
    # STARTED; EPOCH_STARTED, 2 x 4, EPOCH_COMPLETED; EPOCH_STARTED, 4 and DATALOADER_STOP_ITERATION
    assert event.seq == 1 + 10 + 6
    assert (event.engine, event.type, event.epoch, event.iteration) == ("trainer", "iteration_completed", 2, 3)
    assert event.payload is None
    assert before <= event.time_ns <= after


def test_one_record_serves_every_receiver_of_a_firing(engine):
    seen = []

    def plain(sender, event):
        seen.append(event)

    engine.on(Events.STARTED)(lambda engine, event: seen.append(event))
    engine.bus.subscribe(Events.STARTED, lambda engine, event: seen.append(event), phase=Phase.PERSIST)
    engine.bus.signal(Events.STARTED).connect(plain)
    engine.run([1])
    assert len(seen) == 3
    assert seen[0] is seen[1] is seen[2]


def test_the_record_is_built_only_when_a_receiver_wants_it(engine, monkeypatch):
    built = []
    monkeypatch.setattr(dispatch_module, "Event", lambda *args: built.append(1) or Event(*args))
    handle = engine.add_event_handler(Events.ITERATION_COMPLETED(every=2), lambda: None)
    engine.on(Events.ITERATION_COMPLETED)(lambda engine: None)
    engine.run(range(10))
    assert not built
    handle.remove()
    engine.on(Events.ITERATION_COMPLETED(every=5))(lambda engine, event: None)
    engine.run(range(10))
    assert len(built) == 3  # the filter is applied at the first firing, then at 5 and at 10


def test_a_handler_added_after_a_nested_event_gets_its_own_events_number(rollout):
    seen = []

    @rollout.on(RolloutEvents.ROLLOUT_STARTED)
    def first(engine):
        engine.fire(Events.EPOCH_STARTED)
        engine.add_event_handler(RolloutEvents.ROLLOUT_STARTED, lambda engine, event: seen.append(event.seq))

    rollout.fire(RolloutEvents.ROLLOUT_STARTED)
    assert seen == [1]


def test_hears_reports_whether_a_handler_is_subscribed(rollout):
    event = RolloutEvents.REWARD_MEASURED
    assert not rollout.hears(event)
    handle = rollout.on(event) and rollout.add_event_handler(event, lambda: None)
    assert rollout.hears(event)
    handle.remove()
    assert not rollout.hears(event)
    with rollout.bus.subscribe(event, lambda: None):
        assert rollout.hears(event)
    assert not rollout.hears(event)


def test_hears_ignores_handlers_of_other_engines(make_engine):
    bus = EventBus()
    one, other = make_engine(bus=bus), make_engine(bus=bus)
    bus.subscribe(Events.STARTED, lambda: None, sender=one)
    assert one.hears(Events.STARTED)
    assert not other.hears(Events.STARTED)
