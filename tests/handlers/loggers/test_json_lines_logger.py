"""The objects of a JSONLinesLogger: what each of them says."""

import math

import numpy as np

from pulsetrain.engine import Events, Every
from pulsetrain.engine.events.payloads import MediaLogged
from pulsetrain.handlers import JSONLinesLogger
from tests.support.engines import log_each_iteration, make_engine, policy_updated, rolled_out, validate_each_epoch
from tests.support.metric_files import at, lines


def test_an_object_for_each_event_that_says_when_and_where_it_was(tmp_path):
    engine, times = make_engine(), []
    log_each_iteration(engine, lambda i: {"train/loss": 1 / 3 / i})
    validate_each_epoch(engine, [{"val/loss": 0.25}])

    @engine.on(Events.METRICS_LOGGED | Events.VALIDATION_COMPLETED)
    def note(engine, event):
        times.append(event.time_ns / 1e9)

    JSONLinesLogger(tmp_path).attach(engine)
    engine.run([0, 1], max_epochs=1)
    found = lines(tmp_path)
    assert [line.pop("time") for line in found] == times
    counters = {"engine": "trainer", "epoch": 1}
    assert found == [
        {"event": "metrics_logged", **counters, "iteration": 1, "train/loss": 1 / 3},
        {"event": "metrics_logged", **counters, "iteration": 2, "train/loss": 1 / 3 / 2},
        {"event": "validation_completed", **counters, "iteration": 2, "val/loss": 0.25, "seconds": 0.5},
    ]


def test_an_object_for_each_rollout_and_each_update_of_the_policy(tmp_path):
    engine = make_engine()
    JSONLinesLogger(tmp_path, every=Every(iterations=9)).attach(engine)
    rolled_out(engine, {"rollout/return": 4.0})
    policy_updated(engine, {"policy/kl": 0.125})
    found = lines(tmp_path)
    assert [line["event"] for line in found] == ["rollout_completed", "policy_updated"]
    assert (found[0]["rollout/return"], found[0]["seconds"]) == (4.0, 0.5)
    assert found[1]["policy/kl"] == 0.125
    assert "seconds" not in found[1]


def test_numbers_of_any_kind_are_valid_json(tmp_path):
    engine = make_engine()
    JSONLinesLogger(tmp_path).attach(engine)
    at(engine, 1, 1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": np.float32(0.5), "e": 3, "event": 1.0})
    line = lines(tmp_path)[0]
    assert [line[name] for name in "abcde"] == ["NaN", "Infinity", "-Infinity", 0.5, 3]
    assert (line["event"], line["event_"]) == ("metrics_logged", 1.0)


def test_texts_are_logged_and_pictures_are_not(tmp_path):
    engine = make_engine()
    JSONLinesLogger(tmp_path).attach(engine)
    for kind, value in (("text", "häuser\nund wälder"), ("image", np.zeros((2, 2), np.uint8))):
        engine.fire(Events.MEDIA_LOGGED, MediaLogged(name="sample", kind=kind, value=value))
    (line,) = lines(tmp_path)
    assert (line["event"], line["name"], line["text"]) == ("media_logged", "sample", "häuser\nund wälder")


def test_its_own_cadence_reads_the_output(tmp_path):
    engine = make_engine(lambda i: float(i))
    JSONLinesLogger(tmp_path, Every(iterations=2)).attach(engine)
    engine.run([0] * 4, max_epochs=1)
    assert [(line["event"], line["iteration"], line["train/loss"]) for line in lines(tmp_path)] == [
        ("metrics_logged", 2, 2.0),
        ("metrics_logged", 4, 4.0),
    ]
