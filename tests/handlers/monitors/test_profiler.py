"""Profiler: the trace of a window, of exactly its iterations, however the run ends."""

import json

import pytest
import torch
from structlog.testing import capture_logs
from torch import nn

from pulsetrain.engine import Engine, Events
from pulsetrain.engine.errors import ConfigurationError, RecordingError, RunFolderError
from pulsetrain.engine.recording.replay.playback import Replay
from pulsetrain.handlers import EventRecorder, Profiler
from tests.support.engines import make_engine, subscriptions


def make(step=lambda iteration: None, bus=None):
    model = nn.Linear(4, 4)

    def process(engine, batch):
        model(torch.ones(2, 4)).sum().backward()
        return step(engine.state.iteration)

    return Engine(process, name="trainer", bus=bus)


def trace(folder, first):
    return json.loads((folder / "profile" / f"trace-{first}.json").read_text())["traceEvents"]


def marks(events, kind):
    return sorted({int(event["name"].split()[1]) for event in events if event.get("name", "").startswith(f"{kind} ")})


def files(folder):
    return sorted(path.name for path in (folder / "profile").iterdir())


def test_the_trace_holds_the_windows_iterations_and_what_they_computed(tmp_path):
    engine = make()
    Profiler(tmp_path, start=4, iterations=3, warmup=2).attach(engine)
    engine.run(range(20))
    assert files(tmp_path) == ["trace-4.json"]
    events = trace(tmp_path, 4)
    assert marks(events, "iteration") == marks(events, "batch") == [4, 5, 6]
    assert len([event for event in events if event.get("name") == "aten::linear"]) == 3
    step = next(event for event in events if event.get("name") == "iteration 5")
    linears = [event for event in events if event.get("name") == "aten::linear"]
    assert len([e for e in linears if step["ts"] <= e["ts"] <= step["ts"] + step["dur"]]) == 1


@pytest.mark.parametrize("begins", [2, 50])
def test_after_its_window_and_its_run_it_receives_nothing_of_an_iteration_until_the_next_run(begins, tmp_path):
    engine = make()
    Profiler(tmp_path, start=begins, iterations=2, warmup=1).attach(engine)
    subscribed = []
    of_iterations = (Events.GET_BATCH_STARTED, Events.GET_BATCH_COMPLETED, Events.ITERATION_STARTED)
    engine.on(Events.ITERATION_COMPLETED)(
        lambda: subscribed.append(
            len([event for event in of_iterations if engine.hears(event)])
            + len(engine.bus.signal(Events.ITERATION_COMPLETED).receivers)
            - 1
        )
    )
    engine.run(range(6), max_epochs=1)
    assert subscribed == ([5, 5, 5, 0, 0, 0] if begins == 2 else [5] * 6)
    assert not any(engine.hears(event) for event in of_iterations)
    engine.run(range(6), max_epochs=1)
    assert subscribed[6:] == subscribed[:6]


def test_without_a_warm_up_it_may_begin_with_the_first(tmp_path):
    engine = make()
    Profiler(tmp_path, start=1, iterations=2, warmup=0).attach(engine)
    engine.run(range(5))
    assert marks(trace(tmp_path, 1), "iteration") == [1, 2]


def test_a_resumed_run_counts_its_window_from_its_start(tmp_path):
    engine = make()
    engine.state.iteration, engine.state.epoch = 10, 1
    engine.state.max_epochs, engine.state.epoch_length = 2, 10
    Profiler(tmp_path, start=3, iterations=2, warmup=1).attach(engine)
    engine.run(range(10), max_epochs=2)
    assert marks(trace(tmp_path, 13), "iteration") == [13, 14]


@pytest.mark.parametrize("skip_completed", [False, True])
def test_a_run_that_is_ended_inside_the_window_leaves_what_there_was(tmp_path, skip_completed):
    engine = make()
    engine.on(Events.ITERATION_COMPLETED(once=4))(lambda: engine.terminate(skip_completed))
    Profiler(tmp_path, start=3, iterations=50).attach(engine)
    engine.run(range(100))
    assert marks(trace(tmp_path, 3), "iteration") == [3, 4]


