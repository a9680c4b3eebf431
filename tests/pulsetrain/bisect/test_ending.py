"""Where the short runs of `pulsetrain bisect` end."""

from __future__ import annotations

from pathlib import Path

from pulsetrain import Trainer
from pulsetrain.bisect.ending import EndAt
from pulsetrain.engine import Events
from pulsetrain.handlers import Checkpointer, EventRecorder
from tests.support.models import loader, trainer
from tests.support.training_jobs import losses


def short_run(folder: Path, iteration: int) -> Trainer:
    """A run of 40 iterations, with a validation after every 10."""
    handlers = [Checkpointer(folder), EventRecorder(folder), EndAt(iteration)]
    return trainer({"max_epochs": 4}, val_loader=loader(shuffle=False), handlers=handlers)


def test_a_run_that_has_ended_is_not_trained_further_when_it_is_resumed(tmp_path: Path) -> None:
    short_run(tmp_path, 12).train()
    ended = losses(tmp_path)
    assert list(ended) == [10, 20]
    again = short_run(tmp_path, 12)
    again.train(resume="latest")
    assert (again.state.iteration, again.state.stop_reason) == (20, "the short run ends: 12 iterations")
    assert losses(tmp_path) == ended


def test_a_run_that_was_stopped_before_its_end_is_trained_to_it(tmp_path: Path) -> None:
    short_run(tmp_path / "straight", 12).train()
    stopped = short_run(tmp_path / "stopped", 12)
    stopped.add_event_handler(Events.ITERATION_COMPLETED(once=15), lambda engine: engine.terminate(reason="stopped"))
    stopped.train()
    assert list(losses(tmp_path / "stopped")) == [10]
    short_run(tmp_path / "stopped", 12).train(resume="latest")
    assert losses(tmp_path / "stopped") == losses(tmp_path / "straight")
