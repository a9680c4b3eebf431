"""The live debugger: forward pass, backward pass and update of the real computation, and moving back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pulsetrain import Trainer
from pulsetrain.debugger.commands import Commands
from pulsetrain.debugger.live import LiveDebugger
from pulsetrain.engine import Events, Every
from pulsetrain.engine.checkpoint import find_checkpoints
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.handlers import Checkpointer, EventRecorder
from tests.support.models import trainer


def build(folder: Path) -> Trainer:
    handlers = [EventRecorder(folder), Checkpointer(folder, every=Every(iterations=4))]
    return trainer({"max_epochs": 1, "seed": 3}, handlers=handlers)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, torch.Tensor]]:
    """A run, and its weights after each iteration."""
    folder = tmp_path_factory.mktemp("run")
    run, weights = build(folder), {}
    run.add_event_handler(
        Events.ITERATION_COMPLETED,
        lambda engine: weights.update({engine.state.iteration: engine.model[0].weight.detach().clone()}),
    )
    run.train()
    return folder, weights


@pytest.fixture
def live(recorded: tuple[Path, dict[int, torch.Tensor]]) -> Iterator[LiveDebugger]:
    checkpoint = next(
        each for each in find_checkpoints(recorded[0] / "checkpoints") if each.name.startswith("000000004")
    )
    debugger = LiveDebugger(build, checkpoint)
    yield debugger
    debugger.close()


def test_the_weights_are_those_of_the_run(live: LiveDebugger, recorded: tuple[Path, dict[int, torch.Tensor]]):
    weight = live.trainer.model[0].weight
    assert weight.equal(recorded[1][4])
    assert live.next_to("gradients_ready") is not None
    assert weight.equal(recorded[1][4])  # there are gradients, but no update yet
    assert weight.grad is not None
    assert weight.grad.abs().sum() > 0
    live.next_to("iteration_completed")
    assert weight.equal(recorded[1][5])
    live.goto(iteration=8)
    live.next_to("iteration_completed")
    assert live.trainer.model[0].weight.equal(recorded[1][8])


def test_going_back_computes_the_same_again(live: LiveDebugger):
    live.goto(iteration=7)
    there, here = live.event, live.here
    live.next(3)
    live.back(3)
    assert (live.here, live.event.event) == (here, there.event)
    assert live.trainer.state.iteration == 7
    live.goto(iteration=6)
    assert live.trainer.state.iteration == 6
    assert live.goto(start=True) is None
    assert "nothing has been computed yet" in live.here


def test_a_break_with_a_condition_stops_there_and_the_end_is_reported(live: LiveDebugger):
    live.add_break("iteration_completed", "iteration >= 9")
    assert live.continue_().iteration == 9
    assert live.hit.number == 1
    live.delete_break(1)
    assert live.continue_() is None
    assert "the run has ended" in live.here
    assert live.next() is None
    assert live.facts()["iteration"] == 10


def test_the_prompt_steps_and_looks_at_tensors(live: LiveDebugger):
    commands = Commands(live, live.commands())

    def say(line: str) -> str:
        return "\n".join(commands.run(line))

    assert "iteration_started" in say("forward")
    assert "gradients_ready" in say("backward")
    assert say("print model[0].weight.grad.shape") == "torch.Size([8, 4])"
    assert "optimizer_step_completed" in say("update")
    assert "iteration_completed" in say("next to iteration_completed")
    assert "rows" in say("state")
    assert "EventRecorder" in say("handlers")
    say("watch model[0].weight.norm().item()")
    assert "model[0].weight.norm().item(): " in say("next 2")
    with pytest.raises(ConfigurationError, match="NameError"):
        say("print nonsense")
    with pytest.raises(ConfigurationError, match="starts after iteration 4"):
        say("goto iteration 3")
    with pytest.raises(ConfigurationError, match="ended before"):
        say("goto iteration 300")


def test_the_runs_folder_is_only_read(live: LiveDebugger, recorded: tuple[Path, dict[int, torch.Tensor]]):
    before = {path: path.stat().st_mtime_ns for path in recorded[0].rglob("*")}
    live.continue_()
    live.close()
    assert {path: path.stat().st_mtime_ns for path in recorded[0].rglob("*")} == before


def test_an_error_of_the_run_is_reported(tmp_path: Path):
    def failing(folder: Path) -> Trainer:
        made = build(folder)

        @made.on(Events.ITERATION_STARTED(once=3))
        def fail() -> None:
            raise ZeroDivisionError("planted")

        return made

    debugger = LiveDebugger(failing)
    assert debugger.continue_() is None
    assert debugger.faults == ["ZeroDivisionError: planted"]
    assert "the run has ended in ZeroDivisionError: planted" in debugger.here
    debugger.close()


def test_an_interrupted_run_pauses(live: LiveDebugger, monkeypatch: pytest.MonkeyPatch):
    real = live._stopped

    class Interrupted:
        """A prompt's Ctrl-C arrives while the run computes."""

        def __init__(self) -> None:
            self.first = True

        def acquire(self) -> None:
            if self.first:
                self.first = False
                raise KeyboardInterrupt
            real.acquire()

        def release(self) -> None:
            real.release()

    live._stopped = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        live.continue_()
    here = live.here
    time.sleep(0.2)
    assert live.here == here  # it is paused
    before = live._count
    live.next()
    time.sleep(0.2)
    assert live._count == before + 1
