"""Figures are drawn by a process of their own: what is there when a run ends, fails, is killed, or forks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from structlog.testing import capture_logs

from pulsetrain.engine import Events
from pulsetrain.handlers import Plots
from pulsetrain.handlers.plots.curves import RunCurves
from pulsetrain.handlers.plots.painter import Drawing, DrawingProcess, Figures, InThisProcess, _send
from tests.support.engines import log_each_iteration, make_engine, validate_each_epoch, validated

RUN = """
import sys
from pulsetrain.engine import Engine, Events, MetricsLogged, ValidationCompleted
from pulsetrain.handlers import Plots

engine = Engine(lambda engine, batch: None, name="trainer")

@engine.on(Events.ITERATION_COMPLETED)
def log(engine):
    engine.fire(Events.METRICS_LOGGED, MetricsLogged(metrics={"train/loss": 1.0 / engine.state.iteration}))

@engine.on(Events.EPOCH_COMPLETED)
def validate(engine):
    engine.fire(Events.VALIDATION_COMPLETED, ValidationCompleted(metrics={"val/loss": 1.0}, seconds=0.0))

plots = Plots(sys.argv[1], formats=["svg"]).attach(engine)
"""


def curves(**values: float) -> RunCurves:
    run = RunCurves()
    run.add_round(1, values)
    return run


def drawing(folder, *names, formats=("svg",)):
    run = curves(**dict.fromkeys(names, 0.5))
    return Drawing([Figures("", run.snapshot(run.changed), {name: folder / name for name in run.changed}, formats)])


def start(tmp_path, code):
    return subprocess.run(
        [sys.executable, "-c", RUN + code, tmp_path], capture_output=True, text=True, timeout=300, check=False
    )


def test_the_figures_of_both_ways_are_equal(tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    painters = {"here": InThisProcess(), "there": DrawingProcess()}
    for name, painter in painters.items():
        painter.start(drawing(tmp_path / name, "loss", "accuracy", formats=("png", "svg")), time.monotonic)
        assert len(painter.result().written) == 4
        assert painter.result() is None
        painter.close()
    for path in (tmp_path / "here").iterdir():
        assert path.read_bytes() == (tmp_path / "there" / path.name).read_bytes()


def test_the_training_process_does_not_import_matplotlib_and_has_its_figures_and_no_process_at_the_end(tmp_path):
    done = start(
        tmp_path,
        "engine.run([0, 1, 2], max_epochs=3)\n"
        "from pathlib import Path\n"
        "children = [child for task in Path('/proc/self/task').iterdir() for child in (task / 'children').open()]\n"
        "print('matplotlib' in sys.modules, children)",
    )
    assert done.stdout == "False []\n", done.stderr
    assert [path.name for path in (tmp_path / "plots").iterdir()] == ["loss.svg"]
    assert done.stderr == ""


@pytest.mark.slow
def test_a_run_that_is_killed_has_the_figures_that_were_drawn(tmp_path):
    done = start(
        tmp_path,
        "import os, signal\n"
        "engine.on(Events.EPOCH_COMPLETED(once=1))(lambda: plots.draw())\n"
        "engine.on(Events.EPOCH_COMPLETED(once=2))(lambda: os.kill(os.getpid(), signal.SIGKILL))\n"
        "engine.run([0, 1, 2], max_epochs=3)",
    )  # it returns when no process holds the pipes any more
    assert done.returncode == -signal.SIGKILL
    assert [path.name for path in (tmp_path / "plots").iterdir()] == ["loss.svg"]


@pytest.mark.slow
def test_the_process_finishes_what_it_is_drawing_when_the_training_process_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr("pulsetrain.handlers.plots.painter._END_SECONDS", 120.0)
    painter = DrawingProcess()
    process = painter._running()
    _send(process.stdin, drawing(tmp_path, "loss"))
    painter.close()
    assert process.returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["loss.svg"]


@pytest.mark.slow
def test_signals_to_the_whole_group_leave_it_drawing(tmp_path):
    painter = DrawingProcess()
    painter.start(drawing(tmp_path, "loss"), time.monotonic)
    while painter.is_busy():
        if painter._process is not None:
            for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                os.kill(painter._process.pid, each)
        time.sleep(0.01)
    assert [path.name for path in painter.result().written] == ["loss.svg"]
    painter.close()


@pytest.mark.slow
def test_a_process_that_died_is_reported_and_the_training_process_draws(tmp_path):
    engine = make_engine()
    plots = Plots(tmp_path, formats=["svg"]).attach(engine)
    validated(engine, {"val/loss": 1.0})
    plots.draw()
    plots._painter._process.kill()
    plots._painter._process.wait()
    validated(engine, {"val/loss": 0.5})  # starts another one
    assert plots.draw() == [tmp_path / "plots" / "loss.svg"]
    with capture_logs() as logs, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", "/nonexistent/python")
        plots._painter.close()
        validated(engine, {"val/accuracy": 0.5})
        engine.fire(Events.COMPLETED)
    assert [each["event"] for each in logs] == ["Plots: the training process draws from now on"]
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == ["loss.svg", "metrics.svg"]


def test_a_figure_that_cannot_be_written_is_reported_at_the_end_of_the_run(tmp_path):
    engine, failures = make_engine(), []
    log_each_iteration(engine, lambda i: {"train/loss": 1.0 / i})
    validate_each_epoch(engine, [{"val/loss": 1.0, "val/accuracy": 0.5}] * 2)
    Plots(tmp_path, formats=["svg"]).attach(engine)
    engine.add_event_handler(Events.HANDLER_FAILED, lambda engine, event: failures.append(str(event.payload.error)))
    engine.add_event_handler(Events.STARTED, lambda: (tmp_path / "plots" / "loss.svg").mkdir())
    engine.run([0, 1, 2], max_epochs=2)
    assert failures
    assert all("cannot be written" in each for each in failures)
    assert (tmp_path / "plots" / "metrics.svg").exists()


@pytest.mark.slow
def test_a_forked_process_leaves_the_parents_process_alone_and_draws_with_its_own(tmp_path):
    painter = DrawingProcess()
    painter.start(drawing(tmp_path, "loss"), time.monotonic)
    painter.result()
    child = os.fork()
    if child == 0:
        try:
            (tmp_path / "child").mkdir()
            painter.start(drawing(tmp_path / "child", "loss"), time.monotonic)
            written = painter.result().written
            painter.close()
            os._exit(0 if [path.name for path in written] == ["loss.svg"] else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    painter.start(drawing(tmp_path, "accuracy"), time.monotonic)
    assert [path.name for path in painter.result().written] == ["metrics.svg"]
    painter.close()
    assert (tmp_path / "child" / "loss.svg").read_bytes() == (tmp_path / "loss.svg").read_bytes()
