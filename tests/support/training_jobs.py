"""A small run that takes some seconds, for tests that interrupt it, and what it has recorded."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from pulsetrain.engine.recording import EventLog
from tests.faults.sweeps import CONFIG

__all__ = ["kill_all", "loads", "losses", "processes_with", "until", "write_run"]

MODEL = """
import time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

def net(width: int = 4):
    return nn.Sequential(nn.Linear(4, width), nn.Dropout(0.1), nn.Linear(width, 1))

class Rows(Dataset):
    def __init__(self, rows, pause):
        self.inputs, self.pause = torch.randn(rows, 4), pause

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        time.sleep(self.pause)
        return self.inputs[index], self.inputs[index].sum(0, keepdim=True)

def loaders(pause: float = 0.0, rows: int = 40):
    data = Rows(rows, pause)
    return DataLoader(data, batch_size=4, shuffle=True), DataLoader(Rows(20, 0.0), batch_size=20)
"""


def write_run(folder: Path, pause: float = 0.0) -> None:
    """The files of a run whose rows take so many seconds each; base.yaml is the configuration."""
    (folder / "tiny.py").write_text(MODEL)
    data = f"data: {{class_path: tiny.loaders, init_args: {{pause: {pause}}}}}"
    (folder / "base.yaml").write_text(CONFIG.replace("data: tiny.loaders", data))


def losses(folder: Path) -> dict[int, float]:
    """Iteration -> the loss of the validation there."""
    events = EventLog(folder).read(event="validation_completed")
    return {event.iteration: event.payload["metrics"]["val/loss"] for event in events}  # type: ignore[index, call-overload]


def loads(folder: Path) -> int:
    """How often the run has resumed from a checkpoint."""
    return len(list(EventLog(folder).read(event="checkpoint_loaded")))


def until(condition: Callable[[], object], seconds: float = 240.0) -> None:
    """Wait until the condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not become true"
        time.sleep(0.05)


def processes_with(text: str) -> Iterator[int]:
    """The processes whose command line or working directory has the text, except this one."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().decode(errors="replace")
            if int(path.name) != os.getpid() and (text in words or text in os.readlink(path / "cwd")):
                yield int(path.name)
        except OSError:  # it has ended
            continue


def kill_all(text: str) -> None:
    """Kill the processes whose command line or working directory has the text."""
    for process in processes_with(text):
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(process, signal.SIGKILL)
