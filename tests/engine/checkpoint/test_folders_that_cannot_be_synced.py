"""File systems that refuse to sync folders, as some of FUSE and of networks do."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from pulsetrain import Checkpointer, Every
from pulsetrain.engine.checkpoint import CheckpointManager, disk
from pulsetrain.engine.checkpoint.reader import step_of
from tests.support.models import trainer


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lets os.fsync fail, for folders or for files."""
    sync = os.fsync

    def refuse(number: int, *, folders: bool = True) -> None:
        def refusing(descriptor: int) -> None:
            if stat.S_ISDIR(os.fstat(descriptor).st_mode) == folders:
                raise OSError(number, os.strerror(number))
            sync(descriptor)

        monkeypatch.setattr(os, "fsync", refusing)

    return refuse


@pytest.mark.parametrize("number", sorted({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}))
def test_a_folder_that_cannot_be_synced_is_warned_of_once_and_every_save_counts(
    number: int, refuse: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(disk, "_reported", set(), raising=False)
    refuse(number)
    with capture_logs() as logs, suppress(OSError):  # the saves are asserted below
        trainer({"max_epochs": 1}, handlers=[Checkpointer(tmp_path, every=Every(iterations=3), keep_last=9)]).train()
    warnings = [each["event"] for each in logs if each["log_level"] == "warning"]
    assert [step_of(each) for each in CheckpointManager(tmp_path / "checkpoints").valid()] == [3, 6, 9, 10]
    assert len(warnings) == 1
    assert "cannot sync folders" in warnings[0]


@pytest.mark.parametrize(("number", "folders"), [(errno.EIO, True), (errno.ENOSPC, True), (errno.EINVAL, False)])
def test_another_error_and_a_file_that_cannot_be_synced_are_errors(
    number: int, folders: bool, refuse: Callable[..., None], tmp_path: Path
):
    refuse(number, folders=folders)
    with pytest.raises(OSError, match=os.strerror(number)):
        CheckpointManager(tmp_path).save({"value": 1}, step=1)
