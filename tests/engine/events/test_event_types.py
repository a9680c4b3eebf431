"""Type checkers know the payload of `Event[...]`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

from pulsetrain.engine import Engine, Event, Events
from pulsetrain.engine.events.payloads import MetricsLogged

SCRIPT = """\
from pulsetrain import Trainer
from pulsetrain.engine import Event, Events
from pulsetrain.engine.events.payloads import ValidationCompleted


def watch(trainer: Trainer) -> None:
    @trainer.on(Events.VALIDATION_COMPLETED)
    def report(trainer: Trainer, event: Event[ValidationCompleted]) -> None:
        print(event.payload.metrics["val/loss"] + 1.0)
        print(event.payload.metrix)

    @trainer.on(Events.VALIDATION_COMPLETED)
    def report_any(trainer: Trainer, event: Event) -> None:
        print(event.payload.metrix, event.iteration + 1)
"""
WRONG = 10  # the line with the misspelt field


def test_a_handler_may_name_its_payload() -> None:
    seen = []
    engine = Engine(lambda engine, batch: None)

    @engine.on(Events.METRICS_LOGGED)
    def report(engine: Engine, event: Event[MetricsLogged]) -> None:
        seen.append(event.payload.metrics)

    engine.fire(Events.METRICS_LOGGED, MetricsLogged(metrics={"speed": 1.0}))
    assert seen == [{"speed": 1.0}]
    assert get_type_hints(report)["event"] == Event[MetricsLogged]


@pytest.mark.slow
def test_mypy_knows_the_fields_of_the_payload(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--no-error-summary",
        "--cache-dir",
        str(tmp_path),
        str(script),
    ]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=600, check=False
    )
    errors = [line for line in done.stdout.splitlines() if "script.py" in line]
    assert len(errors) == 1, done.stdout
    assert f"script.py:{WRONG}: " in errors[0]
    assert '"ValidationCompleted" has no attribute "metrix"' in errors[0]
