"""Events that handlers fire are replayed at the moment at which the same handlers fire them again."""

import pytest

from pulsetrain.engine import Engine, EventEnum, Events, Phase
from pulsetrain.engine.recording.replay.playback import Replay
from pulsetrain.handlers import EventRecorder


class Steps(EventEnum):
    OUTER = "outer"
    INNER = "inner"
    COUNTED = "counted"


def attach(engine, calls, firing=True):
    """Handlers that note their calls, in the way that a live run and its replay get them alike."""
    iterated = Events.ITERATION_COMPLETED

    def note(name):
        return lambda e: calls.append((name, e.state.epoch, e.state.iteration))

    def fire(*events):
        return lambda e: [e.fire(event) for event in events]

    def note_and_fire(name, *events):
        return lambda e: (note(name)(e), fire(*events)(e))

    if not firing:
        fire = note_and_fire = lambda *args: lambda: None
    engine.register_events(*Steps, event_to_attr={Steps.COUNTED: "counted"})
    for event in (Events.STARTED, Events.ITERATION_STARTED, Events.EPOCH_COMPLETED, Events.COMPLETED, Steps.OUTER):
        engine.add_event_handler(event, note(f"before in {event.value}"))
    engine.add_event_handler(Events.STARTED, fire(Steps.INNER))
    engine.add_event_handler(Events.ITERATION_STARTED, fire(Steps.OUTER))
    engine.add_event_handler(iterated, note("first"))
    engine.add_event_handler(iterated, note_and_fire("loss", Steps.OUTER, Steps.COUNTED), phase=Phase.COMPUTE)
    engine.add_event_handler(iterated(every=3), note_and_fire("third", Steps.INNER))
    engine.add_event_handler(iterated, note("second"))
    engine.add_event_handler(iterated, fire(Steps.OUTER), phase=Phase.PERSIST)
    engine.add_event_handler(iterated, note("last"), phase=Phase.PERSIST)
    engine.add_event_handler(Steps.OUTER, fire(Steps.INNER, Steps.INNER))
    engine.add_event_handler(Steps.COUNTED(every=2), note_and_fire("counted twice", Steps.INNER))
    engine.add_event_handler(Steps.INNER, note("inner"))
    engine.add_event_handler(Events.EPOCH_COMPLETED, fire(Steps.COUNTED))
    engine.add_event_handler(Events.COMPLETED, fire(Steps.OUTER, Steps.INNER), phase=Phase.OBSERVE)
    for event in (Events.STARTED, Events.ITERATION_STARTED, Events.EPOCH_COMPLETED, Events.COMPLETED, Steps.OUTER):
        engine.add_event_handler(event, note(f"after in {event.value}"))


@pytest.fixture
def recorded(tmp_path):
    """A run of several blocks, and what its handlers noted."""
    calls = []
    engine = Engine(lambda engine, batch: batch, name="trainer")
    recorder = EventRecorder(tmp_path).attach(engine)
    attach(engine, calls)
    engine.run(range(150), max_epochs=2)
    recorder.detach()
    return tmp_path, calls


def test_handlers_are_called_in_the_order_of_the_run(recorded):
    folder, live = recorded
    calls = []
    replay = Replay(folder, events=[Steps])
    assert len(replay.log.headers) > 2
    attach(replay, calls)
    replay.run()
    assert len(calls) > 2_000
    assert calls == live


def test_they_are_when_the_replay_pauses_after_each_event(recorded):
    folder, live = recorded
    calls = []
    replay = Replay(folder, events=[Steps])
    attach(replay, calls)
    while replay.step() is not None:
        pass
    assert calls == live


def test_events_that_no_replayed_handler_fires_are_played_none_the_less(recorded):
    folder, live = recorded
    calls = []
    replay = Replay(folder, events=[Steps])
    attach(replay, calls, firing=False)
    replay.run()
    fires = {"loss", "third", "counted twice"}
    assert sorted(calls) == sorted(call for call in live if call[0] not in fires)


