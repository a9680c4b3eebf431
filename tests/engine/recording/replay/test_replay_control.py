"""A replay is ended, paused, stepped through and set to a place."""

import math

import pytest

from pulsetrain.engine import Events
from pulsetrain.engine.errors import ConfigurationError, RecordingError
from pulsetrain.engine.events import payloads
from pulsetrain.engine.recording import EventLog
from pulsetrain.engine.recording.replay.playback import Replay
from tests.support.recordings import hear, train


class TestTerminate:
    @pytest.fixture
    def replay(self, log, tmp_path):
        train(log, epochs=4)
        log.close()

        def make(**options):
            replay = Replay(tmp_path, **options)

            @replay.on(Events.VALIDATION_COMPLETED)
            def stop(engine):
                if engine.state.epoch >= 2:
                    engine.terminate(reason=f"at {engine.state.epoch}")

            return replay

        return make

    def test_is_noted_and_not_obeyed(self, replay):
        replay = replay()
        ends = hear(replay, Events.TERMINATE)
        state = replay.run()
        assert (state.iteration, state.stop_reason, ends) == (12, "at 2", [])
        assert [(stop.reason, stop.epoch, stop.iteration, stop.event) for stop in replay.stops] == [
            (f"at {epoch}", epoch, 3 * epoch, "validation_completed") for epoch in (2, 3, 4)
        ]

    @pytest.mark.parametrize("also", [(), (Events.EPOCH_COMPLETED,), tuple(Events)])
    def test_is_obeyed_where_that_is_asked_for(self, replay, also):
        replay = replay(obey_terminate=True)
        hear(replay, *also)
        ends = hear(replay, Events.TERMINATE, Events.COMPLETED)
        epochs = hear(replay, Events.EPOCH_COMPLETED)
        state = replay.run()
        assert (state.epoch, state.iteration, state.stop_reason) == (2, 6, "at 2")
        assert [event.type for event in ends] == ["terminate", "completed"]
        assert ends[0].payload == payloads.Terminated(reason="at 2")
        assert [event.epoch for event in epochs] == [1, 2]
        assert replay.run() is state  # there is nothing more
        assert len(ends) == 2

    def test_without_completed_where_the_handler_says_so(self, log, tmp_path):
        train(log)
        log.close()
        replay = Replay(tmp_path, obey_terminate=True)
        replay.add_event_handler(Events.EPOCH_STARTED, lambda engine: engine.terminate(skip_completed=True))
        ends = hear(replay, Events.TERMINATE, Events.COMPLETED)
        replay.run()
        assert [event.type for event in ends] == ["terminate"]

    def test_of_another_engine_is_noted_alone(self, log, tmp_path):
        train(log)
        log.close()
        replay = Replay(tmp_path, obey_terminate=True)
        evaluator = replay.engines["evaluator"]
        evaluator.add_event_handler(Events.STARTED, lambda engine: engine.terminate(reason="bored"))
        assert replay.run().iteration == 6
        assert [(stop.engine, stop.reason) for stop in replay.stops] == [("evaluator", "bored")] * 2


class TestPausing:
    @pytest.mark.parametrize("heard", [(Events.ITERATION_COMPLETED,), tuple(Events)])
    def test_until_pauses_after_an_event_and_run_continues(self, log, tmp_path, heard):
        train(log, epochs=3)
        log.close()
        whole = Replay(tmp_path)
        expected = hear(whole, *heard)
        whole.run()
        replay = Replay(tmp_path)
        found = hear(replay, *heard)
        for iteration in (2, 3, 5, 9):
            state = replay.run(until=lambda e, i=iteration: e.iteration == i and e.event == "iteration_completed")
            assert state.iteration == iteration
            assert found[-1].iteration == iteration
        replay.run()
        assert found == expected

    def test_step_plays_one_event_whether_it_is_called_or_not(self, log, tmp_path):
        train(log, epochs=2)
        log.close()
        replay = Replay(tmp_path)
        heard = hear(replay, Events.EPOCH_STARTED)
        stepped = []
        while (event := replay.step()) is not None:
            stepped.append(event)
        assert [event.seq for event in stepped] == [event.seq for event in EventLog(tmp_path).read()]
        assert next(e for e in stepped if e.event == "validation_completed").payload["seconds"] == 0.5
        assert len(heard) == 2

    def test_seek_goes_to_an_event_without_calling_handlers(self, log, tmp_path):
        train(log, epochs=60, length=20)
        log.close()
        events = list(EventLog(tmp_path).read())
        replay = Replay(tmp_path)
        heard = hear(replay, Events.ITERATION_COMPLETED)
        for place in (4000, 10, len(events) - 3, 0):
            state = replay.seek(events[place].seq)
            assert heard == []
            if place:
                before = [event for event in events[:place] if event.engine == "trainer"]
                assert state.iteration == before[-1].iteration
                assert state.update == sum(event.event == "optimizer_step_completed" for event in before)
            assert replay.step().seq == events[place].seq
            heard.clear()

    def test_seek_beyond_the_end_is_refused(self, log, tmp_path):
        train(log)
        log.close()
        with pytest.raises(RecordingError, match=r"seek\(10000\): the log ends before"):
            Replay(tmp_path).seek(10000)

    def test_in_real_time_it_waits_as_long_as_the_run_took(self, log, tmp_path):
        train(log, epochs=1, validate=False)
        log.close()
        now, waited = [0.0], []

        def sleep(seconds):
            waited.append(seconds)
            now[0] += seconds

        replay = Replay(tmp_path, speed=2.0, clock=lambda: now[0], sleep=sleep)
        heard = hear(replay, Events.ITERATION_COMPLETED)
        replay.run()
        took = (heard[-1].time_ns - heard[0].time_ns) / 1e9
        assert sum(waited) == pytest.approx(took / 2.0)
        assert len(waited) == 2

    @pytest.mark.parametrize("speed", [0.0, -1.0, math.nan])
    def test_a_speed_that_is_not_positive_is_refused(self, log, tmp_path, speed):
        with pytest.raises(ConfigurationError, match=r"Replay\(speed=.*needs a positive number"):
            Replay(tmp_path, speed=speed)
