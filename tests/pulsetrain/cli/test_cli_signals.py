"""The command line and signals: a run saves and prints how to resume it, or stops immediately."""

from __future__ import annotations

import shlex
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pulsetrain.cli import main
from pulsetrain.engine.checkpoint import CheckpointManager
from tests.support.programs import Program
from tests.support.programs_command_line import files, train


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., Program]]:
    started: list[Program] = []

    def begin(*words: str) -> Program:
        started.append(Program("-m", "pulsetrain", "train", "config.yaml", "--training.max_epochs=1000", *words))
        return started[-1]

    yield begin
    for process in started:
        process.close()


def wait_for(stream: Any, text: str) -> None:
    """Read until a line starts with this; the stream ends when the process ends."""
    deadline = time.monotonic() + 240
    while not (line := stream.readline()).startswith(text):
        assert line, f"it ended before it said {text!r}"
        assert time.monotonic() < deadline


@pytest.mark.slow
class TestSignals:
    @pytest.mark.parametrize("name", ["SIGINT", "SIGUSR1"])
    def test_the_first_signal_saves_and_says_how_to_resume(
        self, name: str, folder: Path, start: Callable[..., Program]
    ) -> None:
        process = start(
            "--run",
            "a run",
            "--data=data.Endless",
            "--training.max_epochs=null",
            "--training.max_updates=9999",
            "--handlers=[Checkpointer]",
        )
        wait_for(process.stdout, "batch")
        process.send_signal(signal.Signals[name])
        out, err = process.communicate(timeout=240)
        assert process.returncode == 128 + signal.Signals[name]
        assert f"{name}: stopping at the next safe point" in err
        assert "Traceback" not in err
        assert f"stopped     {name} was received" in out
        command = shlex.split(out.splitlines()[-1].removeprefix("resume: "))
        assert command[1:3] == ["-m", "pulsetrain"]
        done = CheckpointManager("a run/checkpoints").get_latest()
        assert done is not None
        step = int(done.name.partition("-")[0])
        assert main([*command[3:], f"--training.max_updates={step + 2}"]) == 0
        latest = CheckpointManager("a run/checkpoints").get_latest()
        assert latest is not None
        assert int(latest.name.partition("-")[0]) == step + 2

    def test_without_a_checkpointer_it_says_that_the_run_cannot_be_resumed(
        self, folder: Path, start: Callable[..., Program]
    ) -> None:
        process = start(
            "--data=data.Endless", "--training.max_epochs=null", "--training.max_updates=9999", "--handlers=[]"
        )
        wait_for(process.stdout, "batch")
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=240)
        assert process.returncode == 128 + signal.SIGTERM
        assert out.splitlines()[-1].startswith("resume: not possible")

    def test_a_second_interrupt_stops_at_once(self, folder: Path, start: Callable[..., Program]) -> None:
        words = ("--data=data.Stuck", "--training.max_epochs=null", "--training.max_updates=9999")
        process = start(*words, "--handlers=[Checkpointer]")
        wait_for(process.stdout, "batch")
        process.send_signal(signal.SIGTERM)
        wait_for(process.stderr, "SIGTERM: stopping")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=240)
        assert process.returncode == 130
        assert "Traceback" not in err
        assert "stopped; the run folder is runs/tiny-1" in err

    def test_a_script_that_calls_exit_is_not_mistaken_for_a_signal(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (folder / "model.py").write_text("import sys\nsys.exit(7)\n")
        assert train() == 7
        assert "stopped" not in capsys.readouterr().err

    def test_before_the_run_has_started_a_signal_leaves_nothing(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        model = "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n"
        (folder / "model.py").write_text(model + (folder / "model.py").read_text())
        before = files()
        default = signal.signal(
            signal.SIGTERM, lambda *_: None
        )  # the default one would not be put back in this process
        try:
            assert train("--run", "a/b") == 128 + signal.SIGTERM
        finally:
            signal.signal(signal.SIGTERM, default)
        assert "stopped before the run started; no files were left" in capsys.readouterr().err
        assert files() == before
