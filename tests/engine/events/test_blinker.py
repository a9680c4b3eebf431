"""The bus as a blinker namespace: what blinker documents holds for our signals."""

from __future__ import annotations

import gc

import blinker
import pytest
from ignite.engine import Events as IgniteEvents

from pulsetrain.engine import Event, EventBus, EventEnum, Events, Phase


class Custom(EventEnum):
    HAPPENED = "happened"


def test_a_bus_is_a_namespace_of_named_signals():
    bus = EventBus()
    assert isinstance(bus, blinker.Namespace)
    signal = bus.signal(Events.STARTED)
    assert isinstance(signal, blinker.NamedSignal)
    assert signal.name == "started"
    assert (
        bus.signal(Events.STARTED) is bus.signal(IgniteEvents.STARTED) is bus.signal(Events.STARTED(every=2)) is signal
    )
    assert bus.signal("STARTED") is signal
    assert bus.signal(Custom.HAPPENED) is not signal
    assert signal in bus.values()


def test_a_signal_keeps_the_documentation_it_was_made_with():
    assert EventBus().signal(Custom.HAPPENED, "when it happens").__doc__ == "when it happens"


def test_a_plain_receiver_is_called_with_sender_and_event(engine):
    seen = []

    def receiver(sender, event):
        seen.append((sender, event))

    engine.bus.signal(Events.EPOCH_COMPLETED).connect(receiver)
    engine.run([1, 2])
    [(sender, event)] = seen
    assert sender is engine
    assert isinstance(event, Event)
    assert (event.type, event.epoch, event.iteration) == ("epoch_completed", 1, 2)


def test_a_plain_receiver_may_take_keywords_only(engine):
    seen = []

    def receiver(sender, **kwargs):
        seen.append(kwargs)

    engine.bus.signal(Events.STARTED).connect(receiver)
    engine.run([1])
    assert list(seen[0]) == ["event"]


def test_a_plain_receiver_runs_in_the_phase_act(engine):
    seen = []

    def receiver(sender, event):
        seen.append("plain")

    engine.bus.signal(Events.STARTED).connect(receiver)
    engine.on(Events.STARTED, phase=Phase.COMPUTE)(lambda: seen.append("compute"))
    engine.on(Events.STARTED, phase=Phase.OBSERVE)(lambda: seen.append("observe"))
    engine.run([1])
    assert seen == ["compute", "plain", "observe"]


@pytest.mark.slow
def test_a_plain_receiver_is_weak_by_default(engine):
    seen = []

    def connect():
        def receiver(sender, event):
            seen.append(1)

        engine.bus.signal(Events.STARTED).connect(receiver)
        engine.run([1])

    connect()
    gc.collect()
    engine.run([1])
    assert seen == [1]
    assert not engine.hears(Events.STARTED)


@pytest.mark.slow
def test_a_method_as_a_weak_receiver_lives_as_long_as_its_object(engine):
    seen = []

    class Owner:
        def receive(self, sender, event):
            seen.append(1)

    owner = Owner()
    engine.bus.signal(Events.STARTED).connect(owner.receive)
    gc.collect()
    engine.run([1])
    del owner
    gc.collect()
    engine.run([1])
    assert seen == [1]


def test_a_strong_receiver_stays_until_it_is_disconnected(engine):
    seen = []

    def connect():
        def receiver(sender, event):
            seen.append(1)

        return engine.bus.signal(Events.STARTED).connect(receiver, weak=False)

    receiver = connect()
    gc.collect()
    engine.run([1])
    engine.bus.signal(Events.STARTED).disconnect(receiver)
    engine.run([1])
    assert seen == [1]


def test_connecting_the_same_receiver_twice_is_once(engine):
    seen = []

    def receiver(sender, event):
        seen.append(1)

    engine.bus.signal(Events.STARTED).connect(receiver)
    engine.bus.signal(Events.STARTED).connect(receiver)
    engine.run([1])
    assert seen == [1]


def test_connect_with_a_sender_and_connect_via_receive_only_that_engine(make_engine):
    bus = EventBus()
    first, second = make_engine(bus=bus), make_engine(bus=bus)
    seen = []

    def receiver(sender, event):
        seen.append(("connect", sender))

    bus.signal(Events.STARTED).connect(receiver, sender=first)

    @bus.signal(Events.STARTED).connect_via(second)
    def other(sender, event):
        seen.append(("connect_via", sender))

    first.run([1])
    second.run([1])
    assert seen == [("connect", first), ("connect_via", second)]


