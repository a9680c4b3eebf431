"""A run with checkpoints, for the tests of archives."""

from __future__ import annotations

from pathlib import Path

import pytest

from pulsetrain.engine.checkpoint import CheckpointManager
from tests.support.run_folders import write_run


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = write_run(tmp_path / "runs" / "a", [1.0, 0.5])
    manager = CheckpointManager(folder / "checkpoints")
    for step in (5, 10, 15):
        manager.save({"step": step}, step=step, is_best=step == 10)
    return folder
