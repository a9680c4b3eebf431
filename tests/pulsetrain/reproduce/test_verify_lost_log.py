"""Verifying a run whose log has lost all that could be compared."""

from __future__ import annotations

from pathlib import Path

from pulsetrain import Trainer, verify
from pulsetrain.engine.recording import LoggedEvent, LogWriter
from pulsetrain.engine.recording.log.files import log_files
from pulsetrain.handlers import EventRecorder
from tests.support.models import trainer


def build(folder: Path) -> Trainer:
    return trainer({"max_epochs": 1}, handlers=[EventRecorder(folder)])


def test_a_log_with_nothing_but_a_resume_proves_nothing_and_names_what_is_missing(tmp_path: Path):
    build(tmp_path).train()
    writer = LogWriter(tmp_path / "events")
    run = writer.run
    writer.close()
    for file in log_files(tmp_path / "events"):
        file.unlink()
    writer = LogWriter(tmp_path / "events", run=run)
    writer.lose(80, 60, "the log is older than the checkpoint", t=1)
    writer.add(LoggedEvent(engine="trainer", event="checkpoint_loaded", epoch=1, iteration=8, seq=82, t=2))
    writer.close()
    found = verify(tmp_path, build)
    assert found.agreed == 0
    assert any("the log is older than the checkpoint" in each for each in found.damage)
    assert not found
