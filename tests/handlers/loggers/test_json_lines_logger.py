import errno
import json
import math
import os

import numpy as np
import pytest
from structlog.testing import capture_logs

from pulsetrain.engine import Events, Every
from pulsetrain.engine.errors import RunFolderError
from pulsetrain.engine.events.payloads import CheckpointLoaded, MediaLogged
from pulsetrain.handlers import JSONLinesLogger
from tests.support.engines import (
    log,
    log_each_iteration,
    make_engine,
    policy_updated,
    rolled_out,
    validate_each_epoch,
    validated,
)


def lines(folder):
    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]


def at(engine, epoch, iteration, metrics):
    engine.state.epoch, engine.state.iteration = epoch, iteration
    log(engine, metrics)


def resume(logger, engine, iteration, state):
    logger.load_state_dict(state)
    engine.state.iteration = iteration
    engine.fire(Events.CHECKPOINT_LOADED, CheckpointLoaded(path=f"{iteration:09d}-checkpoint", iteration=iteration))


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
    place = {"engine": "trainer", "epoch": 1}
    assert found == [
        {"event": "metrics_logged", **place, "iteration": 1, "train/loss": 1 / 3},
        {"event": "metrics_logged", **place, "iteration": 2, "train/loss": 1 / 3 / 2},
        {"event": "validation_completed", **place, "iteration": 2, "val/loss": 0.25, "seconds": 0.5},
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


def test_texts_are_kept_and_pictures_are_not(tmp_path):
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


def test_a_resumed_run_takes_out_the_lines_after_its_checkpoint(tmp_path):
    engine = make_engine()
    logger = JSONLinesLogger(tmp_path).attach(engine)
    at(engine, 1, 1, {"a": 1.0})
    at(engine, 1, 2, {"a": 2.0})
    checkpoint = logger.state_dict()
    validated(engine, {"val/loss": 9.0})
    at(engine, 1, 3, {"a": 3.0})
    engine = make_engine()
    again = JSONLinesLogger(tmp_path).attach(engine)
    again.load_state_dict(checkpoint)
    assert len(lines(tmp_path)) == 4  # a checkpoint that is refused costs nothing
    resume(again, engine, 2, checkpoint)
    assert [line["a"] for line in lines(tmp_path)] == [1.0, 2.0]
    at(engine, 1, 3, {"a": 3.5})
    assert [line["a"] for line in lines(tmp_path)] == [1.0, 2.0, 3.5]
    resume(again, engine, 1000, {"lines": 1})  # of another run
    assert len(lines(tmp_path)) == 3


def test_a_run_that_begins_again_takes_its_lines_out(tmp_path):
    engine = make_engine()
    logger = JSONLinesLogger(tmp_path).attach(engine)
    at(engine, 1, 1, {"a": 1.0})
    logger.begin_again()
    assert lines(tmp_path) == []
    at(engine, 1, 1, {"a": 2.0})
    assert [line["a"] for line in lines(tmp_path)] == [2.0]


def test_a_line_that_a_killed_run_left_unfinished_is_dropped_and_reported(tmp_path):
    engine = make_engine()
    JSONLinesLogger(tmp_path).attach(engine)
    at(engine, 1, 1, {"a": 1.0})
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"event": "metr')
    with capture_logs() as logs:
        JSONLinesLogger(tmp_path).attach(make_engine())
    assert path.read_bytes() == whole
    assert logs[0]["dropped"] == '{"event": "metr'


@pytest.mark.parametrize("content", [b'{"step": 1}\n', b"[1]\n", b"\xff\xfe\n", b"iteration,epoch\n"])
def test_another_file_is_refused_and_left_as_it_is(tmp_path, content):
    (tmp_path / "metrics.jsonl").write_bytes(content)
    with pytest.raises(
        RunFolderError, match=r"JSONLinesLogger\(folder=.*not written by this logger.*move it or choose"
    ):
        JSONLinesLogger(tmp_path).attach(make_engine())
    assert (tmp_path / "metrics.jsonl").read_bytes() == content


def test_a_line_that_could_not_be_written_is_written_with_the_next(tmp_path):
    engine = make_engine()
    JSONLinesLogger(tmp_path).attach(engine)
    (tmp_path / "metrics.jsonl").mkdir()
    with capture_logs() as logs:
        at(engine, 1, 1, {"a": 1.0})
    assert len(logs) == 1
    (tmp_path / "metrics.jsonl").rmdir()
    at(engine, 1, 2, {"a": 2.0})
    assert [line["a"] for line in lines(tmp_path)] == [1.0, 2.0]


def test_two_of_them_in_one_folder_are_refused(tmp_path):
    engine = make_engine()
    JSONLinesLogger(tmp_path).attach(engine)
    with pytest.raises(RunFolderError, match="another JSONLinesLogger of this bus writes"):
        JSONLinesLogger(tmp_path / "." / "").attach(engine)


@pytest.fixture
def full(monkeypatch):
    """Whether the disk is full; call it to say so."""
    write, state = os.write, {"full": False}

    def refuse(descriptor, content):
        if state["full"]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, content)

    monkeypatch.setattr(os, "write", refuse)
    return lambda whether: state.update(full=whether)


def test_a_disk_that_stays_full_costs_the_oldest_lines_and_not_the_memory(tmp_path, full, monkeypatch):
    monkeypatch.setattr("pulsetrain.handlers.loggers.text_file._AT_MOST", 250)
    engine = make_engine()
    JSONLinesLogger(tmp_path).attach(engine)
    at(engine, 1, 1, {"a": 1.0})
    full(True)
    with capture_logs() as logs:
        for iteration in range(2, 302):
            at(engine, 1, iteration, {"a": float(iteration)})
    assert sum("the oldest are lost" in line["event"] for line in logs) == 1
    full(False)
    at(engine, 1, 302, {"a": 302.0})
    assert [line["iteration"] for line in lines(tmp_path)] == [1, *range(53, 303)]


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_lines_that_wait_after_a_checkpoint_are_not_written(tmp_path, full, kept):
    engine, states = make_engine(), {}
    logger = JSONLinesLogger(tmp_path).attach(engine)
    for iteration in (1, 2, 3, 4):
        full(iteration > 2)
        with capture_logs():
            at(engine, 1, iteration, {"a": 1.0})
        states[iteration] = logger.state_dict()
    resume(logger, engine, kept, states[kept])
    assert logger.state_dict() == states[kept] == {"lines": kept}
    full(False)
    at(engine, 1, kept + 1, {"a": 9.0})
    assert [line["iteration"] for line in lines(tmp_path)] == list(range(1, kept + 2))
