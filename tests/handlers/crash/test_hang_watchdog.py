"""HangWatchdog: silence in a run is reported with the stacks, and nothing else is."""

import gc
import os
import threading
import time
import weakref

import pytest
from structlog.testing import capture_logs

from pulsetrain.engine import EventBus, Events
from pulsetrain.engine.checkpoint import CheckpointManager, disk
from pulsetrain.engine.errors import ConfigurationError, RecordingError
from pulsetrain.engine.recording.replay.playback import Replay
from pulsetrain.handlers import EventRecorder, HangWatchdog
from pulsetrain.handlers.crash.hang_watchdog import EXIT_STATUS, Silence
from tests.support import programs
from tests.support.engines import make_engine, subscriptions

SOON = 0.2  # seconds of silence that are a hang
PATIENCE = 20.0  # for what has to come


def until(condition):
    """Block in the hanging step until the watchdog has reported it."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "did not come"
        time.sleep(0.01)


def watching(but=()):
    return [thread for thread in threading.enumerate() if thread.name == "hang watchdog" and thread not in but]


def hanging_at_2(watchdog):
    """An engine whose second step blocks until the watchdog has reported."""

    def that_hangs(iteration):
        if iteration == 2:
            until(lambda: watchdog.count)

    return make_engine(that_hangs)


class Counted(HangWatchdog):
    """Signals when a report is complete."""

    count = 0

    def report(self, silent, runs):
        super().report(silent, runs)
        self.count += 1


def test_a_step_that_hangs_is_reported_once_with_the_stacks(tmp_path):
    watchdog = Counted(tmp_path, SOON)
    engine = hanging_at_2(watchdog)
    watchdog.attach(engine)
    with capture_logs() as logs:
        engine.run([0] * 4)
    watchdog.detach()
    assert engine.state.iteration == 4
    (path,) = tmp_path.iterdir()
    text = path.read_text()
    assert path.name.startswith("hang-")
    assert "s: the run hangs; 'trainer' at epoch 1, iteration 2, last event" in text.splitlines()[0]
    assert "that_hangs" in text
    assert "_watch" in text  # all threads
    assert [log["stacks"] for log in logs] == [str(path)]


def test_several_processes_that_hang_at_once_write_a_file_each(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    watchdog = Counted(tmp_path, SOON)
    engine = hanging_at_2(watchdog)
    watchdog.attach(engine)
    engine.run([0] * 4)
    watchdog.detach()
    (path,) = tmp_path.iterdir()
    assert path.name.endswith("-1-rank1.txt")


def test_a_second_hang_is_reported_again(tmp_path):
    watchdog = Counted(tmp_path, SOON)

    def step(iteration):
        if iteration in (2, 4):
            until(lambda: watchdog.count == iteration // 2)

    engine = make_engine(step)
    watchdog.attach(engine)
    with capture_logs() as logs:
        engine.run([0] * 6)
    watchdog.detach()
    assert len(watchdog.reports) == len(set(watchdog.reports)) == len(logs) == 2


def test_stop_ends_the_run_at_the_next_safe_point(tmp_path):
    watchdog = Counted(tmp_path, SOON, "stop")
    engine = hanging_at_2(watchdog)
    watchdog.attach(engine)
    with capture_logs():
        engine.run([0] * 50)
    watchdog.detach()
    assert engine.state.iteration == 2
    assert engine.state.stop_reason.startswith("hang watchdog: no event for")


@pytest.mark.slow
def test_exit_ends_the_process_with_its_status_and_the_stacks(tmp_path):
    code = f"""
import threading
from pulsetrain.engine import Engine
from pulsetrain.handlers import HangWatchdog

def never(engine, batch):
    threading.Event().wait()

