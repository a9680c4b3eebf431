"""What is recorded when a run fails, is stopped or killed, and how the log continues after that."""

import contextlib
import shutil
import threading

import pytest
import torch
from structlog.testing import capture_logs

from pulsetrain.engine import Engine, Events, Phase
from pulsetrain.engine.events.payloads import CheckpointLoaded
from pulsetrain.engine.recording import EventLog, LogWriter
from pulsetrain.handlers import EventRecorder
from tests.support.engines import log, make_engine
from tests.support.recordings import recorded, types


def test_an_exception_is_in_the_log_with_what_its_engine_was_firing(tmp_path):
    engine = make_engine()
    EventRecorder(tmp_path).attach(engine)

    @engine.on(Events.EPOCH_COMPLETED)
    def fail(engine):
        raise ArithmeticError("too large")

    with pytest.raises(ArithmeticError):
        engine.run([0], max_epochs=1)
    assert types(tmp_path)[-2:] == ["epoch_completed", "exception_raised"]
    assert recorded(tmp_path)[-1]["payload"] == {"error": {"__type__": "ArithmeticError", "message": "too large"}}


def test_an_evaluators_failure_leaves_the_trainers_open_event_its_metrics(tmp_path):
    engine = make_engine()
    evaluator = Engine(lambda engine, batch: 1 / 0, name="evaluator", bus=engine.bus)
    EventRecorder(tmp_path).attach(engine)

    @engine.on(Events.EPOCH_COMPLETED)
    def evaluate(engine):
        with pytest.raises(ZeroDivisionError):
            evaluator.run([0], max_epochs=1)
        engine.state.metrics["val/loss"] = 1.0

    engine.run([0], max_epochs=1)
    events = recorded(tmp_path)
    assert [e["metrics"] for e in events if e["event"] == "epoch_completed"] == [{"val/loss": 1.0}]
    assert [e["seq"] for e in events] == sorted(e["seq"] for e in events)


def test_an_exception_is_observed_and_not_taken(tmp_path):
    engine = make_engine(lambda i: 1 / 0)
    EventRecorder(tmp_path).attach(engine)
    with pytest.raises(ZeroDivisionError):
        engine.run([0], max_epochs=1)


def test_a_terminated_run_is_written_to_its_end(tmp_path):
    engine = make_engine()
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda: engine.terminate(skip_completed=True, reason="enough"))
    EventRecorder(tmp_path).attach(engine)
    engine.run([0, 1], max_epochs=1)
    assert recorded(tmp_path)[-1]["payload"] == {"reason": "enough", "observed": False}


def test_a_log_that_is_there_is_continued_and_a_cut_line_reported(tmp_path):
    for _ in range(2):
        engine = make_engine()
        recorder = EventRecorder(tmp_path).attach(engine)
        log(engine, {"train/loss": 1.0})
        recorder.detach()
    assert types(tmp_path) == ["metrics_logged"] * 2
    engine = make_engine()
    killed = tmp_path / "killed"
    EventRecorder(tmp_path).attach(engine)
    log(engine, {"train/loss": 2.0})
    log(engine, {"train/loss": 3.0})
    shutil.copytree(tmp_path / "events", killed / "events")
    tail = killed / "events" / "tail.jsonl"
    content = tail.read_bytes().rstrip(b"\n")
    tail.write_bytes(content[:-9].ljust(tail.stat().st_size, b"\n"))
    assert len(EventLog(killed).damage) == 1
    engine = make_engine()
    EventRecorder(killed).attach(engine)
    with capture_logs() as logs:
        engine.run([0], max_epochs=1)
    (warning,) = logs
    assert warning["kept"] == ["tail.jsonl.damaged-1"]
    assert (killed / "events" / "tail.jsonl.damaged-1").read_bytes() == content[:-9].split(b"\n")[-1]
    (damage,) = EventLog(killed).damage
    assert "damaged lines: 1: between iteration 0 and the end of 'trainer'; " in damage.reason
    assert "; the unreadable bytes are in tail.jsonl.damaged-1" in damage.reason
    assert types(killed)[:5] == ["metrics_logged"] * 3 + ["log_lost", "started"]
    assert types(killed)[-1] == "completed"
    numbers = [event["seq"] for event in recorded(killed)]
    assert numbers == sorted(set(numbers))


def test_a_process_killed_in_the_event_in_which_it_saved_leaves_that_event_with_what_was_known(tmp_path):
    engine = make_engine()
    recorder = EventRecorder(tmp_path).attach(engine)

    @engine.on(Events.EPOCH_COMPLETED, phase=Phase.PERSIST)
    def save(engine):
        engine.state.metrics = {"accuracy": 0.5}
        recorder.state_dict()
        shutil.copytree(tmp_path / "events", tmp_path / "killed" / "events")

    engine.run([0], max_epochs=1)
    expected = [event for event in recorded(tmp_path) if event["event"] == "epoch_completed"]
    (found,) = [event for event in recorded(tmp_path / "killed") if event["event"] == "epoch_completed"]
    assert found.pop("open") is True
    assert [found] == expected


