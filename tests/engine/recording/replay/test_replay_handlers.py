"""Handlers in a replay: attached, taken off, failing, firing."""

import pytest

from pulsetrain.engine import Events
from pulsetrain.engine.events import payloads
from pulsetrain.engine.recording.replay.playback import Replay
from tests.support.recordings import hear, train


class TestHandlers:
    @pytest.mark.parametrize("also", [(), tuple(Events)])
    @pytest.mark.parametrize("asks_event", [True, False])
    def test_one_that_raises_is_named_and_run_continues_after_it(self, log, tmp_path, also, asks_event):
        train(log, epochs=1)
        log.close()
        replay = Replay(tmp_path)
        hear(replay, *also)
        calls = []

        def count(engine):
            calls.append(engine.state.iteration)
            if engine.state.iteration == 2:
                raise KeyError("broken")

        replay.add_event_handler(
            Events.ITERATION_COMPLETED, (lambda engine, event: count(engine)) if asks_event else count
        )
        with pytest.raises(KeyError, match="broken") as raised:
            replay.run()
        assert "handling Events.ITERATION_COMPLETED of 'trainer' at epoch 1, iteration 2" in raised.value.__notes__[0]
        replay.run()
        assert calls == [1, 2, 3]

    def test_one_that_is_attached_in_the_middle_hears_what_follows(self, log, tmp_path):
        train(log, epochs=3)
        log.close()
        replay = Replay(tmp_path)
        later = []

        @replay.on(Events.EPOCH_STARTED(once=2))
        def attach(engine):
            later.append(hear(engine, Events.ITERATION_COMPLETED, Events.EPOCH_STARTED))

        replay.run()
        types = [(event.type, event.epoch) for event in later[0]]
        assert types[:4] == [("epoch_started", 2), *[("iteration_completed", 2)] * 3]
        assert len(types) == 8

    def test_one_that_is_attached_between_an_event_and_one_fired_in_it_hears_what_follows(self, log, tmp_path):
        train(log, epochs=3, length=400)
        log.close()
        replay = Replay(tmp_path)
        later = []
        hear(replay, Events.VALIDATION_COMPLETED)

        @replay.on(Events.EPOCH_COMPLETED(once=1))
        def attach(engine):
            later.append(hear(engine, Events.GRADIENTS_READY))

        replay.run()
        assert [event.iteration for event in later[0]] == [*range(401, 1201)]

    def test_the_bus_knows_which_events_hang_on_the_clock(self, log, tmp_path):
        for is_observed in (True, False):
            log.add(Events.METRICS_LOGGED, payload={"metrics": {}}, is_observed=is_observed)
        log.close()
        replay = Replay(tmp_path)
        found = []

        @replay.on(Events.METRICS_LOGGED)
        def look(engine, event):
            found.append(event.observed)

        replay.run()
        assert found == [True, False]

    def test_one_that_was_taken_off_hears_no_more(self, log, tmp_path):
        train(log)
        log.close()
        replay = Replay(tmp_path)
        heard = []
        handle = replay.add_event_handler(Events.ITERATION_COMPLETED, lambda: (heard.append(1), handle.remove()))
        replay.run()
        assert heard == [1]

    def test_those_of_the_bus_hear_every_engine(self, log, tmp_path):
        train(log, epochs=1)
        log.close()
        replay = Replay(tmp_path)
        names = []
        replay.bus.subscribe(Events.STARTED, lambda engine, event: names.append((engine.name, event.engine)))
        replay.run()
        assert names == [("trainer", "trainer"), ("evaluator", "evaluator")]

    def test_what_they_fire_is_collected(self, log, tmp_path):
        train(log)
        log.close()
        replay = Replay(tmp_path)
        logged = payloads.MetricsLogged(metrics={"a": 1.0})
        replay.add_event_handler(Events.EPOCH_COMPLETED, lambda engine: engine.fire(Events.METRICS_LOGGED, logged))
        replay.add_event_handler(Events.EPOCH_COMPLETED, lambda engine: engine.post(Events.METRICS_LOGGED, logged))
        heard = hear(replay, Events.METRICS_LOGGED)
        replay.run()
        assert [(event.type, event.epoch, event.payload) for event in replay.fired] == [
            ("metrics_logged", epoch, logged) for epoch in (1, 1, 2, 2)
        ]
        assert heard == []

    def test_what_they_fire_is_delivered_where_that_is_asked_for(self, log, tmp_path):
        train(log)
        log.close()
        replay = Replay(tmp_path, deliver_fired=True)
        logged = payloads.MetricsLogged(metrics={"a": 1.0})
        replay.add_event_handler(Events.EPOCH_STARTED, lambda engine: engine.fire(Events.METRICS_LOGGED, logged))
        heard = hear(replay, Events.METRICS_LOGGED)
        replay.run()
        assert heard == replay.fired
        assert len(heard) == 2

    def test_firing_another_payload_is_a_type_error(self, log, tmp_path):
        train(log)
        log.close()
        replay = Replay(tmp_path)
        replay.add_event_handler(Events.EPOCH_STARTED, lambda engine: engine.fire(Events.METRICS_LOGGED, 3))
        with pytest.raises(TypeError, match="this event carries MetricsLogged, not int"):
            replay.run()

    def test_one_that_fails_with_a_warning_lets_it_continue(self, log, tmp_path):
        train(log)
        log.close()
        replay = Replay(tmp_path)
        replay.add_event_handler(Events.EPOCH_STARTED, lambda: 1 / 0, on_error="warn")
        replay.run()
        assert [event.payload.error.__class__ for event in replay.fired] == [ZeroDivisionError] * 2

    def test_a_run_from_inside_the_run_is_refused(self, log, tmp_path):
        train(log)
        log.close()
        replay = Replay(tmp_path)
        replay.add_event_handler(Events.EPOCH_STARTED, lambda engine: engine.run())
        with pytest.raises(RuntimeError, match="called from inside its own run"):
            replay.run()
