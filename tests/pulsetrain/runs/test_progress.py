"""Every command, and the page, say the same of how far a run is."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pulsetrain.cli import main
from pulsetrain.engine.recording import LoggedEvent, LogWriter
from pulsetrain.runs.live import LiveRun
from pulsetrain.runs.progress import Progress
from pulsetrain.runs.summary import summarize
from tests.pulsetrain.runs.test_summary import own
from tests.support.run_folders import BEGUN, SECOND

EPOCHS, LENGTH = 20, 45


def write(folder: Path, until: int, total: int | None, settings: dict[str, int], validating: int = 0) -> Path:
    """A run in progress that has trained `until` iterations, in epochs of LENGTH, and then validates."""
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"settings": settings}))
    own(folder, os.getpid())
    bounds = {"max_epochs": EPOCHS, **({} if total is None else {"total_iterations": total})}
    events = [LoggedEvent(event="started", observed=bounds)]
    for iteration in range(1, until + 1):
        epoch = (iteration - 1) // LENGTH + 1
        if iteration % LENGTH == 1:
            started = {"event": "epoch_started", "epoch": epoch, "iteration": iteration - 1}
            events.append(LoggedEvent(**started, observed=bounds))
        events.append(LoggedEvent(event="iteration_completed", epoch=epoch, iteration=iteration, output={"loss": 1.0}))
        if iteration % LENGTH == 0:
            events.append(LoggedEvent(event="epoch_completed", epoch=epoch, iteration=iteration))
    for iteration in range(1, validating + 1):
        events.append(LoggedEvent(engine="evaluator", event="iteration_completed", epoch=1, iteration=iteration))
    writer = LogWriter(folder / "events")
    for seq, event in enumerate(events):
        event.engine = event.engine or "trainer"
        event.ord, event.seq, event.t = seq, seq, BEGUN + seq * SECOND
        writer.add(event)
    writer.close()
    return folder


def read(folder: Path) -> Progress:
    """As a summary and a reader that follows the run say, which have to agree."""
    run, found = LiveRun(folder), summarize(folder).reached
    run.update()
    assert run.progress == found
    return found


def test_an_epoch_that_has_only_begun_does_not_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write(tmp_path / "run", 2 * LENGTH + 27, EPOCHS * LENGTH, {"max_epochs": EPOCHS})
    assert main(["runs", str(tmp_path)]) == main(["watch", str(tmp_path / "run"), "--once"]) == 0
    printed = capsys.readouterr().out
    assert "epoch 3/20 (13%)" in printed
    assert " 13%  epoch 3/20  iteration 117/900" in printed
    assert main(["runs", str(tmp_path), "--columns", "progress", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"progress": 0.13}


@pytest.mark.parametrize(
    ("until", "completed", "share"),
    [(0, 0, 0.0), (1, 0, 0.0), (44, 0, 0.0), (45, 1, 0.05), (46, 1, 0.05), (900, 20, 1.0)],
)
def test_a_run_whose_epochs_have_no_known_length_counts_those_that_are_complete(
    until: int, completed: int, share: float, tmp_path: Path
):
    found = read(write(tmp_path / "run", until, None, {"max_epochs": EPOCHS}))
    assert (found.completed_epochs, found.share) == (completed, share)


def test_a_long_validation_does_not_hide_the_epoch(tmp_path: Path):
    found = read(write(tmp_path / "run", 45, None, {"max_epochs": EPOCHS}, validating=3000))
    assert (found.epoch, found.iteration, found.completed_epochs) == (1, 45, 1)


def test_a_run_bounded_by_iterations_is_not_counted_in_epochs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    found = read(write(tmp_path / "run", 100, 200, {"max_iterations": 200}))
    assert (found.total_epochs, found.total_iterations, found.share) == (None, 200, 0.5)
    assert main(["runs", str(tmp_path)]) == 0
    assert "100/200 (50%)" in capsys.readouterr().out


def test_a_run_without_events_has_trained_nothing(tmp_path: Path):
    (tmp_path / "run.json").write_text("{}")
    assert summarize(tmp_path).reached == Progress()


def test_epochs_that_a_resumed_run_has_superseded_do_not_count(tmp_path: Path):
    folder = write(tmp_path / "run", 100, None, {"max_epochs": EPOCHS})
    assert read(folder).completed_epochs == 2
    writer = LogWriter(folder / "events")
    after, seq = 11, writer.last_seq + 1  # after iteration 10
    writer.rewind(after, after + 1, seq, BEGUN + seq * SECOND)
    at = {"epoch": 1, "iteration": 11, "seq": seq + 1, "t": BEGUN + (seq + 1) * SECOND}
    writer.add(LoggedEvent(after + 1, "trainer", "iteration_completed", output={"loss": 1.0}, **at))
    found = read(folder)
    assert (found.epoch, found.iteration, found.completed_epochs, found.share) == (1, 11, 0, 0.0)
