"""Logs of each format version are read and replayed as they were written."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import pytest

from pulsetrain.engine.recording import EventLog, Replay
from pulsetrain.handlers import EarlyStopping

LOGS = Path(__file__).resolve().parents[3] / "golden" / "logs"


@pytest.mark.parametrize("folder", sorted(LOGS.iterdir()), ids=lambda folder: folder.name)
def test_a_log_of_each_format_is_read_and_replayed(folder: Path):
    log = EventLog(folder)
    events = list(log.read())
    everything = msgspec.json.encode(list(log.read(superseded=True)))
    assert hashlib.sha256(everything).hexdigest() == (folder / "sha256").read_text().strip()
    assert log.verify() == []
    assert not log.ended  # it was copied while the run was running
    iterations = [
        event.iteration for event in events if (event.engine, event.event) == ("trainer", "iteration_completed")
    ]
    assert iterations == list(range(1, 29))  # once each, although the run was killed at 19 and resumed from 16
    assert len(list(log.read(event="iteration_completed", superseded=True, engine="trainer"))) == 31
    replay = Replay(folder)
    stopping = EarlyStopping(metric="val/loss", patience=50).attach(replay)
    replay.run()
    (last,) = [event for event in events if event.event == "validation_completed"][-1:]
    assert stopping.best_value <= last.payload["metrics"]["val/loss"]
    assert replay.state.iteration == 28
