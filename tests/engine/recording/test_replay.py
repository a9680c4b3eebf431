"""A recorded run is played through handlers as it ran: order, payloads, state, pauses, and what a log does not hold."""

import json
import math
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from engine import EventEnum, Events, Phase, payloads
from engine.errors import ConfigurationError, RecordingError
from engine.recording import EventLog, LoggedEvent, LogWriter
from engine.recording.replay import Replay

START = 1_700_000_000_000_000_000
SECOND = 1_000_000_000


class Writing:
    """A log that is being written, an event a second."""

    def __init__(self, folder: Path) -> None:
        self.writer = LogWriter(folder)
        self.seq = self.ord = 0

    def add(self, event: Any, epoch: int = 1, iteration: int = 1, engine: str = "trainer", **fields: Any) -> int:
        self.seq += 1
        if not fields.pop("is_observed", False):
            fields["ord"], self.ord = self.ord, self.ord + 1
        name = event if isinstance(event, str) else event.value
        self.writer.add(
            LoggedEvent(
                engine=engine,
                event=name,
                epoch=epoch,
                iteration=iteration,
                seq=self.seq,
                t=START + self.seq * SECOND,
                **fields,
            )
        )
        return self.seq

    def close(self) -> None:
        self.writer.end()
        self.writer.close()


@pytest.fixture
def log(tmp_path):
    return Writing(tmp_path / "events")


def train(log: Writing, epochs: int = 2, length: int = 3, validate: bool = True) -> None:
    """A run as a trainer's: updates in iterations, validations in epochs' ends."""
    log.add(Events.STARTED, 0, 0, is_observed=True)
    for epoch in range(1, epochs + 1):
        log.add(Events.EPOCH_STARTED, epoch, (epoch - 1) * length)
        for iteration in range((epoch - 1) * length + 1, epoch * length + 1):
            log.add(Events.ITERATION_STARTED, epoch, iteration)
            log.add(Events.GRADIENTS_READY, epoch, iteration, payload={"grad_norm": 0.5})
            rates = [0.1 / iteration]
            log.add(Events.OPTIMIZER_STEP_COMPLETED, epoch, iteration, payload={"learning_rates": rates})
            log.add(Events.ITERATION_COMPLETED, epoch, iteration, output={"loss": 1.0 / iteration}, lr=rates)
        metrics = {"val/loss": 1.0 / epoch}
        log.add(Events.EPOCH_COMPLETED, epoch, epoch * length, metrics=metrics if validate else None)
        if validate:
            at = (epoch, epoch * length)
            log.add(Events.VALIDATION_STARTED, *at)
            evaluate(log)
            validated = {"payload": {"metrics": metrics}, "observed": {"seconds": 0.5}, "metrics": metrics}
            log.add(Events.VALIDATION_COMPLETED, *at, **validated)
    log.add(Events.COMPLETED, epochs, epochs * length, is_observed=True)


def evaluate(log: Writing, batches: int = 2) -> None:
    log.add(Events.STARTED, 0, 0, "evaluator", is_observed=True)
    for iteration in range(1, batches + 1):
        log.add(Events.ITERATION_COMPLETED, 1, iteration, "evaluator", output={"loss": 2.0})
    log.add(Events.EPOCH_COMPLETED, 1, batches, "evaluator", metrics={"loss": 2.0})
    log.add(Events.COMPLETED, 1, batches, "evaluator", is_observed=True)


def hear(replay: Any, *events: Any, **options: Any) -> list[Any]:
    """What these events' handlers are given."""
    heard: list[Any] = []
    for each in events:

        @replay.on(each, **options)
        def note(engine, event):
            heard.append(event)

    return heard


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

    def test_another_engine_that_runs_behind_the_end_comes_behind_it(self, log, tmp_path):
        train(log, epochs=1, validate=False)
        evaluate(log)
        log.close()
        replay = Replay(tmp_path)
        order = []
        replay.add_event_handler(Events.COMPLETED, lambda: order.append("completed"))
        replay.evaluator.add_event_handler(Events.STARTED, lambda: order.append("tested"))
        replay.run()
        assert order == ["completed", "tested"]

    @pytest.mark.parametrize("closed", [True, False])
    def test_what_is_heard_is_what_the_log_holds_whatever_else_is_heard(self, log, tmp_path, closed):
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

    def test_a_damaged_block_is_passed_over_and_listed(self, log, tmp_path):
        train(log, epochs=2, length=600, validate=False)
        log.close()
        path = tmp_path / "events" / "events.jsonl.zst"
        content = bytearray(path.read_bytes())
        content[EventLog(tmp_path)._index.start(1) + 2000] ^= 1
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


class Colour(Enum):
    RED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    places: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    mean: float
    colours: list[Colour]
    inner: Inner | None = None


class Custom(EventEnum):
    MEASURED = "measured", Measured
    WEIGHED = "weighed", float
    TICKED = "ticked"


