"""A thousand updates in each precision: finite, similar, through an overflow, and to convergence on real data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import AnomalyDetected, Events, SupervisedStrategy
from pulsetrain.engine.losses import cross_entropy
from pulsetrain.engine.metrics import Accuracy
from pulsetrain.handlers import EMA

pytestmark = pytest.mark.slow

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
    ),
]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small products gain nothing from a second thread, and lose much where another test has the core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Scikit-learn's 1,797 handwritten digits: 1,437 to learn from, 360 to be judged by."""
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    inputs, targets = torch.tensor(pixels / 16, dtype=torch.float32)[order], torch.tensor(labels)[order]
    return TensorDataset(inputs[:1437], targets[:1437]), TensorDataset(inputs[1437:], targets[1437:])


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 192), nn.LayerNorm(192), nn.ReLU(), nn.Dropout(0.5), nn.Linear(192, 10))


def train(
    precision: str, device: str, handlers: tuple[Any, ...] = (), **arguments: Any
) -> tuple[Trainer, list[Tensor]]:
    """1,000 updates, and each step's loss."""
    training, validation = digits()
    config = {
        "max_updates": 1000,
        "learning_rate": 2e-3,
        "weight_decay": 0.01,
        "schedule": "cosine",
        "warmup_steps": 50,
        "clip_grad_norm": 1.0,
        "precision": precision,
        "device": device,
    }
    run = Trainer(
        arguments.pop("model", None) or classifier(),
        DataLoader(training, batch_size=64, shuffle=True, drop_last=True),
        DataLoader(validation, batch_size=360),
        config=TrainingConfig(**{**config, **arguments.pop("config", {})}),
        metrics={"accuracy": Accuracy()},
        handlers=handlers,
        **arguments,
    )
    losses: list[Tensor] = []
    run.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.output.loss))
    run.train()
    return run, losses


def all_finite(run: Trainer) -> bool:
    tensors = [*run.model.state_dict().values()]
    for state in run.optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, Tensor)]
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


@pytest.fixture(scope="module", params=DEVICES)
def runs(request: pytest.FixtureRequest, one_thread: None) -> dict[str, tuple[Trainer, list[Tensor]]]:
    return {precision: train(precision, request.param) for precision in ("fp32", "bf16", "fp16")}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_thousand_updates_stay_finite(runs: dict[str, Any], precision: str):
    run, losses = runs[precision]
    assert run.state.update == len(losses) == 1000
    assert torch.isfinite(torch.stack(losses)).all()
    assert all_finite(run)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_loss_falls_to_convergence_on_real_digits(runs: dict[str, Any], precision: str):
    run, losses = runs[precision]
    curve = torch.stack(losses).float().cpu()
    hundreds = curve.view(10, 100).mean(1)
    assert hundreds[-1] < 0.05 * hundreds[0]
    assert (hundreds.diff() < 0.01).all()  # no hundred updates undo the progress of the hundred before
    assert run.history.get_latest("val/accuracy") > 0.97


def test_bf16_and_fp16_end_near_full_precision(runs: dict[str, Any]):
    ends = {name: torch.stack(losses[-100:]).float().mean().item() for name, (_, losses) in runs.items()}
    assert ends["bf16"] == pytest.approx(ends["fp32"], abs=0.01)
    assert ends["fp16"] == pytest.approx(ends["fp32"], abs=0.01)
    accuracies = {name: run.history.get_latest("val/accuracy") for name, (run, _) in runs.items()}
    assert accuracies["bf16"] == pytest.approx(accuracies["fp32"], abs=0.01)


class Spiking:
    """Cross entropy whose gradient overflows fp16 in some batches."""

    def __init__(self, at: set[int]) -> None:
        self.at, self.calls = at, 0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = cross_entropy(outputs, targets)
        if not torch.is_grad_enabled():
            return loss
        self.calls += 1
        return loss * 1e6 if self.calls in self.at else loss


@pytest.mark.parametrize("device", DEVICES)
def test_an_fp16_overflow_is_recovered_from_counted_and_announced(device: str):
    spikes = {200, 201, 500}
    announced: list[tuple[int, AnomalyDetected]] = []
    logged: list[float] = []

    class Listening:
        def attach(self, engine: Trainer) -> None:
            engine.add_event_handler(
                Events.ANOMALY_DETECTED,
                lambda engine, event: announced.append((engine.state.iteration, event.payload)),
            )
            engine.add_event_handler(
                Events.METRICS_LOGGED,
                lambda engine, event: logged.append(event.payload.metrics["skipped_updates"]),
            )

    before: dict[int, list[Tensor]] = {}
    after: dict[int, list[Tensor]] = {}

    class Watching:
        def attach(self, engine: Trainer) -> None:
            def copies() -> list[Tensor]:
                return [parameter.detach().clone() for parameter in engine.model.parameters()]

            @engine.on(Events.ITERATION_STARTED)
            def start() -> None:
                if engine.state.iteration in spikes:
                    before[engine.state.iteration] = copies()

            @engine.on(Events.ITERATION_COMPLETED)
            def end() -> None:
                if engine.state.iteration in spikes:
                    after[engine.state.iteration] = copies()

    run, losses = train("fp16", device, (Listening(), Watching()), strategy=SupervisedStrategy(Spiking(spikes)))
    for iteration in spikes:  # the weights are as if the batch had never been
        assert all(torch.equal(*pair) for pair in zip(before[iteration], after[iteration], strict=True))
    skipped = run.backend.skipped_updates()
    assert skipped >= len(spikes)
    assert {payload.kind for _, payload in announced} == {"update_skipped"}
    assert sum(payload.value for _, payload in announced) == skipped  # each is announced once
    assert {250, 500} <= {iteration for iteration, _ in announced}  # at the next log point
    assert logged[-1] == skipped
    assert all_finite(run)
    usual = [loss for number, loss in enumerate(losses, 1) if number not in spikes]
    assert torch.isfinite(torch.stack(usual)).all()
    assert run.history.get_latest("val/accuracy") > 0.97
    assert run.backend.scaler.get_scale() > 0


def test_every_part_of_a_step_together_reaches_the_accuracy():
    ema = EMA(decay=0.99)
    run, losses = train(
        "bf16",
        "cpu",
        (ema,),
        config={
            "optimizer": "muon",
            "no_decay": "auto",
            "accumulate": 2,
            "max_updates": 500,
            "activation_checkpointing": "0",
        },
    )
    assert run.state.update == 500
    assert len(losses) == 1000
    assert torch.isfinite(torch.stack(losses)).all()
    assert run.history.get_latest("val/accuracy") > 0.97
