"""The progress line that a Trainer shows by default."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest
import structlog
import torch
from torch import nn

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import SupervisedStrategy
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.handlers import ConsoleLogger, ProgressBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Closed(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


def train(*handlers: object, **settings: Any) -> Trainer:
    torch.manual_seed(0)  # else a loss may be 1 or more, or below 0.1
    trainer = Trainer(
        nn.Linear(2, 1),
        [(torch.ones(3, 2), torch.zeros(3, 1))] * 4,
        strategy=SupervisedStrategy("mse"),
        config=TrainingConfig(max_epochs=2, log_every_n_steps=2, **settings),
        handlers=handlers,
    )
    trainer.train()
    return trainer


def test_a_default_run_shows_a_line_with_its_loss(capsys: pytest.CaptureFixture[str]):
    train()
    (line,) = [each for each in capsys.readouterr().err.splitlines() if each.startswith("epoch")]
    assert line.startswith("epoch 2/2, iteration 8/8 (100%), loss 0.")


def test_a_default_run_draws_a_bar_in_a_terminal(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    train()
    drawn = [each for each in stream.getvalue().split("\r") if "it/s" in each][-1]
    assert "8/8" in drawn
    assert "loss=0." in drawn


def test_progress_false_shows_nothing(capsys: pytest.CaptureFixture[str]):
    trainer = train(progress=False)
    assert capsys.readouterr().err == ""
    assert not any(isinstance(each, ProgressBar) for each in trainer.handlers)


@pytest.mark.parametrize("handler", [ProgressBar, ConsoleLogger])
def test_a_handler_that_shows_the_run_takes_its_place(handler: type):
    shown = io.StringIO()
    trainer = train(handler(stream=shown))
    assert [type(each) for each in trainer.handlers if isinstance(each, (ProgressBar, ConsoleLogger))] == [handler]
    assert shown.getvalue()


def test_a_terminal_that_is_gone_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", Closed())
        assert train().state.iteration == 8


def test_progress_needs_true_or_false():
    with pytest.raises(ConfigurationError, match=r"TrainingConfig\(progress='yes'\)"):
        TrainingConfig(progress="yes")  # type: ignore[arg-type]


def test_a_closed_stderr_is_left_alone(monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patched, structlog.testing.capture_logs() as logs:
        patched.setattr(sys, "stderr", None)
        assert train().state.iteration == 8
    assert [each for each in logs if each["log_level"] != "info"] == []
