"""In a replay, payloads and state are what they were in the run."""

import math
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import pytest

from pulsetrain.engine import EventEnum, Events
from pulsetrain.engine.errors import RecordingError
from pulsetrain.engine.events import payloads
from pulsetrain.engine.recording.replay.playback import Replay
from tests.support.recordings import hear, train


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
        with pytest.raises(RecordingError, match=r"measured of 'trainer', seq 1: .*'median'.* is not a Measured"):
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
    def test_is_unchanged_by_receivers_of_its_parts(self, log, tmp_path):
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

    def test_a_step_has_no_output(self, log, tmp_path):
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

    def test_bounds_are_those_that_the_log_reports_or_that_are_set(self, log, tmp_path):
        log.add(Events.STARTED, payload={"max_epochs": 3}, is_observed=True)
        log.close()
        replay = Replay(tmp_path)
        replay.state.epoch_length = 10
        state = replay.run()
        assert (state.max_epochs, state.epoch_length, state.max_iters) == (3, 10, None)

    @pytest.mark.parametrize(("name", "initial"), [("iteration", 0), ("epoch", 0), ("output", None)])
    def test_what_the_log_says_cannot_be_set(self, log, tmp_path, name, initial):
        train(log)
        log.close()
        for value in (5, initial):
            with pytest.raises(RecordingError, match=f"{name}={value} cannot be set"):
                setattr(Replay(tmp_path).state, name, value)

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