PAYLOADS = [
    (Events.TERMINATE, {"reason": "r"}, payloads.Terminated(reason="r")),
    (Events.TERMINATE_SINGLE_EPOCH, {"iter_counter": 3}, payloads.EpochTerminated(iter_counter=3)),
    (
        Events.OPTIMIZER_STEP_COMPLETED,
        {"learning_rates": [0.1, 0.2]},
        payloads.OptimizerStepCompleted(learning_rates=(0.1, 0.2)),
    ),
    (
        Events.VALIDATION_COMPLETED,
        {"metrics": {"val/loss": "Infinity"}, "seconds": 0.5},
        payloads.ValidationCompleted(metrics={"val/loss": math.inf}, seconds=0.5),
    ),
    (
        Events.CHECKPOINT_SAVED,
        {"path": "runs/a", "iteration": 1, "bytes": 2, "seconds": 0.5, "is_best": True, "background": False},
        payloads.CheckpointSaved(path=Path("runs/a"), iteration=1, bytes=2, seconds=0.5, is_best=True),
    ),
    (
        Events.CHECKPOINT_LOADED,
        {"path": "s3://runs/a", "iteration": 1},
        payloads.CheckpointLoaded(path="s3://runs/a", iteration=1),
    ),
    (Events.METRICS_LOGGED, {"metrics": {"a": 1.0}}, payloads.MetricsLogged(metrics={"a": 1.0})),
    (
        Events.ANOMALY_DETECTED,
        {"kind": "spike", "value": "-Infinity", "batch_indices": [4, 2]},
        payloads.AnomalyDetected(kind="spike", value=-math.inf, batch_indices=(4, 2)),
    ),
    (Events.PREEMPTED, {"signal": "SIGTERM"}, payloads.Preempted(signal="SIGTERM")),
    (
        Custom.MEASURED,
        {"mean": 0.5, "colours": ["RED"], "inner": {"places": [1, 2]}},
        Measured(mean=0.5, colours=[Colour.RED], inner=Inner(places=(1, 2))),
    ),
    (Custom.WEIGHED, 0.25, 0.25),
    (Custom.TICKED, None, None),
]


class TestPayloads:
    @pytest.mark.parametrize(("event", "logged", "expected"), PAYLOADS, ids=lambda value: str(value)[:30])
    def test_are_of_their_types_again(self, log, tmp_path, event, logged, expected):
        log.add(event, payload=logged)
        log.close()
        replay = Replay(tmp_path, events=[Custom])
        heard = hear(replay, event)
        replay.run()
        assert heard[0].payload == expected
        assert type(heard[0].payload) is type(expected)

    def test_a_norm_is_a_tensor_with_the_logged_number(self, log, tmp_path):
        for norm in (0.1, "NaN", None):  # the last one was lost with the process
            log.add(Events.GRADIENTS_READY, payload={"grad_norm": norm})
        log.close()
        replay = Replay(tmp_path)
        heard = hear(replay, Events.GRADIENTS_READY)
        replay.run()
        values = [event.payload.grad_norm.item() for event in heard]
        assert values[0] == 0.1
        assert all(math.isnan(value) for value in values[1:])

    @pytest.mark.parametrize("name", ["builtins.KeyError", "KeyError", "some.module.Unknown", "UnicodeDecodeError"])
    def test_an_error_has_its_name_and_text_again(self, log, tmp_path, name):
        log.add(Events.EXCEPTION_RAISED, payload={"error": {"__type__": name, "message": "it broke"}})
        log.close()
        replay = Replay(tmp_path)
        heard = hear(replay, Events.EXCEPTION_RAISED)
        state = replay.run()
        error = heard[0].payload.error
        assert f"{type(error).__name__}: {error}" == f"{name.rpartition('.')[2]}: it broke" == state.stop_reason
        assert isinstance(error, KeyError) == name.endswith("KeyError")

    def test_a_custom_event_goes_by_its_name_with_plain_values(self, log, tmp_path):
        log.add("measured", payload={"mean": "NaN", "note": "x"})
        log.close()
        replay = Replay(tmp_path)
        heard = hear(replay, "measured")
        replay.run()
        assert math.isnan(heard[0].payload.pop("mean"))
        assert heard[0].payload == {"note": "x"}

    def test_a_payload_of_another_version_says_where_and_what(self, log, tmp_path):
        log.add(Custom.MEASURED, payload={"median": 0.5})
        log.close()
        replay = Replay(tmp_path, events=[Custom])
        hear(replay, Custom.MEASURED)
        with pytest.raises(RecordingError, match=r"measured of 'trainer', seq 1: .*'median'.* is no Measured"):
            replay.run()

    def test_ignites_own_arguments(self, log, tmp_path):
        log.add(Events.TERMINATE_SINGLE_EPOCH, payload={"iter_counter": 3})
        log.close()
        replay = Replay(tmp_path)
        found = []
        replay.add_event_handler(Events.TERMINATE_SINGLE_EPOCH, lambda engine, iter_counter: found.append(iter_counter))
        replay.run()
        assert found == [3]