engine = Engine(never)
HangWatchdog({str(tmp_path)!r}, 0.2, "exit").attach(engine)
engine.run([0])
"""
    done = programs.run("-c", code)
    assert done.returncode == EXIT_STATUS == 75
    (path,) = tmp_path.iterdir()
    assert "in never" in path.read_text()
    assert f"stacks: {path}; exit status 75" in done.stderr


def test_on_a_bus_the_events_of_any_engine_count_as_progress(tmp_path):
    bus = EventBus()
    watchdog = Counted(tmp_path, SOON)
    inner = make_engine(lambda iteration: time.sleep(SOON / 4), bus=bus)
    outer = hanging_at_2(watchdog)
    nested = type(outer)(lambda engine, batch: inner.run([0] * 8), name="outer", bus=bus)
    watchdog.attach(bus)
    with capture_logs() as logs:
        nested.run([0])  # one step of 8 steps of another engine, twice as long as the limit
    assert logs == []
    hung = type(outer)(lambda engine, batch: until(lambda: watchdog.count), name="hung", bus=bus)
    with capture_logs() as logs:
        hung.run([0])
    watchdog.detach()
    assert ["'hung'" in log["at"] for log in logs] == [True]


def test_outside_of_runs_silence_is_not_a_hang(tmp_path):
    engine = make_engine()
    watchdog = Counted(tmp_path, SOON).attach(engine)
    engine.run([0])
    assert watchdog.runs(engine.bus) == []
    failing = make_engine(lambda iteration: 1 / 0)
    other = Counted(tmp_path, SOON).attach(failing)
    with pytest.raises(ZeroDivisionError):
        failing.run([0])
    assert other.runs(failing.bus) == []
    paused = make_engine()
    third = Counted(tmp_path, SOON).attach(paused)
    paused.on(Events.ITERATION_COMPLETED(once=1))(paused.interrupt)
    paused.run([0] * 3)
    assert third.runs(paused.bus) == []
    time.sleep(2 * SOON)
    assert [each.count for each in (watchdog, other, third)] == [0, 0, 0]
    seen = []
    paused.on(Events.ITERATION_COMPLETED)(lambda: seen.append(third.runs(paused.bus)))
    paused.run([0] * 3)  # continues, without STARTED
    assert seen == [[paused]] * 2
    for each in (watchdog, other, third):
        each.detach()


def test_the_body_of_a_loop_by_hand_is_watched(tmp_path):
    import torch
    from torch import nn

    from pulsetrain import Loop, TrainingConfig
    from pulsetrain.engine import SupervisedStrategy

    watchdog = Counted(tmp_path, SOON)
    model = nn.Linear(1, 1)
    data = [(torch.ones(1, 1), torch.ones(1, 1))] * 3
    config = TrainingConfig(max_epochs=1, optimizer="sgd", learning_rate=0.1, schedule=None, seed=0)
    loop = Loop(model, data, strategy=SupervisedStrategy("mse"), config=config, handlers=[watchdog])
    with capture_logs():
        for _ in loop.batches():
            until(lambda: watchdog.count)
    assert watchdog.count == 1
    assert watchdog.runs(loop.bus) == []
    watchdog.detach()


@pytest.mark.slow
def test_saving_a_checkpoint_counts_as_progress(tmp_path, monkeypatch):
    saving, watchdog = [], Counted(tmp_path / "run", SOON)
    write = os.write

    def slow(descriptor, data):
        saving.append(len(data))
        time.sleep(SOON / 4)
        return write(descriptor, data[: 1 + len(data) // 16])

    checkpoints = CheckpointManager(tmp_path / "checkpoints")
    monkeypatch.setattr(disk.os, "write", slow)
    monkeypatch.setattr(disk.os, "fsync", lambda descriptor: None)  # a busy disk may take longer than the limit
    engine = make_engine(lambda iteration: checkpoints.save({"a": 1}, step=iteration))
    watchdog.attach(engine)
    engine.run([0])
    watchdog.detach()
    assert len(saving) > 12  # in all three times as long as the limit
    assert watchdog.count == 0


def test_a_suspended_process_is_not_reported_as_hanging():
    silence = Silence(interval=1.0)
    assert [silence.look(5, now) for now in (0.0, 1.0, 2.0)] == [0.0, 1.0, 2.0]
    assert silence.look(5, 3600.0) == 4.0  # an hour of sleep between two looks
    assert silence.look(6, 3601.0) == 0.0
    assert silence.look(6, 3602.0) == 1.0


@pytest.mark.slow
def test_the_thread_ends_with_detach_and_with_the_watchdog(tmp_path):
    engine, others = make_engine(), watching()
    watchdog = HangWatchdog(tmp_path, SOON).attach(engine)
    assert watching(others) == []
    engine.run([0])
    (thread,) = watching(others)
    assert thread.daemon
    watchdog.detach()
    until(lambda: not watching(others))
    watchdog.attach(engine)
    engine.run([0] * 2, max_epochs=1)
    assert len(watching(others)) == 1
    gone = weakref.ref(watchdog)
    del watchdog, engine
    until(lambda: gc.collect() is not None and not watching(others))
    assert gone() is None


def test_a_run_under_it_makes_the_same_events(tmp_path):
    numbers = []
    for watched in (False, True):
        engine = make_engine()
        watchdog = HangWatchdog(tmp_path)
        if watched:
            watchdog.attach(engine)
        engine.run([0] * 5)
        numbers.append(engine.bus.sequence.last)
        watchdog.detach()
    assert numbers[0] == numbers[1]


def test_no_subscription_is_called_in_an_iteration(tmp_path):
    engine = make_engine()
    watchdog = HangWatchdog(tmp_path).attach(engine)
    subscribed = subscriptions(engine.bus)
    assert not [name for name in subscribed if "ITERATION" in name or "BATCH" in name]
    watchdog.detach()


def test_a_replay_is_refused(tmp_path):
    engine = make_engine()
    recorder = EventRecorder(tmp_path / "run").attach(engine)
    engine.run([0])
    recorder.detach()
    for target in (Replay(tmp_path / "run"), Replay(tmp_path / "run").bus):
        with pytest.raises(RecordingError, match=r"HangWatchdog.*no process that trains"):
            HangWatchdog(tmp_path).attach(target)


def test_a_report_that_cannot_be_written_is_logged_and_the_run_continues(tmp_path):
    watchdog = Counted(tmp_path / "run", SOON)
    engine = make_engine(lambda iteration: until(lambda: watchdog.count))
    watchdog.attach(engine)
    watchdog.folder = tmp_path / "gone"
    with capture_logs() as logs:
        engine.run([0])
    watchdog.detach()
    assert "could not be written" in logs[0]["stacks"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seconds": 0}, r"seconds=0\): needs a positive number"),
        ({"seconds": float("nan")}, r"seconds=nan\): needs"),
        ({"seconds": float("inf")}, r"seconds=inf\): needs"),
        ({"policy": "kill"}, r"policy='kill'\): unknown; choose one of exit, report, stop"),
    ],
)
def test_wrong_arguments_are_refused_when_constructing(arguments, message):
    with pytest.raises(ConfigurationError, match=rf"HangWatchdog\({message}"):
        HangWatchdog("runs/a", **arguments)