def test_an_event_is_played_once_and_what_its_handler_fires_in_vain_is_noted(tmp_path):
    engine = Engine(lambda engine, batch: batch, name="trainer")
    EventRecorder(tmp_path).attach(engine)
    engine.register_events(*Steps)
    engine.add_event_handler(Events.ITERATION_COMPLETED(every=2), lambda e: e.fire(Steps.INNER))
    engine.run(range(4))
    replay, heard = Replay(tmp_path, events=[Steps]), []
    replay.add_event_handler(Events.ITERATION_COMPLETED, lambda e: e.fire(Steps.INNER))
    replay.add_event_handler(Steps.INNER, lambda e: heard.append(e.state.iteration))
    replay.run()
    assert heard == [2, 4]
    assert [event.iteration for event in replay.fired] == [1, 2, 3, 4]


def attach_two(engine, calls):
    """The handlers of COMPLETED, the first of which fires two custom events; each notes its call."""

    def fire_both(e):
        calls.append("first")
        e.fire(Steps.OUTER)
        e.fire(Steps.INNER)

    def note(name):
        return lambda e: calls.append(name)

    engine.add_event_handler(Events.COMPLETED, fire_both)
    for name in ("second", "third"):
        engine.add_event_handler(Events.COMPLETED, note(name))
    for event in (Steps.OUTER, Steps.INNER):
        engine.add_event_handler(event, note(event.value))


@pytest.fixture
def two(tmp_path):
    """A run whose last handlers fire two events."""
    engine = Engine(lambda engine, batch: batch, name="trainer")
    engine.register_events(*Steps)
    EventRecorder(tmp_path).attach(engine)
    attach_two(engine, [])
    engine.run(range(2))
    return tmp_path


LIVE = ["first", "outer", "inner", "second", "third"]


def test_a_pause_at_the_logs_end_loses_no_event_and_no_call(two):
    replay, calls, played = Replay(two, events=[Steps]), [], []
    attach_two(replay, calls)
    while (event := replay.step()) is not None:
        assert replay.event is not None
        assert replay.event.seq == event.seq
        played.append(event.event)
    assert calls == LIVE
    assert played[-3:] == ["outer", "inner", "completed"]


@pytest.mark.parametrize("event", ["outer", "inner", "completed"])
def test_a_run_continues_after_each_pause_at_the_logs_end(event, two):
    replay, calls = Replay(two, events=[Steps]), []
    attach_two(replay, calls)
    replay.run(until=lambda each: each.event == event)
    replay.run()
    assert calls == LIVE


def test_an_event_that_is_played_when_it_is_fired_again_is_not_delivered_twice(two):
    replay, calls = Replay(two, events=[Steps], deliver_fired=True), []
    attach_two(replay, calls)
    replay.run()
    assert calls == LIVE
    assert [event.type for event in replay.fired] == ["outer", "inner"]


def test_a_pause_after_an_error_offers_no_event_from_before_it(two):
    replay, calls, seen = Replay(two, events=[Steps]), [], []
    attach_two(replay, calls)

    def fail(e):
        raise ValueError("a handler's own")

    replay.add_event_handler(Steps.INNER, fail)
    with pytest.raises(ValueError, match="own"):
        replay.run()
    replay.run(until=lambda each: seen.append(each.event))
    assert seen == []


@pytest.mark.parametrize("with_record", [False, True])
def test_ignites_form_of_fire_is_noted_and_not_delivered(with_record, two):
    replay, heard = Replay(two, events=[Steps]), []
    replay.add_event_handler(Events.ITERATION_COMPLETED, lambda e: e.fire_event(Steps.COUNTED))
    listen = (lambda engine, event: heard.append(event)) if with_record else (lambda engine: heard.append(engine))
    replay.add_event_handler(Steps.COUNTED, listen)
    replay.run()
    assert heard == []
    assert [event.type for event in replay.fired] == ["counted", "counted"]
