"""`pulsetrain.load`: which weights of a checkpoint it gives to a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from torch import Tensor, nn

import pulsetrain
from pulsetrain import SupervisedStrategy, Trainer, TrainingConfig
from pulsetrain.engine import CheckpointError, Every
from pulsetrain.engine.checkpoint import load_weights
from pulsetrain.handlers import EMA, SWA, Checkpointer
from pulsetrain.testing import tiny_loader


class Net(nn.Module):
    """With a shared weight, and buffers that training changes."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4) if norm else nn.Tanh())
        self.body[1].weight = self.body[0].weight
        self.head = nn.Linear(4, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.head(self.body(inputs))
        return output


def validation() -> Any:
    return tiny_loader(seed=1, shuffle=False)


def train(folder: Path, model: nn.Module, *handlers: object, **config: Any) -> dict[str, Any]:
    """Saves at each epoch; the history."""
    return Trainer(
        model,
        tiny_loader(),
        validation(),
        strategy=SupervisedStrategy("mse"),
        config=TrainingConfig(**{"max_epochs": 4, "learning_rate": 0.05, "seed": 0, "progress": False, **config}),
        handlers=[*handlers, Checkpointer(folder, Every(epochs=1), metric="val/loss", keep_last=10)],
    ).train()


def loss_of(model: nn.Module) -> float:
    config = TrainingConfig(progress=False)
    return Trainer(model, strategy=SupervisedStrategy("mse"), config=config).test(validation())["test/loss"]


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


AVERAGES: dict[str, Callable[[Net], object]] = {
    "ema": lambda model: EMA(0.9),
    "swa": lambda model: SWA(after_epoch=1, bn_loader=tiny_loader()),
    "swa, not begun": lambda model: SWA(after_epoch=9, bn_loader=tiny_loader()),
    "of a part": lambda model: EMA(0.9, model.body),
    "of another model": lambda model: EMA(0.9, Net(), Every(epochs=1)),
    "not validated": lambda model: EMA(0.9, validate=False),
}
USED = ("ema", "swa", "of a part")


@pytest.mark.parametrize("kind", AVERAGES)
def test_the_best_checkpoint_gives_the_validated_value_again(kind: str, tmp_path: Path):
    model = Net()
    history = train(tmp_path, model, AVERAGES[kind](model))
    with structlog.testing.capture_logs() as logs:
        best = pulsetrain.load(tmp_path / "best", Net())
    assert loss_of(best) == min(history["val/loss"])
    said = [each["handler"] for each in logs if each["event"].startswith("loading the averages")]
    assert said == ([kind[:3].upper() if kind != "of a part" else "EMA"] if kind in USED else [])


@pytest.mark.parametrize("kind", AVERAGES)
def test_without_averages_it_gives_the_weights_that_were_trained(kind: str, tmp_path: Path):
    model = Net()
    train(tmp_path, model, AVERAGES[kind](model))
    loaded = pulsetrain.load(tmp_path, Net(), averages=False)
    assert same(loaded, model)
    assert same(pulsetrain.load(tmp_path, Net()), model) == (kind not in USED)


def test_load_weights_gives_the_averages_of_a_part_under_another_name(tmp_path: Path):
    model, average = Net(), EMA(0.9)
    train(tmp_path, model, average)
    body = Net().body
    load_weights(body, tmp_path, prefix="body.")
    with average.applied():
        assert same(body, model.body)
    load_weights(body, tmp_path, prefix="body.", averages=False)
    assert same(body, model.body)


def test_an_average_whose_statistics_were_not_measured_is_refused(tmp_path: Path):
    model = Net()
    average = SWA(after_epoch=0, bn_loader=tiny_loader())
    train(tmp_path, model, average, validate_every=Every(epochs=2))
    unmeasured = tmp_path / "checkpoints" / "000000004-checkpoint"
    with pytest.raises(CheckpointError, match="SWA has not measured the statistics of batch normalisation"):
        pulsetrain.load(unmeasured, Net())
    pulsetrain.load(unmeasured, Net(), averages=False)
    pulsetrain.load(tmp_path / "checkpoints" / "000000008-checkpoint", Net())

    train(tmp_path / "without", Net(norm=False), SWA(after_epoch=0), validate_every=Every(epochs=2))
    pulsetrain.load(tmp_path / "without" / "checkpoints" / unmeasured.name, Net(norm=False))


def test_a_schedule_free_optimizer_causes_a_warning(tmp_path: Path):
    pytest.importorskip("schedulefree")
    model = Net(norm=False)
    train(tmp_path, model, optimizer="schedule_free_adamw")
    with structlog.testing.capture_logs() as logs:
        loaded = pulsetrain.load(tmp_path, Net(norm=False))
    assert same(loaded, model)
    assert [each["log_level"] for each in logs if "schedule-free" in each["event"]] == ["warning"]
