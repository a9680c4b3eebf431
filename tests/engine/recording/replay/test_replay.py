"""A recorded run is played through handlers in its order, with what a log or its checkpoints hold."""

import json

import pytest
import torch
from torch import nn

from pulsetrain.engine import Events, Phase
from pulsetrain.engine.errors import ConfigurationError, RecordingError
from pulsetrain.engine.recording import EventLog
from pulsetrain.engine.recording.replay.playback import Replay
from tests.support.recordings import START, evaluate, hear, train


class TestOrder:
    def test_handlers_hear_the_events_of_the_log_with_its_numbers_and_times(self, log, tmp_path):
        train(log, epochs=1)
        log.close()
        replay = Replay(tmp_path)
        heard = hear(replay, *[event for event in Events if event is not Events.GET_BATCH_STARTED])
        replay.run()
        logged = list(EventLog(tmp_path).read(engine="trainer"))
        order = sorted(heard, key=lambda event: event.seq)
        assert [(e.seq, e.type, e.epoch, e.iteration, e.time_ns) for e in order] == [
            (e.seq, e.event, e.epoch, e.iteration, e.t) for e in logged
        ]

    def test_a_validation_comes_before_the_handlers_of_the_epoch_that_it_was_made_in(self, log, tmp_path):
        train(log, epochs=1)
        log.close()
        replay = Replay(tmp_path)
        order = []
        for phase in Phase:
            replay.add_event_handler(Events.EPOCH_COMPLETED, lambda p=phase: order.append(p.name), phase=phase)
        replay.add_event_handler(Events.VALIDATION_STARTED, lambda: order.append("validation"))
        replay.engines["evaluator"].add_event_handler(Events.COMPLETED, lambda: order.append("evaluated"))
        replay.add_event_handler(Events.VALIDATION_COMPLETED, lambda: order.append("validated"))
        replay.run()
        assert order == ["validation", "evaluated", "validated", "COMPUTE", "ACT", "OBSERVE", "PERSIST"]

    def test_metrics_are_logged_and_checkpoints_saved_in_their_phases(self, log, tmp_path):
        log.add(Events.ITERATION_COMPLETED)
        log.add(Events.METRICS_LOGGED, payload={"metrics": {}})
        saved = {"path": "a", "iteration": 1, "bytes": 1, "is_best": False, "background": False}
        log.add(Events.CHECKPOINT_SAVED, payload=saved, observed={"seconds": 0.1}, is_observed=True)
        log.add(Events.ITERATION_STARTED, iteration=2)
        log.close()
        replay = Replay(tmp_path)
        order = []
        for phase in Phase:
            replay.add_event_handler(Events.ITERATION_COMPLETED, lambda p=phase: order.append(p.name), phase=phase)
        replay.add_event_handler(Events.METRICS_LOGGED, lambda: order.append("logged"))
        replay.add_event_handler(Events.CHECKPOINT_SAVED, lambda: order.append("saved"))
        replay.add_event_handler(Events.ITERATION_STARTED, lambda: order.append("next"))
        replay.run()
        assert order == ["COMPUTE", "ACT", "logged", "OBSERVE", "saved", "PERSIST", "next"]

    def test_an_iteration_ends_before_the_epoch_in_whose_end_there_is_a_validation(self, log, tmp_path):
        train(log, epochs=1, length=1)
        log.close()
        replay = Replay(tmp_path)
        order = []
        replay.add_event_handler(Events.ITERATION_COMPLETED, lambda: order.append("iteration"))
        replay.add_event_handler(Events.VALIDATION_COMPLETED, lambda: order.append("validated"))
        replay.run()
        assert order == ["iteration", "validated"]

    def test_another_engine_that_runs_after_the_end_comes_after_it(self, log, tmp_path):
        train(log, epochs=1, validate=False)
        evaluate(log)
        log.close()
        replay = Replay(tmp_path)
        order = []
        replay.add_event_handler(Events.COMPLETED, lambda: order.append("completed"))
        replay.evaluator.add_event_handler(Events.STARTED, lambda: order.append("tested"))
        replay.run()
        assert order == ["completed", "tested"]

    @pytest.mark.slow
    @pytest.mark.parametrize("closed", [True, False])
    def test_what_is_called_is_what_the_log_holds_whatever_else_is_called(self, log, tmp_path, closed):
        train(log, epochs=40, length=30)
        failed = {"handler": "h", "event": "epoch_completed", "error": {"__type__": "ValueError", "message": "m"}}
        log.add(Events.HANDLER_FAILED, payload=failed, is_observed=True)  # a line that names another event, too
        if closed:
            log.close()
        for events in (
            [Events.EPOCH_COMPLETED],
            [Events.VALIDATION_COMPLETED, Events.STARTED],
            [Events.ITERATION_COMPLETED],
            [Events.ITERATION_COMPLETED, Events.EPOCH_COMPLETED, Events.HANDLER_FAILED],
            [*Events],
        ):
            replay = Replay(tmp_path)
            heard = hear(replay, *events)
            replay.run()
            names = [event.value for event in events]
            expected = [event.seq for event in EventLog(tmp_path).read(engine="trainer", event=names)]
            assert sorted(event.seq for event in heard) == expected
            assert len(expected) > 0

    def test_filters_read_the_counters_of_the_log(self, log, tmp_path):
        train(log, epochs=4)
        log.close()
        replay = Replay(tmp_path)
        fifth = hear(replay, Events.ITERATION_COMPLETED(every=5))
        updates = hear(replay, Events.OPTIMIZER_STEP_COMPLETED(every=4))
        rounds = hear(replay, Events.VALIDATION_COMPLETED(once=3))
        once = hear(replay, Events.ITERATION_STARTED(once=2))
        replay.run()
        assert [event.iteration for event in fifth] == [5, 10]
        assert [event.iteration for event in updates] == [4, 8, 12]
        assert [event.epoch for event in rounds] == [3]
        assert [event.iteration for event in once] == [2]

    def test_what_a_resumed_run_computed_again_is_played_once(self, log, tmp_path):
        first = log.add(Events.ITERATION_COMPLETED, output={"loss": 1.0})
        log.add(Events.ITERATION_COMPLETED, iteration=2, output={"loss": 2.0})
        log.add(Events.TERMINATE, iteration=2, payload={"reason": "killed"}, is_observed=True)
        log.seq += 1
        log.writer.rewind(first, 1, log.seq, START)
        log.ord = 1
        log.add(Events.ITERATION_COMPLETED, iteration=2, output={"loss": 3.0})
        log.close()
        replay = Replay(tmp_path)
        losses = []
        replay.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.output["loss"]))
        ends = hear(replay, Events.TERMINATE)
        replay.run()
        assert losses == [1.0, 3.0]
        assert ends == []

    @pytest.mark.parametrize("resumed_at", [1, 2, 0])
    def test_a_resumed_run_has_saved_the_checkpoint_that_it_resumed_from_and_no_later_one(
        self, log, tmp_path, resumed_at
    ):
        log.add(Events.STARTED, is_observed=True, iteration=0)
        places = [0]
        for iteration in (1, 2, 3):
            places.append(log.add(Events.ITERATION_COMPLETED, iteration=iteration, output={"loss": 1.0}))
            saved = {"path": "x", "iteration": iteration, "bytes": 1, "seconds": 1.0, "is_best": False}
            log.add(Events.CHECKPOINT_SAVED, iteration=iteration, payload=saved, is_observed=True)
        log.seq += 1
        log.writer.rewind(places[resumed_at], resumed_at, log.seq, START)
        log.ord = resumed_at
        log.add(Events.STARTED, is_observed=True, iteration=resumed_at)
        log.close()
        replay = Replay(tmp_path)
        heard = hear(replay, Events.CHECKPOINT_SAVED)
        replay.run()
        assert [event.iteration for event in heard] == [*range(1, resumed_at + 1)]
        assert replay.state.save == resumed_at

    def test_a_damaged_block_is_passed_over_and_listed(self, log, tmp_path):
        train(log, epochs=2, length=600, validate=False)
        log.close()
        path = tmp_path / "events" / "events.jsonl.zst"
        content = bytearray(path.read_bytes())
        content[EventLog(tmp_path)._index.start[1] + 2000] ^= 1
        path.write_bytes(content)
        for events in ([Events.ITERATION_COMPLETED], [*Events]):
            replay = Replay(tmp_path)
            heard = hear(replay, *events)
            replay.run()
            assert 0.5 < len([e for e in heard if e.type == "iteration_completed"]) / 1200 < 1.0
            assert replay.log.damage

    def test_reading_changes_nothing(self, log, tmp_path):
        train(log)
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        replay = Replay(tmp_path)
        hear(replay, *Events)
        replay.run()
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before

    def test_a_log_without_events_is_over_at_once(self, log, tmp_path):
        log.close()
        replay = Replay(tmp_path)
        assert (replay.name, replay.run().iteration, replay.step()) == ("trainer", 0, None)


