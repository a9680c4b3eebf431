"""The bus: one order of events, phases, senders, lifetimes, and what blinker documents."""

from __future__ import annotations

import gc
import weakref

import pytest
from ignite.engine import Events as IgniteEvents

from pulsetrain.engine import FIRST, LAST, EventBus, EventEnum, Events, Phase, Subscription


class Custom(EventEnum):
    HAPPENED = "happened"


# ----------------------------------------------------------------------------------------- one total order


def test_two_engines_on_one_bus_share_one_order_of_events(make_engine, recorder):
    bus = EventBus()
    recorder.attach(bus)
    trainer, evaluator = make_engine(name="trainer", bus=bus), make_engine(name="evaluator", bus=bus)
    trainer.on(Events.EPOCH_COMPLETED)(lambda: evaluator.run([1]))
    trainer.run([1, 2], max_epochs=2)
    assert [event.seq for event in recorder.events] == sorted({event.seq for event in recorder.events})
    story = [(event.engine, event.type) for event in recorder.events]
    cause = story.index(("trainer", "epoch_completed"))
    assert story[cause + 1] == ("evaluator", "started")  # an event caused by a handler follows its cause
    assert story.count(("evaluator", "completed")) == 2


def test_events_without_receivers_are_numbered_too(make_engine, make_recorder):
    everything, little = make_engine(), make_engine()
    all_of_it = make_recorder().attach(everything)
    some_of_it = make_recorder().attach(little, Events.EPOCH_COMPLETED, Events.COMPLETED)
    for engine in (everything, little):
        engine.run([1, 2, 3], max_epochs=2)
    assert [event.seq for event in all_of_it.events] == list(range(1, len(all_of_it.events) + 1))
    expected = [(e.seq, e.type) for e in all_of_it.events if e.type in ("epoch_completed", "completed")]
    assert [(event.seq, event.type) for event in some_of_it.events] == expected


def test_a_filter_that_is_not_due_changes_no_number(make_engine):
    engine = make_engine()
    seen = []
    engine.on(Events.ITERATION_COMPLETED(every=3))(lambda engine, event: seen.append(event.seq))
    engine.run(range(6))
    # STARTED, EPOCH_STARTED, then four events an iteration
    assert seen == [2 + 4 * 3, 2 + 4 * 6]


def test_two_buses_count_apart(make_engine, make_recorder):
    first, second = make_engine(), make_engine()
    records = [make_recorder().attach(engine) for engine in (first, second)]
    first.run([1])
    second.run([1])
    assert records[0].events[0].seq == records[1].events[0].seq == 1


# ---------------------------------------------------------------------------------------- order of handlers


def test_phases_run_in_order_and_inside_a_phase_registration_decides(engine):
    seen = []
    for phase in (Phase.PERSIST, Phase.ACT, Phase.COMPUTE, Phase.OBSERVE):
        for number in (1, 2):
            engine.add_event_handler(
                Events.STARTED, lambda phase=phase, number=number: seen.append((phase, number)), phase=phase
            )
    engine.run([1])
    assert seen == [(phase, number) for phase in Phase for number in (1, 2)]
    assert [phase.name for phase in sorted(Phase)] == ["COMPUTE", "ACT", "OBSERVE", "PERSIST"]


def test_the_default_phase_is_act(engine):
    seen = []
    engine.on(Events.STARTED, phase=Phase.OBSERVE)(lambda: seen.append("observe"))
    engine.on(Events.STARTED)(lambda: seen.append("act"))
    engine.bus.subscribe(Events.STARTED, lambda: seen.append("bus"))
    engine.on(Events.STARTED, phase=Phase.COMPUTE)(lambda: seen.append("compute"))
    engine.run([1])
    assert seen == ["compute", "act", "bus", "observe"]


def test_engine_bus_and_plain_receivers_keep_the_order_of_registration(engine):
    seen = []

    def plain(sender, event):
        seen.append("plain")

    def late(sender, event):
        seen.append("late")

    signal = engine.bus.signal(Events.STARTED)
    signal.connect(plain)
    engine.on(Events.STARTED)(lambda: seen.append("engine"))
    engine.bus.subscribe(Events.STARTED, lambda: seen.append("bus"))
    signal.connect(late)
    engine.run([1])
    assert seen == ["plain", "engine", "bus", "late"]


def test_a_thousand_handlers_run_in_the_order_of_registration(engine):
    seen = []
    for number in range(1000):
        engine.on(Events.STARTED)(lambda number=number: seen.append(number))
    engine.run([1])
    assert seen == list(range(1000))