def test_a_step_that_fails_inside_the_window_leaves_what_there_was_and_its_error(tmp_path):
    def step(iteration):
        if iteration == 4:
            raise ValueError("bad batch")

    engine = make(step)
    profiler = Profiler(tmp_path, start=3, iterations=50).attach(engine)
    with pytest.raises(ValueError, match="bad batch"):
        engine.run(range(100))
    assert marks(trace(tmp_path, 3), "iteration") == [3, 4]
    assert not profiler._mark_of._exit_callbacks


def test_a_run_that_ends_before_the_window_says_so_and_writes_nothing(tmp_path):
    engine = make()
    Profiler(tmp_path, start=6, iterations=2, warmup=3).attach(engine)
    with capture_logs() as logs:
        engine.run(range(4))
    assert files(tmp_path) == []
    assert [(log["window"], log["ended"]) for log in logs] == [("iterations 6 to 7", 4)]
    assert not torch.autograd._profiler_enabled()


def test_two_windows_at_once_are_one_trace_and_one_warning(tmp_path):
    engine = make()
    Profiler(tmp_path / "a", start=2, iterations=2, warmup=0).attach(engine)
    Profiler(tmp_path / "b", start=3, iterations=2, warmup=0).attach(engine)
    subscribed = []
    engine.on(Events.ITERATION_COMPLETED(once=6))(lambda: subscribed.append(engine.hears(Events.GET_BATCH_STARTED)))
    with capture_logs() as logs:
        engine.run(range(8))
    assert subscribed == [False]
    assert engine.state.iteration == 8
    assert [log["error"].partition("; ")[0] for log in logs] == [
        "RuntimeError: Profiler: another profiler is active in this process"
    ]
    assert files(tmp_path / "b") == []
    assert marks(trace(tmp_path / "a", 2), "iteration") == [2, 3]
    assert not torch.autograd._profiler_enabled()


def test_another_engine_of_the_bus_has_no_marks(tmp_path):
    engine = make()
    other = make_engine(bus=None)
    engine.on(Events.ITERATION_COMPLETED)(lambda: other.run([0]))
    Profiler(tmp_path, start=2, iterations=2, warmup=0).attach(engine)
    engine.run(range(6))
    assert marks(trace(tmp_path, 2), "iteration") == [2, 3]


def test_memory_and_stacks_are_in_the_trace_where_asked_for(tmp_path):
    engine = make()
    Profiler(tmp_path, start=2, iterations=2, warmup=1, memory=True, stacks=True).attach(engine)
    engine.run(range(6))
    names = [event.get("name", "") for event in trace(tmp_path, 2)]
    assert "[memory]" in names
    assert any("test_profiler.py" in name for name in names)


def test_detached_inside_the_window_it_leaves_nothing(tmp_path):
    engine = make()
    profiler = Profiler(tmp_path, start=2, iterations=50, warmup=0).attach(engine)
    engine.on(Events.ITERATION_COMPLETED(once=4))(profiler.detach)
    engine.run(range(8))
    assert files(tmp_path) == []
    assert not torch.autograd._profiler_enabled()
    assert len(subscriptions(engine.bus)) == 1


def test_a_place_that_cannot_be_written_and_a_replay_are_refused(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RunFolderError, match=r"Profiler\(folder=.*cannot be written"):
        Profiler(tmp_path / "file").attach(make_engine())
    engine = make_engine()
    recorder = EventRecorder(tmp_path / "run").attach(engine)
    engine.run([0])
    recorder.detach()
    with pytest.raises(RecordingError, match=r"Profiler.*no process that trains"):
        Profiler(tmp_path).attach(Replay(tmp_path / "run"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"start": 0}, r"start=0\): needs a whole number of at least 1"),
        ({"iterations": 0}, r"iterations=0\): needs"),
        ({"warmup": -1}, r"warmup=-1\): needs a whole number of at least 0"),
        ({"start": 2, "warmup": 2}, r"start=2, warmup=2\): the warm-up would start before the run; use start=3"),
        ({"memory": 1}, r"memory=1\): needs True or False"),
    ],
)
def test_wrong_arguments_are_refused_when_constructing(arguments, message):
    with pytest.raises(ConfigurationError, match=rf"Profiler\({message}"):
        Profiler("runs/a", **arguments)
