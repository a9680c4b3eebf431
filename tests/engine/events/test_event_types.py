"""Type checkers know the payload of an event, and what a run's state holds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

from pulsetrain.engine import Engine, Event, Events
from pulsetrain.engine.events.payloads import MetricsLogged

REPOSITORY = Path(__file__).parents[3]
# A user's script. Each line with the comment `wrong` is an error, all others are correct.
SCRIPT = """\
from pulsetrain import EventEnum, Trainer
from pulsetrain.engine import Engine, Event, Events
from pulsetrain.engine.events.payloads import CheckpointSaved, MetricsLogged, ValidationCompleted


class WalkEvents(EventEnum):
    STEP_TAKEN = "step_taken", MetricsLogged


def watch(trainer: Trainer, engine: Engine) -> None:
    @trainer.on(Events.VALIDATION_COMPLETED)
    def report(trainer: Trainer, event: Event[ValidationCompleted]) -> None:
        print(event.payload.metrics["val/loss"] + 1.0, trainer.state.iteration + 1)
        print(event.payload.metrix)  # wrong
        print(trainer.state.iteration.upper(), trainer.state.stop_reason + 1)  # wrong

    @trainer.on(Events.VALIDATION_COMPLETED(every=2))  # wrong
    def of_another(trainer: Trainer, event: Event[CheckpointSaved]) -> None:
        print(event.payload.path)

    trainer.on(Events.VALIDATION_COMPLETED)(lambda trainer, event: print(event.payload.metrics))
    trainer.on(Events.VALIDATION_COMPLETED)(lambda trainer, event: print(event.payload.metrix))  # wrong

    @trainer.on(Events.VALIDATION_COMPLETED)
    def report_any(trainer: Trainer, event: Event) -> None:
        print(event.payload.metrix, event.iteration + 1)

    @trainer.on(Events.VALIDATION_COMPLETED)
    @trainer.on(Events.CHECKPOINT_SAVED)
    def report_both(trainer: Trainer, event: Event[ValidationCompleted | CheckpointSaved]) -> None:
        print(event.payload)

    @engine.on(Events.ITERATION_COMPLETED(every=100) | Events.COMPLETED)
    def joined(engine: Engine, event: Event) -> None:
        print(engine.state.epoch)

    @engine.on(Events.ITERATION_COMPLETED, 3, name="x")
    def with_arguments(engine: Engine, number: int, name: str) -> None: ...

    @engine.on(Events.EXCEPTION_RAISED)
    def on_error(engine: Engine, error: Exception) -> None: ...

    @engine.on(Events.STARTED)
    def without_arguments() -> None: ...

    @engine.on(WalkEvents.STEP_TAKEN)
    def own_event(engine: Engine, event: Event[MetricsLogged]) -> None:
        print(event.payload.metrix)  # wrong

    @engine.on("step_taken")
    def named(engine: Engine, event: Event[MetricsLogged]) -> None: ...

    names: list[str] = [event.value for event in Events]
    print(names, Events["STARTED"].value, Events.STARTED == Events.COMPLETED)
    with_arguments(engine, 3, name="x")
"""
WRONG = {number for number, line in enumerate(SCRIPT.splitlines(), start=1) if "# wrong" in line}


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
@pytest.mark.parametrize(
    "checker",
    [
        ["mypy", "--strict", "--config-file", str(REPOSITORY / "pyproject.toml"), "--cache-dir", "mypy_cache"],
        ["pyright", "--pythonpath", sys.executable],
    ],
    ids=lambda command: command[0],
)
def test_type_checkers_find_each_wrong_line_of_a_script_and_no_other(checker: list[str], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "pulsetrain").symlink_to(REPOSITORY / "pulsetrain")
    command = [sys.executable, "-m", *checker, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    errors = [line for line in done.stdout.splitlines() if "script.py:" in line and "error:" in line]
    found = {int(line.partition("script.py:")[2].partition(":")[0]) for line in errors}
    assert found == WRONG, done.stdout + done.stderr
    assert sum('"metrix"' in line for line in errors) == 3, done.stdout
