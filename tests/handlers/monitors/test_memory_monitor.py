"""MemoryMonitor: true readings, and a warning where memory grows and nowhere else."""

import gc
import sys

import pytest
import torch
from structlog.testing import capture_logs
from torch import nn

from pulsetrain.engine import Events, Every
from pulsetrain.engine.errors import ConfigurationError, RecordingError
from pulsetrain.engine.recording import EventLog
from pulsetrain.engine.recording.replay.playback import Replay
from pulsetrain.handlers import EventRecorder, MemoryMonitor
from pulsetrain.handlers.monitors import memory_monitor
from tests.support.engines import make_engine, subscriptions

RSS = "memory/host_rss_bytes"
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/statm")


def run(values, **arguments):
    """One reading of "memory/x" an iteration: the anomalies, and the lines that were logged."""
    engine = make_engine()
    readings = iter(values)
    monitor = MemoryMonitor(Every(iterations=1), read=lambda: {"memory/x": next(readings)}, **arguments)
    monitor.attach(engine)
    anomalies = []
    engine.on(Events.ANOMALY_DETECTED)(lambda engine, event: anomalies.append((event.iteration, event.payload)))
    with capture_logs() as logs:
        engine.run([0] * len(values))
    return anomalies, logs


def test_steady_growth_is_one_warning_and_one_anomaly():
    anomalies, logs = run([float(100 + 10 * each) for each in range(12)], leak_after=3)
    ((iteration, anomaly),) = anomalies
    assert iteration == 5  # the first reading does not count; then 3 are above the one before
    assert (anomaly.kind, anomaly.value, anomaly.batch_indices) == ("memory_growth", 30.0, ())
    assert [(log["of"], log["readings"]) for log in logs] == [("memory/x", 3)]


@pytest.mark.parametrize(
    "values",
    [
        [100.0] * 12,
        [100.0, 300.0, 500.0, 500.0, 500.0, 500.0, 500.0, 500.0],  # allocated at first
        [100.0, 120.0, 140.0, 130.0] * 4,  # given back now and then
        [1000.0 + each for each in range(12)],  # 0.3% in three readings
    ],
    ids=["level", "warm-up", "saw", "little"],
)
def test_other_growth_patterns_are_not_a_leak(values):
    assert run(values, leak_after=3) == ([], [])


def test_slow_growth_counts_if_the_configured_share_is_small():
    anomalies, _ = run([1000.0 + each for each in range(12)], leak_after=3, growth=0.001)
    assert len(anomalies) == 1


def test_each_run_is_evaluated_from_its_start():
    engine = make_engine()
    numbers = iter(range(100, 200))
    MemoryMonitor(Every(iterations=1), 3, 0.0, read=lambda: {"memory/x": float(next(numbers))}).attach(engine)
    anomalies = []
    engine.on(Events.ANOMALY_DETECTED)(lambda: anomalies.append(engine.state.iteration))
    with capture_logs():
        for _ in range(2):
            engine.run([0] * 8, max_epochs=1)
    assert anomalies == [5, 5]


@pytest.mark.slow
@linux
def test_a_planted_leak_is_found_and_a_run_without_one_has_no_warning():
    kept = []

    def leaking(iteration):
        kept.append(torch.ones(4 << 20))  # 16 MiB

    def clean(iteration):
        torch.ones(4 << 20)

    found = {}
    for step in (leaking, clean):
        engine = make_engine(step)
        MemoryMonitor(Every(iterations=1), leak_after=6, growth=0.0001).attach(engine)
        found[step] = []
        engine.on(Events.ANOMALY_DETECTED)(lambda engine, event, to=found[step]: to.append(event.payload))
        with capture_logs():
            engine.run([0] * 20)
        kept.clear()
        gc.collect()
    assert [anomaly.kind for anomaly in found[leaking]] == ["memory_growth"]
    assert found[leaking][0].value >= 5 * 16 * 2**20 - 2**20  # the rest of the process may have given some back
    assert found[clean] == []


