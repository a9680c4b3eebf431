"""A misspelt metric is answered with the names that there are, wherever a trainer gives metrics by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from pulsetrain import Events, SupervisedStrategy, Trainer, TrainingConfig
from pulsetrain.testing import tiny_loader, tiny_model


class Within:
    """The share of outputs that are nearer than 1 to their target."""

    def reset(self) -> None:
        self.right = self.seen = 0

    def update(self, outputs: Any, targets: Any) -> None:
        self.right += int(((outputs - targets).abs() < 1).sum())
        self.seen += len(targets)

    def compute(self) -> float:
        return self.right / self.seen


def a_trainer() -> Trainer:
    return Trainer(
        tiny_model(),
        tiny_loader(),
        tiny_loader(),
        strategy=SupervisedStrategy("mse"),
        metrics={"accuracy": Within()},
        config=TrainingConfig(progress=False, max_epochs=1),
    )


def answer_to(name: str, metrics: Mapping[str, Any]) -> str:
    with pytest.raises(KeyError) as caught:
        metrics[name]
    return str(caught.value)


def test_the_history_that_train_returns_suggests_the_nearest_name():
    answer = answer_to("val/accurcy", a_trainer().train())
    assert answer == (
        "metric='val/accurcy': this metric does not exist; there are: learning_rate, train/loss, val/accuracy, "
        "val/loss; did you mean 'val/accuracy'?"
    )


def test_the_metrics_of_the_state_suggest_the_nearest_name():
    trainer = a_trainer()
    assert "there are: none at all" in answer_to("val/accurcy", trainer.state.metrics)
    trainer.train()
    assert "did you mean 'val/accuracy'?" in answer_to("val/accurcy", trainer.state.metrics)
    assert "did you mean 'accuracy'?" in answer_to("acuracy", trainer.evaluator.state.metrics)


def test_what_evaluations_return_suggests_the_nearest_name():
    trainer = a_trainer()
    assert "did you mean 'val/accuracy'?" in answer_to("val/accurcy", trainer.validate())
    assert "did you mean 'val/accuracy'?" in answer_to("val/accurcy", trainer.validate(tiny_loader()))
    assert "did you mean 'test/accuracy'?" in answer_to("test/accurcy", trainer.test(tiny_loader()))
    assert "did you mean 'val/accuracy'?" in answer_to("val/accurcy", trainer.history.get_latest())


@pytest.mark.parametrize(
    ("event", "wrong", "right"),
    [(Events.METRICS_LOGGED, "train/los", "train/loss"), (Events.VALIDATION_COMPLETED, "val/accurcy", "val/accuracy")],
)
def test_the_metrics_in_a_payload_suggest_the_nearest_name(event: Events, wrong: str, right: str):
    trainer, answers = a_trainer(), list[str]()
    trainer.on(event)(lambda engine, event: answers.append(answer_to(wrong, event.payload.metrics)))
    trainer.train()
    assert [f"did you mean {right!r}?" in answer for answer in answers] == [True]


def test_the_metrics_of_a_loaded_checkpoint_suggest_the_nearest_name():
    trainer, other = a_trainer(), a_trainer()
    trainer.train()
    other.load_checkpoint_state(trainer.checkpoint_state())
    assert other.state.metrics == trainer.state.metrics
    assert "did you mean 'val/accuracy'?" in answer_to("val/accurcy", other.state.metrics)
