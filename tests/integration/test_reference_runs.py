"""An example that is run twice records the same events, bit for bit: how many is stated."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pulsetrain import EventLog, diff

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FLIGHT_RECORDER = """
import runpy, sys
from pathlib import Path
runpy.run_path(sys.argv[1])["main"](Path.cwd())
"""
DEMO = {"training.max_tokens": "null", "training.max_iterations": "50", "training.warmup_steps": "10"}


def run_twice(folder: Path, *arguments: object) -> tuple[Path, Path]:
    """The folders in which two new processes have run this on one thread, each with its own hashes of strings."""
    folders = folder / "a", folder / "b"
    for number, each in enumerate(folders):
        each.mkdir()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": str(number)}
        command = [sys.executable, *map(str, arguments)]
        done = subprocess.run(
            command, cwd=each, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
    return folders


def iterations(run: Path) -> int:
    return sum(event.engine == "trainer" for event in EventLog(run).read(event="iteration_completed"))


def test_the_flight_recorder_example_records_the_same_602_events_twice(tmp_path: Path):
    a, b = run_twice(tmp_path, "-c", FLIGHT_RECORDER, EXAMPLES / "flight_recorder.py")
    for name in ("planted", "clean"):
        difference = diff(a / name, b / name)
        assert not difference, difference.report()
        assert (difference.agreed, difference.unread, difference.damage) == (602, 0, ())
        assert iterations(a / name) == iterations(b / name) == 128  # 8 epochs of 16
    assert diff(a / "planted", b / "clean")


def test_the_demo_configuration_records_the_same_244_events_twice(tmp_path: Path):
    settings = [word for name, value in DEMO.items() for word in (f"--{name}", value)]
    config = EXAMPLES / "byte_lm" / "config.yaml"
    a, b = run_twice(tmp_path, "-m", "pulsetrain", "train", config, "--run", "run", *settings)
    difference = diff(a / "run", b / "run")
    assert not difference, difference.report()
    assert (difference.agreed, difference.unread, difference.damage) == (244, 0, ())
    assert iterations(a / "run") == iterations(b / "run") == 50
