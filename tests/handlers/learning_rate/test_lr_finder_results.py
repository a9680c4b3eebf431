"""The updates, losses and suggestion of a range test, compared with values computed by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import structlog
import torch
from torch import Tensor, nn

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import Accumulate, Events, SupervisedStrategy
from pulsetrain.engine.schedules import Exponential
from pulsetrain.handlers import LRFinder, LRScheduler
from tests.support.models import regression_model, trainer

SWEEP = {"start_lr": 1e-5, "end_lr": 1.0, "iterations": 20}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"accumulate": 2, "clip_grad_norm": 0.3, "optimizer": "adamw"},
        {"clip_grad_value": 0.01},
        {"accumulate": Accumulate(schedule={0: 1, 5: 3})},
    ],
    ids=str,
)
def test_its_updates_equal_the_trainers(settings: dict[str, Any]):
    finder = LRFinder(start_lr=1e-4, end_lr=1e-2, iterations=20, smoothing=0.0, diverge=math.inf)
    gamma = (1e-2 / 1e-4) ** (1 / 19)

    def run_with(*handlers: Any) -> Trainer:
        config = {"max_updates": 20, "schedule": None, "learning_rate": 1e-4, "seed": 4, "device": "cpu", **settings}
        return trainer(config, model=regression_model(0.2), handlers=list(handlers))

    found = finder.run(run_with())
    run = run_with(LRScheduler(Exponential(1e-4, gamma)))
    losses: list[list[float]] = [[]]
    run.add_event_handler(Events.ITERATION_COMPLETED, lambda: losses[-1].append(run.state.output["loss"].item()))
    run.add_event_handler(Events.ITERATION_STARTED, lambda: run.accumulated or losses.append([]))
    run.train()
    means = [sum(batches) / len(batches) for batches in losses if batches]
    assert list(found.losses) == pytest.approx(means, rel=1e-5)
    assert list(found.rates) == pytest.approx([1e-4 * gamma**update for update in range(20)])


class Parabola(nn.Module):
    """Its loss is curvature / 2 * weight ** 2, and a step of rate r multiplies the weight by (1 - r * curvature)."""

    def __init__(self, curvature: float) -> None:
        super().__init__()
        self.weight, self.curvature = nn.Parameter(torch.ones(1, dtype=torch.float64)), curvature

    def forward(self, inputs: Tensor) -> Tensor:
        return (self.curvature**0.5) * self.weight * inputs


def parabola(curvature: float = 1.0) -> Trainer:
    data = [(torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64))]
    config = TrainingConfig(optimizer="sgd", optimizer_options={"momentum": 0.0}, schedule=None, device="cpu")
    return Trainer(Parabola(curvature), data, strategy=SupervisedStrategy("mse"), config=config)


def test_the_losses_follow_the_recurrence():
    found = LRFinder(start_lr=1e-4, end_lr=0.4, iterations=50, smoothing=0.9, diverge=1e9).run(parabola())
    weight, losses, mean = 1.0, [], 0.0
    for number, rate in enumerate(found.rates, start=1):
        losses.append(weight**2)
        weight *= 1 - 2 * rate
        mean = sum(losses) / number if number <= 10 else 0.9 * mean + 0.1 * losses[-1]
        assert found.smoothed[number - 1] == pytest.approx(mean)
    assert list(found.losses) == pytest.approx(losses)
    falls = {found.rates[n]: sum(losses[n : n + 5]) - sum(losses[n - 5 : n]) for n in range(5, 46)}
    assert found.suggestion == min(falls, key=falls.__getitem__)
    assert (found.reason, found.diverged) == ("", False)


@pytest.mark.parametrize("curvature", [0.01, 1.0, 100.0])
def test_the_suggestion_scales_with_the_problem_and_converges(curvature: float):
    found = LRFinder(start_lr=1e-8, end_lr=1e4, iterations=300, smoothing=0.9).run(parabola(curvature))
    unit = found.suggestion * curvature  # steps of this times the gradient converge up to 1
    assert 0.005 < unit < 1.0
    assert found.diverged


def test_a_sweep_ends_where_the_smoothed_loss_runs_away():
    found = LRFinder(start_lr=1e-3, end_lr=1e6, iterations=200, smoothing=0.5, diverge=4.0).run(parabola())
    assert found.diverged
    assert len(found.rates) < 200
    least = [min(found.smoothed[: n + 1]) for n in range(len(found.smoothed))]
    ratios = [value / low for value, low in zip(found.smoothed[1:], least, strict=False)]
    assert all(ratio <= 4.0 for ratio in ratios[:-1])
    assert ratios[-1] > 4.0


def test_losses_are_read_on_the_host_every_few_updates(monkeypatch: pytest.MonkeyPatch):
    looks: list[int] = []

    def counting(tensors: Any) -> list[float]:
        looks.append(len(tensors))
        return [tensor.item() for tensor in tensors]

    monkeypatch.setattr("pulsetrain.handlers.learning_rate.lr_finder.to_host", counting)
    LRFinder(start_lr=1e-4, end_lr=1e-2, iterations=25).run(parabola())
    assert looks == [10, 10, 5]


class Broken(SupervisedStrategy):
    def __init__(self, losses: Callable[[int], float]) -> None:
        super().__init__("mse")
        self.losses, self.number = losses, 0

    def compute_loss(self, outputs: Tensor, batch: Any) -> Tensor:
        self.number += 1
        return outputs.sum() * 0 + self.losses(self.number)


@pytest.mark.parametrize(
    ("losses", "reason", "entries"),
    [
        (lambda n: math.nan, "the loss ran away after 0 updates; begin with a smaller start_lr", 1),
        (lambda n: math.inf if n > 3 else 1.0, "the loss ran away after 3 updates", 3),
        (lambda n: 1.0, "the loss falls no further than by chance; look at data and loss", 30),
        (lambda n: float(n), "the loss falls no further than by chance", 30),
        (lambda n: 1000.0 - n**3 / 100, "falls fastest at the very last rates; choose a larger end_lr", 30),
    ],
)
def test_the_reason_for_no_suggestion_is_given(losses: Callable[[int], float], reason: str, entries: int):
    found = LRFinder(iterations=30, smoothing=0.5, diverge=1e9).run(trainer({"device": "cpu"}, strategy=Broken(losses)))
    assert found.suggestion is None
    assert reason in found.reason
    assert len(found.rates) == len(found.losses) == len(found.smoothed) == entries


def test_groups_keep_their_ratios_and_tensor_rates_stay_the_same_objects():
    seen: list[list[float]] = []

    class Watched(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            seen.append([float(group["lr"]) for group in self.param_groups])
            super().step()

    model = regression_model()
    first = [*model[0].parameters(), *model[1].parameters()]
    groups = [{"params": first}, {"params": model[4].parameters(), "lr": torch.tensor(0.1)}]
    run = trainer({"device": "cpu"}, model=model, optimizer=Watched(groups, lr=0.2))
    held = run.optimizer.param_groups[1]["lr"]
    found = LRFinder(**SWEEP).run(run)
    assert [rates[0] for rates in seen[: len(found.rates)]] == pytest.approx(list(found.rates))
    assert [rates[1] / rates[0] for rates in seen] == pytest.approx([0.5] * len(seen))
    assert run.optimizer.param_groups[1]["lr"] is held
    assert [float(group["lr"]) for group in run.optimizer.param_groups] == pytest.approx([0.2, 0.1])


@pytest.mark.parametrize("smoothing", [0.98, 0.5])
def test_the_suggestion_is_where_the_loss_falls_whatever_the_batches(smoothing: float):
    finder, generator = LRFinder(smoothing=smoothing), np.random.default_rng(0)
    updates = np.arange(100)
    curve = 2.0 - 0.6 / (1 + np.exp((60 - updates) / 5)) + np.where(updates > 85, (updates - 85.0) ** 2 * 0.05, 0.0)
    noise = generator.standard_normal((200, 100))
    suggestions = [finder._judge(list(curve + 0.03 * each)).suggestion for each in noise]
    noisy = [finder._judge(list(curve + 0.3 * each)).suggestion for each in noise]  # half of what there is to find
    nothing = [finder._judge(list(2.0 + 0.3 * each)).suggestion for each in noise]
    assert finder.rate(55) < min(suggestions) <= max(suggestions) < finder.rate(65)
    found = sorted(rate for rate in noisy if rate is not None)
    assert len(found) > 180
    assert finder.rate(50) < found[len(found) // 4] < found[3 * len(found) // 4] < finder.rate(70)
    assert sum(rate is not None for rate in nothing) < 20


def test_an_attached_finder_logs_what_it_has_found():
    logged = []
    for start in (1e-4, 1e5):
        run = parabola()
        finder = LRFinder(start_lr=start, end_lr=1e6).attach(run)
        with structlog.testing.capture_logs() as logs:
            run.train()
        logged += logs
    first, second = logged
    assert first["event"] == "LRFinder suggests a learning rate"
    assert first["configured"] == 0.001
    assert 0.01 < first["suggestion"] < 1
    assert (second["event"], second["reason"]) == ("LRFinder suggests no learning rate", finder.result.reason)