class TestWhatALogDoesNotHold:
    @pytest.mark.parametrize("name", ["model", "checkpoint_state", "validate"])
    def test_is_named_to_who_asks_for_it(self, log, tmp_path, name):
        train(log)
        log.close()
        with pytest.raises(RecordingError, match=f"'trainer' has no {name!r}: an event log does not hold"):
            getattr(Replay(tmp_path), name, None)

    def test_other_names_are_simply_not_there(self, log, tmp_path):
        train(log, validate=False)
        log.close()
        replay = Replay(tmp_path)
        assert getattr(replay, "anything", 7) == 7
        assert getattr(replay.state, "anything", 7) == 7
        assert not hasattr(replay, "evaluator")

    def test_an_engine_that_is_not_there(self, log, tmp_path):
        train(log)
        log.close()
        with pytest.raises(RecordingError, match="no such engine; there are trainer, evaluator"):
            Replay(tmp_path, engine="critic")
        assert Replay(tmp_path, engine="evaluator").run().iteration == 2

    def test_another_engines_run_is_refused(self, log, tmp_path):
        train(log)
        log.close()
        with pytest.raises(RecordingError, match="its runs are in the log"):
            Replay(tmp_path).engines["evaluator"].run([1])


class TestCheckpoints:
    @pytest.fixture
    def load(self, tmp_path):
        for iteration in (2, 4):
            folder = tmp_path / "checkpoints" / f"{iteration:09}-checkpoint"
            folder.mkdir(parents=True)
            (folder / "manifest.json").write_text(json.dumps({"weight": float(iteration)}))

        def load(folder):
            weight = json.loads((folder / "manifest.json").read_text())["weight"]
            return {"model": {"weight": torch.full((1, 1), weight)}, "iteration": weight}

        return load

    def test_the_nearest_ones_state_and_weights_are_there(self, log, tmp_path, load):
        train(log)
        log.close()
        model = nn.Linear(1, 1, bias=False)
        replay = Replay(tmp_path, checkpoints=load, model=model)
        found = []

        @replay.on(Events.ITERATION_COMPLETED)
        def look(engine):
            found.append((engine.checkpoint_state()["iteration"], engine.model.weight.item(), model.weight.item()))

        replay.run()
        assert found == [(at, at, at) for at in (2.0, 2.0, 2.0, 4.0, 4.0, 4.0)]

    def test_a_model_that_a_handler_holds_follows(self, log, tmp_path, load):
        train(log)
        log.close()
        model = nn.Linear(1, 1, bias=False)
        replay = Replay(tmp_path, checkpoints=load, model=model)
        found = []
        replay.add_event_handler(Events.EPOCH_COMPLETED, lambda: found.append(model.weight.item()))
        replay.run()
        assert found == [2.0, 4.0]

    def test_none_there_a_model_alone_and_no_callable_are_refused(self, log, tmp_path):
        train(log)
        log.close()
        with pytest.raises(RecordingError, match="holds no checkpoint"):
            Replay(tmp_path, checkpoints=dict)
        with pytest.raises(ConfigurationError, match="pass checkpoints=True"):
            Replay(tmp_path, model=nn.Linear(1, 1))
        with pytest.raises(ConfigurationError, match="needs True"):
            Replay(tmp_path, checkpoints=3)