class TestState:
    def test_is_as_it_was_whoever_hears_what_it_is_made_of(self, log, tmp_path):
        train(log, epochs=3)
        log.close()
        replay = Replay(tmp_path)
        found = []

        @replay.on(Events.VALIDATION_COMPLETED)
        def look(engine):
            state = engine.state
            counters = (state.epoch, state.iteration, state.update, state.validation_round, state.save)
            rates = [group["lr"] for group in engine.optimizer.param_groups]
            found.append((counters, dict(state.output), dict(state.metrics), rates, engine.evaluator.state.iteration))

        replay.run()
        assert found == [
            ((epoch, 3 * epoch, 3 * epoch, epoch, 0), {"loss": 1 / (3 * epoch)}, {"val/loss": 1 / epoch}, [rate], 2)
            for epoch, rate in ((1, 0.1 / 3), (2, 0.1 / 6), (3, 0.1 / 9))
        ]

    def test_there_is_no_output_in_a_step(self, log, tmp_path):
        train(log, epochs=1)
        log.close()
        replay = Replay(tmp_path)
        found = []
        replay.add_event_handler(Events.GRADIENTS_READY, lambda engine: found.append(engine.state.output))
        replay.run()
        assert found == [None] * 3

    def test_an_epochs_handlers_find_the_validation_that_was_made_in_it(self, log, tmp_path):
        train(log)
        log.close()
        replay = Replay(tmp_path)
        found = []
        replay.add_event_handler(
            Events.EPOCH_COMPLETED, lambda e: found.append((e.state.validation_round, e.state.metrics["val/loss"]))
        )
        replay.run()
        assert found == [(1, 1.0), (2, 0.5)]

    def test_counters_of_custom_events_count_them(self, log, tmp_path):
        for iteration in range(1, 7):
            log.add(Custom.TICKED, iteration=iteration)
        log.close()
        replay = Replay(tmp_path)
        replay.register_events(*Custom, event_to_attr={Custom.TICKED: "ticks"})
        heard = hear(replay, Custom.TICKED(every=3))
        assert replay.run().ticks == 6
        assert [event.iteration for event in heard] == [3, 6]

    def test_handlers_may_keep_metrics_beside_the_logged_ones(self, log, tmp_path):
        train(log)
        log.close()
        replay = Replay(tmp_path)

        @replay.on(Events.ITERATION_COMPLETED)
        def keep(engine):
            engine.state.metrics["seen"] = engine.state.metrics.get("seen", 0) + 1

        assert replay.run().metrics == {"seen": 6, "val/loss": 0.5}

    def test_a_loss_is_a_tensor_for_those_that_expect_one(self, log, tmp_path):
        log.add(Events.ITERATION_COMPLETED, output={"loss": "NaN", "accuracy": 0.5})
        log.close()
        output = Replay(tmp_path).run().output
        assert math.isnan(output.loss.item())
        assert output.metrics == {"accuracy": 0.5}
        assert math.isnan(float(output))

    def test_bounds_are_those_that_the_log_tells_or_that_are_set(self, log, tmp_path):
        log.add(Events.STARTED, payload={"max_epochs": 3}, is_observed=True)
        log.close()
        replay = Replay(tmp_path)
        replay.state.epoch_length = 10
        state = replay.run()
        assert (state.max_epochs, state.epoch_length, state.max_iters) == (3, 10, None)

    @pytest.mark.parametrize("name", ["iteration", "epoch", "output"])
    def test_what_the_log_says_cannot_be_set(self, log, tmp_path, name):
        train(log)
        log.close()
        with pytest.raises(RecordingError, match=f"{name}=5 cannot be set"):
            setattr(Replay(tmp_path).state, name, 5)

    def test_why_the_run_ended(self, log, tmp_path):
        log.add(Events.TERMINATE, payload={"reason": "enough"}, is_observed=True)
        log.close()
        replay = Replay(tmp_path)
        assert replay.state.stop_reason is None
        assert replay.run().stop_reason == "enough"

    @pytest.mark.parametrize("completes", [True, False])
    def test_whether_it_completed_is_known_when_it_is_terminated(self, log, tmp_path, completes):
        log.add(Events.TERMINATE, payload={"reason": "enough"}, is_observed=True)
        if completes:
            log.add(Events.COMPLETED, is_observed=True)
        log.close()
        replay = Replay(tmp_path)
        found = []
        replay.add_event_handler(Events.TERMINATE, lambda engine: found.append(engine.should_terminate))
        replay.run()
        assert found == [True if completes else "skip_completed"]


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
    def test_until_pauses_behind_an_event_and_run_goes_on(self, log, tmp_path, heard):
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

    def test_step_plays_one_event_whether_it_is_heard_or_not(self, log, tmp_path):
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


class TestHandlers:
    @pytest.mark.parametrize("also", [(), tuple(Events)])
    @pytest.mark.parametrize("asks_event", [True, False])
    def test_one_that_raises_is_named_and_run_goes_on_behind_it(self, log, tmp_path, also, asks_event):
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
            found.append(engine.bus.by_clock)

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

    def test_one_that_fails_with_a_warning_lets_it_go_on(self, log, tmp_path):
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