def test_a_handler_registered_twice_runs_twice(engine):
    seen = []

    def handler():
        seen.append(1)

    engine.add_event_handler(Events.STARTED, handler)
    engine.add_event_handler(Events.STARTED, handler)
    engine.bus.subscribe(Events.STARTED, handler)
    engine.bus.subscribe(Events.STARTED, handler)
    engine.run([1])
    assert len(seen) == 4


# -------------------------------------------------------------------------------------------------- senders


def test_a_subscription_without_sender_receives_every_engine_even_later_ones(make_engine):
    bus = EventBus()
    seen = []
    bus.subscribe(Events.COMPLETED, lambda engine: seen.append(engine.name))
    for name in ("first", "second"):
        make_engine(name=name, bus=bus).run([1])
    assert seen == ["first", "second"]


def test_a_subscription_with_a_sender_receives_only_that_engine(make_engine):
    bus = EventBus()
    first, second = make_engine(bus=bus), make_engine(bus=bus)
    seen = []
    bus.subscribe(Events.COMPLETED, lambda engine: seen.append(engine), sender=second)
    first.run([1])
    second.run([1])
    assert seen == [second]


def test_a_handler_of_one_engine_receives_nothing_of_another_on_the_same_bus(make_engine):
    bus = EventBus()
    first, second = make_engine(bus=bus), make_engine(bus=bus)
    seen = []
    first.on(Events.COMPLETED)(lambda engine: seen.append(engine))
    second.run([1])
    assert seen == []
    assert not second.hears(Events.COMPLETED)


def test_once_on_a_bus_is_once_for_each_engine(make_engine):
    bus = EventBus()
    engines = [make_engine(bus=bus) for _ in range(2)]
    seen = []
    bus.subscribe(Events.ITERATION_COMPLETED(once=2), lambda engine: seen.append(engine))
    for engine in engines:
        engine.run(range(4))
    assert seen == engines


def test_subscribe_passes_arguments_on(engine):
    seen = []
    engine.bus.subscribe(Events.STARTED, lambda *args, **kwargs: seen.append((args, kwargs)), 1, key=2)
    engine.run([1])
    assert seen == [((engine, 1), {"key": 2})]


def test_the_bus_takes_ignites_events_and_names_too(engine):
    seen = []
    engine.bus.subscribe(IgniteEvents.STARTED, lambda: seen.append("ignite's"))
    engine.bus.subscribe("STARTED", lambda: seen.append("name"))
    engine.bus.subscribe(IgniteEvents.EXCEPTION_RAISED, lambda engine, error: seen.append(str(error)))
    engine.on(Events.COMPLETED)(lambda: {}["missing"])
    with pytest.raises(KeyError):
        engine.run([1])
    assert seen == ["ignite's", "name", "'missing'"]


@pytest.mark.parametrize("event", [None, 3, Events], ids=str)
def test_subscribing_to_what_is_not_an_event_is_a_type_error(event):
    with pytest.raises(TypeError, match="not an event"):
        EventBus().subscribe(event, lambda: None)


def test_a_joined_list_is_refused_by_subscribe():
    with pytest.raises(TypeError, match="one event per subscription"):
        EventBus().subscribe(Events.STARTED | Events.COMPLETED, lambda: None)


def test_an_unknown_phase_or_on_error_is_a_value_error_and_registers_nothing(engine):
    with pytest.raises(ValueError, match=r"phase=9: choose Phase\.COMPUTE"):
        engine.on(Events.STARTED, phase=9)(lambda: None)
    with pytest.raises(ValueError, match="on_error='ignore': choose 'raise' or 'warn'"):
        engine.on(Events.STARTED, on_error="ignore")(lambda: None)
    assert not engine.hears(Events.STARTED)


# ------------------------------------------------------------------------------------- undoing and lifetimes


def test_cancel_unsubscribes_and_cancelling_twice_is_once(engine):
    seen = []
    subscription = engine.bus.subscribe(Events.STARTED, lambda: seen.append(1))
    assert isinstance(subscription, Subscription)
    engine.run([1])
    subscription.cancel()
    subscription.cancel()
    engine.run([1])
    assert seen == [1]
    assert not engine.hears(Events.STARTED)


def test_a_subscription_is_a_context_manager(engine):
    seen = []
    with engine.bus.subscribe(Events.STARTED, lambda: seen.append(1)):
        engine.run([1])
    engine.run([1])
    assert seen == [1]


def test_a_subscription_holds_its_handler_strongly(engine):
    seen = []

    class Owner:
        def receive(self):
            seen.append(1)

    engine.bus.subscribe(Events.STARTED, Owner().receive)
    engine.on(Events.STARTED)(Owner().receive)
    gc.collect()
    engine.run([1])
    assert seen == [1, 1]


