"""A disk that cannot be written when a run starts: every write is refused by an error that names the folder and a
remedy, or is left out as its handler promises."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.cli import main
from pulsetrain.engine import Every, PulsetrainError, SupervisedStrategy
from pulsetrain.handlers import Checkpointer, CrashBundle, CSVLogger, EventRecorder, JSONLinesLogger, Plots
from tests.support.cases import slow_but
from tests.support.failing_disk import FailingDisk

MODULE = """
    import torch
    from torch import nn

    def model():
        return nn.Linear(4, 1)

    def data():
        batch = torch.ones(4, 4), torch.zeros(4, 1)
        return [batch], [batch]
"""
CONFIG = """
    model: parts_on_disk.model
    data: parts_on_disk.data
    strategy: {class_path: supervised, init_args: {loss: mse}}
    training: {max_iterations: 1, seed: 1, device: cpu, log_every_n_steps: 1}
    handlers:
      - {class_path: Checkpointer, init_args: {every: {iterations: 1}, metric: val/loss}}
      - EventRecorder
      - CSVLogger
      - JSONLinesLogger
      - {class_path: Plots, init_args: {formats: [svg]}}
      - CrashBundle
"""
FAULTS = [(errno.ENOSPC, False), (errno.ENOSPC, True), (errno.EROFS, False)]
faults = pytest.mark.parametrize(("error", "alone"), FAULTS, ids=["full", "full for a moment", "read-only"])


@pytest.fixture(autouse=True)
def configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("parts_on_disk.py").write_text(textwrap.dedent(MODULE))
    Path("config.yaml").write_text(textwrap.dedent(CONFIG))


def check_report(status: int, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command has said what is wrong where, and how to mend it; or the run has gone to its end."""
    output = capsys.readouterr()
    said = output.out + output.err
    assert "Traceback" not in said
    assert "OSError:" not in said
    errors = re.findall(r"^pulsetrain: error: .*", said, re.MULTILINE)
    if status in (0, 4):
        assert not errors
        return
    (line,) = errors
    assert status == 2
    assert str(folder) in line
    assert "; choose another" in line
    assert os.strerror(errno.ENOSPC) in line or os.strerror(errno.EROFS) in line


@pytest.mark.slow
@faults
def test_no_write_that_fails_reaches_the_command_line_as_an_error_of_python(
    error: int, alone: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config = Path("config.yaml").read_text()
    Path("config.yaml").write_text("".join(line for line in config.splitlines(True) if "Plots" not in line))  # slow

    def run(name: str, fails_at: int | None) -> int:
        folder = tmp_path / name
        if error == errno.EROFS:
            folder.mkdir()  # one that the command does not remove again
        disk = FailingDisk(folder, error, fails_at, alone=alone)
        with disk.mounted():
            status = main(["train", "config.yaml", "--run", str(folder)])
        check_report(status, folder, capsys)
        return disk.count

    calls = run("counted", None)
    assert calls > 50
    for number in range(calls):
        run(str(number), number)


@pytest.mark.slow
@faults
def test_no_write_that_fails_leaves_training_as_an_error_of_python(error: int, alone: bool, tmp_path: Path):
    batch = torch.ones(4, 4), torch.zeros(4, 1)

    def run(name: str, fails_at: int | None) -> int:
        folder = tmp_path / name
        disk, refusals = FailingDisk(folder, error, fails_at, alone=alone), list[OSError]()
        with disk.mounted():
            try:
                Trainer(
                    nn.Linear(4, 1),
                    [batch],
                    [batch],
                    strategy=SupervisedStrategy("mse"),
                    config=TrainingConfig(max_iterations=1, seed=1, log_every_n_steps=1),
                    handlers=[
                        Checkpointer(folder, every=Every(iterations=1), metric="val/loss"),
                        EventRecorder(folder),
                        CSVLogger(folder, on_error="raise"),
                        JSONLinesLogger(folder, on_error="raise"),
                        Plots(folder, formats=["svg"], on_error="raise"),
                        CrashBundle(folder),
                    ],
                ).train()
            except OSError as refused:
                refusals.append(refused)
        for refused in refusals:
            assert isinstance(refused, PulsetrainError), f"call {fails_at}: {refused!r}"
            assert str(folder) in str(refused)
            assert "; choose another folder, make room on its disk, or fix its permissions" in str(refused)
        return disk.count

    calls = run("counted", None)
    assert calls > 40
    for number in range(calls):
        run(str(number), number)


@pytest.fixture(params=slow_but((68,), [8, 24, 68, 76, 84]))
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system of that many kB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={request.param}k", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a file system cannot be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_on_a_disk_that_fills_up_at_the_start_the_command_says_where_and_what_to_do(
    small_disk: Path, capsys: pytest.CaptureFixture[str]
):
    check_report(main(["train", "config.yaml", "--run", str(small_disk / "run")]), small_disk / "run", capsys)