@linux
def test_the_host_memory_is_the_kernels_value():
    engine = make_engine()
    seen = []
    engine.on(Events.METRICS_LOGGED)(lambda engine, event: seen.append(event.payload.metrics))
    MemoryMonitor(Every(iterations=2)).attach(engine)
    engine.run([0] * 5)
    with open("/proc/self/status") as file:
        kilobytes = next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))
    assert len(seen) == 2
    assert seen[-1][RSS] == pytest.approx(kilobytes * 1024, rel=0.05)


def test_without_a_kernel_value_the_peak_is_read(monkeypatch):
    def no_file(*_, **__):
        raise FileNotFoundError

    monkeypatch.setattr("builtins.open", no_file)
    found = memory_monitor._of_host()
    assert list(found) == ["memory/host_peak_bytes"]
    assert found["memory/host_peak_bytes"] > 2**24  # torch alone takes more


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_device_memory_is_the_allocators_value():
    engine = make_engine(lambda iteration: None)
    seen = []
    engine.on(Events.METRICS_LOGGED)(lambda engine, event: seen.append(event.payload.metrics))
    MemoryMonitor(Every(iterations=1)).attach(engine)
    held = nn.Linear(1024, 1024, device="cuda")
    engine.run([0])
    assert seen[0]["memory/device_allocated_bytes"] == torch.cuda.memory_allocated() >= held.weight.nbytes
    assert seen[0]["memory/device_peak_bytes"] >= seen[0]["memory/device_allocated_bytes"]
    assert seen[0]["memory/device_reserved_bytes"] == torch.cuda.memory_reserved()


def test_the_device_is_that_of_the_engines_backend(monkeypatch):
    asked = []

    def answer(number):
        return lambda device: asked.append(device) or number

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    for number, name in enumerate(("memory_allocated", "max_memory_allocated", "memory_reserved"), 1):
        monkeypatch.setattr(torch.cuda, name, answer(number))
    assert memory_monitor._of_device(torch.device("cuda:1")) == {
        "memory/device_allocated_bytes": 1.0,
        "memory/device_peak_bytes": 2.0,
        "memory/device_reserved_bytes": 3.0,
    }
    assert asked == [torch.device("cuda:1")] * 3
    assert memory_monitor._of_device(torch.device("cpu")) == {}


def test_a_recording_does_not_expect_its_numbers_again(tmp_path):
    engine = make_engine(lambda iteration: 1.0)
    recorder = EventRecorder(tmp_path).attach(engine)
    numbers = iter(range(100, 200))
    MemoryMonitor(Every(iterations=1), 3, 0.0, read=lambda: {"memory/x": float(next(numbers))}).attach(engine)
    with capture_logs():
        engine.run([0] * 6)
    recorder.detach()
    own = [event for event in EventLog(tmp_path).read() if event.event in ("metrics_logged", "anomaly_detected")]
    assert {event.event for event in own} == {"metrics_logged", "anomaly_detected"}
    assert all(event.ord < 0 for event in own)
    with pytest.raises(RecordingError, match=r"MemoryMonitor.*no process that trains"):
        MemoryMonitor().attach(Replay(tmp_path))


def test_a_reading_that_fails_does_not_stop_the_run():
    engine = make_engine()
    MemoryMonitor(Every(iterations=1), read=lambda: 1 / 0).attach(engine)
    with capture_logs() as logs:
        engine.run([0] * 3)
    assert engine.state.iteration == 3
    assert len(logs) == 1


def test_a_detached_monitor_reads_nothing():
    engine = make_engine()
    monitor = MemoryMonitor(Every(iterations=1), read=lambda: pytest.fail("was read")).attach(engine)
    monitor.detach()
    assert subscriptions(engine.bus) == {}
    engine.run([0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"leak_after": 1}, r"leak_after=1\): needs a whole number of at least 2"),
        ({"leak_after": 2.5}, r"leak_after=2.5\): needs"),
        ({"growth": -0.1}, r"growth=-0.1\): needs a finite number"),
        ({"growth": float("nan")}, r"growth=nan\): needs"),
    ],
)
def test_wrong_arguments_are_refused_when_constructing(arguments, message):
    with pytest.raises(ConfigurationError, match=rf"MemoryMonitor\({message}"):
        MemoryMonitor(**arguments)


def test_what_is_not_a_cadence_is_refused():
    with pytest.raises(TypeError, match=r"MemoryMonitor\(every=50\): needs an Every"):
        MemoryMonitor(50)
