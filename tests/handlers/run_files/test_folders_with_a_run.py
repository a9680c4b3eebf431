"""A new run does not begin where another one has recorded something; a run that resumes without a checkpoint does."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from pulsetrain.engine import Engine, Events, Every
from pulsetrain.engine.errors import RunFolderError
from pulsetrain.engine.recording import EventLog
from pulsetrain.handlers import Checkpointer, CSVLogger, EventRecorder, JSONLinesLogger, Plots, TensorBoardLogger
from tests.support.cases import slow_but
from tests.support.runs_folders import RECORDING, Make, child, files, in_a_run, make


@pytest.mark.parametrize("second", slow_but(("Checkpointer", "CSVLogger"), RECORDING))
@pytest.mark.parametrize("first", slow_but(("Checkpointer", "EventRecorder", "TensorBoardLogger"), RECORDING))
def test_a_new_run_in_a_folder_that_holds_one_is_refused_with_the_remedies(first: str, second: str, tmp_path: Path):
    make(tmp_path, RECORDING[first]).train()
    before = files(tmp_path)
    with pytest.raises(RunFolderError) as refused:
        make(tmp_path, RECORDING[second]).train()
    assert files(tmp_path) == before
    assert "already holds a run" in str(refused.value)
    assert "resume='latest'" in str(refused.value)
    assert "choose another folder" in str(refused.value)


def test_a_log_of_a_newer_version_is_a_run_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setattr("pulsetrain.engine.recording.log.writer.FORMAT", 99)
        make(tmp_path, EventRecorder).train()
    before = files(tmp_path)
    with pytest.raises(RunFolderError, match="already holds a run"):
        make(tmp_path, CSVLogger).train()
    assert files(tmp_path) == before


@pytest.mark.parametrize("ended", ["failed", "killed", "completed without a checkpoint"])
def test_a_run_that_resumes_without_a_checkpoint_begins_every_record_again(ended: str, tmp_path: Path):
    def first(ready: Callable[[], None], wait: Callable[[], None]) -> None:
        run = make(tmp_path, EventRecorder, CSVLogger, JSONLinesLogger)
        if ended != "completed without a checkpoint":
            in_a_run(run, 7, lambda: os.kill(os.getpid(), signal.SIGKILL) if ended == "killed" else 1 // 0)
        try:
            run.train()
        finally:
            ready()

    if ended == "killed":
        with pytest.raises(AssertionError, match="the child has failed"), child(first):
            pass
    else:
        with child(first):
            pass
    run = make(tmp_path, EventRecorder, CSVLogger, JSONLinesLogger, Checkpointer)
    run.train(resume="latest")
    rows = [int(row.split(",")[0]) for row in (tmp_path / "metrics.csv").read_text().splitlines()[1:]]
    logged = [event.iteration for event in EventLog(tmp_path).read(engine="trainer", event="iteration_completed")]
    assert rows == sorted(rows)
    assert logged == list(range(1, 11))


def test_a_folder_whose_run_recorded_nothing_may_be_used(tmp_path: Path):
    run = make(tmp_path, *RECORDING.values())
    run.add_event_handler(Events.EPOCH_STARTED, lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        run.train()
    assert (tmp_path / "run.json").exists()
    make(tmp_path, *RECORDING.values()).train()
    assert [event.iteration for event in EventLog(tmp_path).read(event="iteration_completed", engine="trainer")] == [
        *range(1, 11)
    ]


def test_engines_without_a_trainer_follow_the_same_rule(tmp_path: Path):
    def run() -> None:
        engine = Engine(lambda engine, batch: 1 / batch)
        CSVLogger(tmp_path, Every(iterations=1)).attach(engine)
        engine.run([1, 2, 4])

    run()
    with pytest.raises(RunFolderError, match="already holds a run"):
        run()


@pytest.mark.parametrize("handler", [TensorBoardLogger, lambda folder: Plots(folder, formats=["svg"])])
def test_metrics_and_figures_of_one_run_may_be_continued(handler: Make, tmp_path: Path):
    make(tmp_path, handler, Checkpointer).train()
    again = make(tmp_path, handler, Checkpointer, epochs=2)
    again.train(resume="latest")
    assert again.state.iteration == 20

    twice = make(tmp_path / "twice", handler)
    twice.train()
    twice.train()
    assert twice.state.iteration == 10

    (tmp_path / "new" / "plots").mkdir(parents=True)
    (tmp_path / "new" / "plots" / "data.png").touch()
    (tmp_path / "new" / "metrics.py").write_text("def accuracy(a, b):\n    return a == b\n")
    (tmp_path / "new" / "config.yaml").write_text("{}")
    make(tmp_path / "new", handler).train()
