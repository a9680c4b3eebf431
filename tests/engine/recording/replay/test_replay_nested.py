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