def tables(bus):
    """What the bus's signals still hold: receivers, by sender, by receiver, weak senders, what is compiled."""
    held = {}
    for signal in bus.values():
        sizes = [len(signal.receivers), len(signal._by_receiver), len(signal._weak_senders), len(signal._compiled)]
        sizes += [len(signal._plain), sum(map(len, signal._by_sender.values()))]
        if any(sizes):
            held[signal.name] = sizes
    return held


def test_an_engine_is_freed_at_once_without_the_collector(make_engine):
    bus = EventBus()
    gc.disable()
    try:
        for use in ("nothing", "handlers", "run", "failed run"):
            engine = make_engine(bus=bus)
            if use != "nothing":
                engine.on(Events.STARTED)(lambda: None)
                engine.on(Events.ITERATION_COMPLETED(every=2))(lambda engine, event: None)
                bus.subscribe(Events.COMPLETED, lambda engine: None, sender=engine)
            if use == "run":
                engine.run([1, 2])
            if use == "failed run":
                engine.on(Events.COMPLETED)(lambda: {}["missing"])
                with pytest.raises(KeyError):
                    engine.run([1])
            reference = weakref.ref(engine)
            del engine
            assert reference() is None, use
    finally:
        gc.enable()


def test_a_dead_engine_leaves_nothing_in_the_tables_of_its_bus(make_engine):
    bus = EventBus()
    engine = make_engine(bus=bus)

    def plain(sender, event):
        pass

    engine.on(Events.STARTED)(lambda: None)
    bus.subscribe(Events.COMPLETED, lambda: None, sender=engine)
    bus.signal(Events.EPOCH_STARTED).connect(plain, sender=engine)
    bus.signal(Events.EPOCH_COMPLETED).connect(plain, sender=engine, weak=False)
    engine.run([1])
    assert tables(bus)
    del engine
    assert tables(bus) == {}
    assert bus.engines == []
    assert bus._engines == {}


def test_a_subscription_to_every_engine_outlives_one_of_them(make_engine):
    bus = EventBus()
    seen = []
    bus.subscribe(Events.STARTED, lambda engine: seen.append(engine.name))
    make_engine(bus=bus, name="gone").run([1])
    make_engine(bus=bus, name="next").run([1])
    assert seen == ["gone", "next"]


def test_a_strong_cycle_through_a_handler_is_collected(make_engine):
    bus = EventBus()
    engine = make_engine(bus=bus)
    engine.on(Events.STARTED)(engine.terminate)  # the bus holds the handler, the handler its engine
    reference = weakref.ref(engine)
    del engine
    assert reference() is not None  # alive as long as the bus lives
    del bus
    gc.collect()
    assert reference() is None


# ---------------------------------------------------------------------------------------- names and identity


def test_names_are_unique_on_a_bus(make_engine):
    bus = EventBus()
    first, second, third = (make_engine(bus=bus, name=name) for name in (None, None, "mine"))
    assert [first.name, second.name, third.name] == ["engine", "engine_2", "mine"]
    with pytest.raises(ValueError, match=r"Engine\(name='mine'\): this bus has an engine of that name"):
        make_engine(bus=bus, name="mine")
    del second
    assert make_engine(bus=bus).name == "engine_2"


def test_an_empty_bus_passed_explicitly_is_used(make_engine):
    bus = EventBus()  # an empty blinker namespace is falsy
    assert len(bus) == 0
    assert bus
    assert make_engine(bus=bus).bus is bus


def test_a_bus_equals_only_itself():
    first, second = EventBus(), EventBus()
    assert first != second
    assert len({first, second}) == 2


def test_a_bus_shows_its_engines(make_engine):
    bus = EventBus()
    assert repr(bus) == "<EventBus of no engine>"
    kept = [make_engine(bus=bus, name=name) for name in ("trainer", "evaluator")]
    assert bus.engines == kept
    assert repr(bus) == "<EventBus of trainer, evaluator>"


def test_first_and_last_run_before_and_after_the_rest_of_their_phase_in_order_of_registration(engine):
    ran: list[str] = []

    def note(name: str) -> None:
        ran.append(name)

    for name, phase, order in (
        ("rest", Phase.ACT, None),
        ("last 1", Phase.ACT, LAST),
        ("first 1", Phase.ACT, FIRST),
        ("next phase, first", Phase.OBSERVE, FIRST),
        ("last 2", Phase.ACT, LAST),
        ("first 2", Phase.ACT, FIRST),
        ("rest 2", Phase.ACT, None),
    ):
        engine.bus.subscribe(Events.STARTED, note, name, phase=phase, order=order)
    engine.fire(Events.STARTED)
    assert ran == ["first 1", "first 2", "rest", "rest 2", "last 1", "last 2", "next phase, first"]