def test_after_a_checkpoint_the_log_continues_and_repeated_events_supersede_earlier_ones(tmp_path):
    engine = make_engine()
    recorder = EventRecorder(tmp_path).attach(engine)
    log(engine, {"train/loss": 1.0})
    checkpoint = recorder.state_dict()
    log(engine, {"train/loss": 2.0})
    log(engine, {"train/loss": 3.0})
    recorder.detach()
    for _ in range(2):
        engine = make_engine()
        recorder = EventRecorder(tmp_path).attach(engine)
        recorder.load_state_dict(checkpoint)
        engine.fire(Events.CHECKPOINT_LOADED, CheckpointLoaded(path="000000001-checkpoint", iteration=1))
        log(engine, {"train/loss": 2.0})
        assert (recorder.resume_check.agreed, recorder.resume_check.difference) == (1, None)
        assert recorder.resume_check.waiting
        recorder.detach()
    events = EventLog(tmp_path)
    assert [event.payload["metrics"]["train/loss"] for event in events.read(event="metrics_logged")] == [1.0, 2.0]
    assert [event.ord for event in events.read(event="metrics_logged")] == [0, 1]
    everything = list(events.read(event="metrics_logged", superseded=True))
    assert [event.payload["metrics"]["train/loss"] for event in everything] == [1.0, 2.0, 3.0, 2.0, 2.0]


def test_a_resumed_run_in_another_folder_counts_on(tmp_path):
    engine = make_engine()
    recorder = EventRecorder(tmp_path / "a").attach(engine)
    for loss in (1.0, 2.0):
        log(engine, {"train/loss": loss})
    checkpoint = recorder.state_dict()
    recorder.detach()
    engine = make_engine()
    recorder = EventRecorder(tmp_path / "b").attach(engine)
    recorder.load_state_dict(checkpoint)
    engine.fire(Events.CHECKPOINT_LOADED, CheckpointLoaded(path="000000001-checkpoint", iteration=1))
    log(engine, {"train/loss": 3.0})
    recorder.detach()
    assert [(event.event, event.ord) for event in EventLog(tmp_path / "b").read()] == [
        ("checkpoint_loaded", -1),
        ("metrics_logged", 2),
    ]


def test_after_a_handled_failure_values_from_a_device_are_recorded_as_before(tmp_path):
    engine = make_engine(lambda i: {"loss": torch.tensor(float(i))})
    evaluator = Engine(lambda engine, batch: {"loss": torch.tensor(1.0)}, name="evaluator", bus=engine.bus)
    evaluator.state.metrics = {"accuracy": 0.5}
    EventRecorder(tmp_path).attach(engine)

    @evaluator.on(Events.EPOCH_COMPLETED)
    def fail(evaluator):
        raise ZeroDivisionError

    @engine.on(Events.ITERATION_COMPLETED(once=40))
    def validate(engine):
        with contextlib.suppress(ZeroDivisionError):
            evaluator.run([0], max_epochs=1)

    engine.run([0] * 60, max_epochs=1)
    losses = [
        event["output"]["loss"]
        for event in recorded(tmp_path)
        if event["event"] == "iteration_completed" and event["engine"] == "trainer"
    ]
    assert losses == [float(n) for n in range(1, 61)]


@pytest.mark.parametrize("skip_completed", [False, True])
def test_a_run_that_is_terminated_leaves_a_closed_log_and_no_lock(tmp_path, skip_completed):
    engine = make_engine()
    EventRecorder(tmp_path).attach(engine)
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=2), engine.terminate, skip_completed)
    engine.run([0, 1, 2], max_epochs=1)
    assert EventLog(tmp_path).ended
    assert types(tmp_path)[-1] == ("terminate" if skip_completed else "completed")
    LogWriter(tmp_path / "events").close()
    assert {path.name for path in tmp_path.iterdir()} == {"run.json", "events"}


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_that_continues_after_an_interrupt_closes_its_log(tmp_path, fails):
    engine = make_engine(lambda i: 1 / (i != 3 or not fails))
    EventRecorder(tmp_path, every=10).attach(engine)
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=2), engine.interrupt)
    engine.run([0, 1, 2], max_epochs=1)
    assert engine.is_paused
    with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
        engine.run([0, 1, 2], max_epochs=1)
    assert types(tmp_path)[-1] == ("exception_raised" if fails else "completed")
    assert EventLog(tmp_path).ended
    assert "pulsetrain-stall-watch" not in _thread_names()


def test_a_run_that_continues_after_an_interrupt_is_watched_for_stalls(tmp_path):
    engine = make_engine()
    EventRecorder(tmp_path).attach(engine)
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=1), engine.interrupt)
    engine.run([0, 1, 2], max_epochs=1)
    watched = []
    engine.add_event_handler(
        Events.ITERATION_COMPLETED, lambda: watched.append("pulsetrain-stall-watch" in _thread_names())
    )
    engine.run([0, 1, 2], max_epochs=1)
    assert watched == [True, True]


def test_an_evaluator_in_a_run_that_continues_does_not_close_its_log(tmp_path):
    engine = make_engine()
    evaluator = Engine(lambda engine, batch: None, name="evaluator", bus=engine.bus)
    EventRecorder(tmp_path).attach(engine)
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=2), engine.interrupt)
    engine.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run([0], max_epochs=1))
    ended = []
    engine.add_event_handler(Events.COMPLETED, lambda: ended.append(EventLog(tmp_path).ended))
    engine.run([0, 1], max_epochs=1)
    engine.run([0, 1], max_epochs=1)
    assert ended == [False]
    assert EventLog(tmp_path).ended


def _thread_names():
    return [each.name for each in threading.enumerate()]