def test_connected_to_subscribes_for_the_length_of_a_block(engine):
    seen = []

    def receiver(sender, event):
        seen.append(1)

    with engine.bus.signal(Events.STARTED).connected_to(receiver):
        engine.run([1])
    engine.run([1])
    assert seen == [1]


def test_a_plain_receiver_that_raises_ends_the_run_with_its_error(engine):
    def receiver(sender, event):
        raise KeyError("mine")

    engine.bus.signal(Events.STARTED).connect(receiver)
    with pytest.raises(KeyError, match="mine"):
        engine.run([1])


def test_muted_silences_only_receivers_of_that_event(engine):
    seen = []

    def receiver(sender, event):
        seen.append("plain")

    signal = engine.bus.signal(Events.STARTED)
    signal.connect(receiver)
    engine.on(Events.STARTED)(lambda: seen.append("engine"))
    engine.on(Events.STARTED(every=1))(lambda: seen.append("filtered"))
    engine.bus.subscribe(Events.STARTED, lambda: seen.append("bus"))
    engine.on(Events.COMPLETED)(lambda: seen.append("completed"))
    with signal.muted():
        assert signal.is_muted
        assert not engine.hears(Events.STARTED)
        engine.run([1])
    assert seen == ["completed"]
    assert not signal.is_muted
    engine.run([1])
    assert seen == ["completed", "plain", "engine", "filtered", "bus", "completed"]


def test_muted_nests_and_ends_with_an_exception_too(engine):
    seen = []
    engine.on(Events.STARTED)(lambda: seen.append(1))
    signal = engine.bus.signal(Events.STARTED)
    with signal.muted():
        with signal.muted():
            pass
        engine.fire(Events.STARTED)
    assert seen == []
    with pytest.raises(KeyError), signal.muted():
        raise KeyError
    engine.fire(Events.STARTED)
    assert seen == [1]


def test_muting_and_registering_in_the_muted_block_leave_both_right(engine):
    seen = []
    signal = engine.bus.signal(Events.STARTED)
    with signal.muted():
        engine.on(Events.STARTED)(lambda: seen.append(1))
        engine.fire(Events.STARTED)
    engine.fire(Events.STARTED)
    assert seen == [1]


def test_a_muted_event_still_takes_its_number(engine):
    seen = []
    engine.on(Events.COMPLETED)(lambda engine, event: seen.append(event.seq))
    engine.on(Events.STARTED)(lambda: None)
    engine.run([1])
    with engine.bus.signal(Events.STARTED).muted():
        engine.run([1])
    assert seen[1] == 2 * seen[0]


def test_blinkers_is_muted_attribute_works_as_a_switch(engine):
    seen = []
    engine.on(Events.STARTED)(lambda: seen.append(1))
    signal = engine.bus.signal(Events.STARTED)
    signal.is_muted = True
    engine.fire(Events.STARTED)
    signal.is_muted = False
    engine.fire(Events.STARTED)
    assert seen == [1]


def test_send_calls_the_receivers_in_order_and_returns_them_with_their_answers(engine):
    def receiver(sender, event=None):
        return "plain"

    signal = engine.bus.signal(Events.STARTED)
    late = engine.bus.subscribe(Events.STARTED, lambda: "late", phase=Phase.PERSIST)
    signal.connect(receiver)
    early = engine.bus.subscribe(Events.STARTED, lambda engine, event: "early", phase=Phase.COMPUTE)
    assert signal.send(engine) == [(early, "early"), (receiver, "plain"), (late, "late")]
    with signal.muted():
        assert signal.send(engine) == []


def test_receivers_for_leaves_out_receivers_of_other_engines(make_engine):
    bus = EventBus()
    first, second = make_engine(bus=bus), make_engine(bus=bus)
    everyone = bus.subscribe(Events.STARTED, lambda: None)
    mine = bus.subscribe(Events.STARTED, lambda: None, sender=first)
    assert list(bus.signal(Events.STARTED).receivers_for(first)) == [everyone, mine]
    assert list(bus.signal(Events.STARTED).receivers_for(second)) == [everyone]


def test_a_receiver_of_one_engine_on_a_signal_is_not_a_handler_of_the_engine(engine):
    def receiver(sender, event):
        pass

    engine.bus.signal(Events.STARTED).connect(receiver)
    assert not engine.has_event_handler(receiver, Events.STARTED)
    assert engine.hears(Events.STARTED)
