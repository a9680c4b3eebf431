"""Where standard output or standard error cannot be written, training continues, and its exit status is its own."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from pulsetrain.engine.recording import EventLog
from pulsetrain.handlers import EventRecorder
from pulsetrain.report import write_report
from tests.support.engines import make_engine

COMMAND = f"{shlex.quote(sys.executable)} -m pulsetrain"


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "output", [">/dev/full", ">&-", "| true", "2>/dev/full", "2>&-", ">/dev/full 2>/dev/full", ">&- 2>&-"]
)
def test_a_run_whose_output_cannot_be_written_is_trained_and_ends_with_0(output: str, folder: Path) -> None:
    handlers = "--handlers=[ConsoleLogger, ProgressBar, EventRecorder, CSVLogger]"
    done = shell(f"{COMMAND} train config.yaml {shlex.quote(handlers)} {output}")
    assert done.returncode == 0, done
    assert EventLog("runs/tiny-1").ended
    assert len(Path("runs/tiny-1/metrics.csv").read_text().splitlines()) > 1
    if output in (">/dev/full", "| true"):
        assert "its text is lost" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", ["events", "events --check", "report"])
def test_closed_output_is_not_an_error(command: str, tmp_path: Path) -> None:
    EventRecorder(tmp_path).attach(engine := make_engine())
    engine.run([0], max_epochs=1)
    name, *options = command.split()
    done = shell(f"cd {tmp_path}; {COMMAND} {name} . {' '.join(options)} >&-")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_a_report_names_a_run_whatever_the_locale_is(tmp_path: Path) -> None:
    run = tmp_path / "rün"
    EventRecorder(run).attach(engine := make_engine())
    engine.run([0], max_epochs=1)
    done = shell(f"cd {tmp_path}; {COMMAND} report rün", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert done.returncode == 0, done
    assert "rün" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_clock_that_was_set_back_gives_no_negative_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(range(2_000_000_000_000_000_000, 0, -1_000_000_000_000))
    monkeypatch.setattr("time.time_ns", lambda: next(times))
    EventRecorder(tmp_path / "run").attach(engine := make_engine())
    engine.run([0], max_epochs=1)
    write_report(tmp_path / "run", into=tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "the system clock was set back" in page
    assert "-1 d" not in page
