"""The trainer: bounds, history, validation, accumulation, clipping, precision, and rejected input."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.metrics import MeanSquaredError
from structlog.testing import capture_logs
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics import MeanAbsoluteError

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import (
    EventBus,
    Events,
    Every,
    PretrainStrategy,
    TorchBackend,
    TrainingResult,
)
from pulsetrain.engine.checkpoint import CheckpointManager
from pulsetrain.handlers import Callback, Checkpointer
from tests.support.models import Tokens, loader, pairs, regression_model, trainer


def test_a_run_lowers_the_loss_and_returns_its_history():
    run = trainer({"max_epochs": 8}, val_loader=loader(shuffle=False))
    history = run.train()
    assert {name: len(values) for name, values in history.items()} == {
        "train/loss": 8,
        "learning_rate": 8,
        "val/loss": 8,
    }
    assert history["val/loss"][-1] < 0.3 * history["val/loss"][0]


def test_the_steps_are_those_of_a_hand_written_loop():
    run = trainer({"max_epochs": 2}, train_loader=loader(shuffle=False))
    run.train()
    model = regression_model().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(2):
        for inputs, targets in loader(shuffle=False):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    for mine, theirs in zip(run.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


def test_accumulating_four_batches_is_one_batch_four_times_as_large():
    model = nn.Linear(4, 1)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    trainer({"accumulate": 4, "max_updates": 3}, model=model, train_loader=loader(batch_size=2, shuffle=False)).train()
    other = nn.Linear(4, 1)
    other.load_state_dict(weights)
    trainer({"max_updates": 3}, model=other, train_loader=loader(batch_size=8, shuffle=False)).train()
    torch.testing.assert_close(model.weight, other.weight)


@pytest.mark.parametrize(
    ("bound", "iterations", "reason"),
    [
        ({"max_epochs": 2}, 20, None),
        ({"max_iterations": 13}, 13, "max_iterations=13 was reached"),
        ({"max_updates": 4, "accumulate": 3}, 12, "max_updates=4 was reached"),
        ({}, 10, None),
    ],
)
def test_a_run_ends_at_its_bound(bound: dict[str, int], iterations: int, reason: str | None):
    run = trainer(bound)
    run.train()
    assert (run.state.iteration, run.state.stop_reason) == (iterations, reason)
    assert run.total_iterations == iterations


def test_a_bound_in_tokens_ends_with_the_batch_that_reaches_it():
    tokens = torch.randint(0, 8, (64, 9), generator=torch.Generator().manual_seed(0))
    run = Trainer(
        Tokens(), DataLoader(tokens, batch_size=4), strategy=PretrainStrategy(), config=TrainingConfig(max_tokens=100)
    )
    run.train()
    assert run.total_iterations == run.state.iteration == 4  # 32 tokens a batch
    assert run.state.tokens == 128
    assert run.state.stop_reason == "max_tokens=100 was reached"


def test_a_loader_without_a_length_trains():
    class Stream(IterableDataset[Any]):
        def __iter__(self):
            yield from pairs(12)

    run = trainer({"max_epochs": 3}, train_loader=DataLoader(Stream(), batch_size=4))
    run.train()
    assert (run.state.iteration, run.state.epoch_length) == (9, 3)


def test_a_run_that_ends_inside_an_epoch_ends_with_a_validation():
    run = trainer({"max_iterations": 7}, val_loader=loader(shuffle=False))
    history = run.train()
    assert len(history["val/loss"]) == len(history["train/loss"]) == 1


def test_validation_comes_by_cadence_before_what_acts_on_it():
    run = trainer({"max_updates": 9, "validate_every": Every(updates=4)}, val_loader=loader(shuffle=False))
    seen = []

    @run.on(Events.ITERATION_COMPLETED)
    def look(engine: Trainer) -> None:
        seen.append("val/loss" in engine.state.metrics)

    run.train()
    assert seen == [False] * 3 + [True] * 6
    assert len(run.history["val/loss"]) == 3  # after 4, after 8, at the end


def test_several_validation_sets_and_three_kinds_of_metrics():
    class Largest:
        """Ours: anything with these three."""

        def reset(self) -> None:
            self.value = -math.inf

        def update(self, predicted: torch.Tensor, true: torch.Tensor) -> None:
            self.value = max(self.value, float(true.max()))

        def compute(self) -> float:
            return self.value

    run = trainer(
        {},
        val_loader={"near": loader(8, shuffle=False), "far": loader(12, shuffle=False)},
        metrics={"mse": MeanSquaredError(), "mae": MeanAbsoluteError(), "largest": Largest()},
    )
    metrics = run.validate()
    assert metrics.keys() == {f"{name}/{m}" for name in ("near", "far") for m in ("loss", "mse", "mae", "largest")}
    assert metrics["near/mse"] == pytest.approx(metrics["near/loss"])
    assert metrics["far/largest"] == pytest.approx(float(pairs(12).tensors[1].max()))


def test_validation_leaves_the_model_in_training_mode_and_its_buffers_alone():
    run = trainer(val_loader=loader(shuffle=False))
    run.model.train()
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    run.validate()
    assert run.model.training
    assert all(torch.equal(before[name], value) for name, value in run.model.state_dict().items())


def test_a_validation_mean_weighs_every_sample_alike():
    run = trainer(val_loader=loader(10, batch_size=4, shuffle=False))  # batches of 4, 4 and 2
    loss = run.validate()["val/loss"]
    inputs, targets = pairs(10).tensors
    run.model.eval()
    assert loss == pytest.approx(nn.functional.mse_loss(run.model(inputs), targets).item(), rel=1e-5)


def test_trainer_and_evaluator_share_one_order_of_events():
    bus = EventBus()
    run = trainer({}, bus=bus, val_loader=loader(8, shuffle=False))
    log: list[tuple[int, str, str]] = []
    for event in (Events.EPOCH_COMPLETED, Events.VALIDATION_STARTED, Events.VALIDATION_COMPLETED, Events.COMPLETED):
        bus.subscribe(event, lambda engine, event: log.append((event.seq, event.engine, event.type)))
    run.train()
    assert [(engine, kind) for _, engine, kind in sorted(log)] == [
        ("trainer", "epoch_completed"),
        ("trainer", "validation_started"),
        ("evaluator", "epoch_completed"),
        ("evaluator", "completed"),
        ("trainer", "validation_completed"),
        ("trainer", "completed"),
    ]


def test_gradients_are_announced_before_they_are_clipped():
    run = trainer({"max_iterations": 1, "clip_grad_norm": 0.01})
    seen = {}

    @run.on(Events.GRADIENTS_READY)
    def measure(engine: Trainer, event: Any) -> None:
        grads = [p.grad for p in engine.model.parameters()]
        seen["norm"] = torch.nn.utils.get_total_norm(grads).item()
        seen["payload"] = event.payload.grad_norm.item()
        seen["update"] = engine.state.update
        weights.extend(p.detach().clone() for p in engine.model.parameters())

    weights: list[torch.Tensor] = []
    run.train()
    assert seen["norm"] == pytest.approx(seen["payload"])
    assert seen["norm"] > 0.01
    assert seen["update"] == 1
    moved = torch.sqrt(sum(((a - b) ** 2).sum() for a, b in zip(weights, run.model.parameters(), strict=True)))
    assert moved.item() <= 0.01 * 0.01 * 1.01  # learning rate times the clipped norm


@pytest.mark.parametrize("listen", [False, True])
def test_updates_are_counted_alike_whether_or_not_anyone_listens(listen: bool):
    run = trainer({"max_iterations": 7, "accumulate": 2})
    if listen:
        run.add_event_handler(Events.GRADIENTS_READY, lambda engine: None)
        run.add_event_handler(Events.OPTIMIZER_STEP_COMPLETED, lambda engine: None)
    run.train()
    assert run.state.update == 3


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_trains_close_to_full(precision: str):
    def last(name: str) -> float:
        run = trainer({"max_epochs": 8, "precision": name}, val_loader=loader(shuffle=False))
        return run.train()["val/loss"][-1]

    assert last(precision) == pytest.approx(last("fp32"), abs=0.15)


def test_the_schedule_of_the_configuration_reaches_the_optimizer():
    run = trainer(
        {"max_iterations": 6, "schedule": "linear", "warmup_steps": 2, "min_lr_ratio": 0.0, "learning_rate": 0.4}
    )
    rates: list[float] = []

    @run.on(Events.OPTIMIZER_STEP_COMPLETED)
    def keep(engine: Trainer, event: Any) -> None:
        rates.append(event.payload.learning_rates[0])

    run.train()
    assert rates == pytest.approx([0.0, 0.2, 0.4, 0.3, 0.2, 0.1])


def test_early_stopping_by_configuration_says_why():
    run = trainer(
        {"max_epochs": 50, "learning_rate": 1e-9, "early_stopping_patience": 2}, val_loader=loader(shuffle=False)
    )
    run.train()
    assert run.state.epoch < 10
    assert "val/loss" in run.state.stop_reason


def test_a_perplexity_and_bits_per_byte_follow_from_the_loss():
    tokens = torch.randint(0, 8, (16, 9), generator=torch.Generator().manual_seed(0))
    data = DataLoader(tokens, batch_size=4)
    run = Trainer(Tokens(), data, data, strategy=PretrainStrategy(unit="byte"))
    metrics = run.validate()
    assert metrics["val/perplexity"] == pytest.approx(math.exp(metrics["val/loss"]))
    assert metrics["val/bits_per_byte"] == pytest.approx(metrics["val/loss"] / math.log(2))


def test_callbacks_see_the_run_in_order():
    class Log(Callback):
        def __init__(self) -> None:
            self.calls: list[str] = []

        def on_train_begin(self, trainer: Trainer) -> None:
            self.calls.append("begin")

        def on_step_end(self, trainer: Trainer, loss: torch.Tensor) -> None:
            assert loss.shape == ()
            assert not loss.requires_grad
            self.calls.append("step")

        def on_validation_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
            self.calls.append(f"validated {'val/loss' in metrics}")

        def on_train_end(self, trainer: Trainer) -> None:
            self.calls.append("end")

    log = Log()
    trainer({"max_epochs": 1}, train_loader=loader(8), val_loader=loader(8), callbacks=[log]).train()
    assert log.calls == ["begin", "step", "step", "validated True", "end"]


def test_a_step_gives_its_result_on_the_device():
    run = trainer({"max_iterations": 1})
    state = run.run(run.train_loader, max_iters=1)
    assert isinstance(state.output, TrainingResult)
    assert isinstance(state.output.loss, torch.Tensor)


def test_the_optimizer_may_be_an_instance_or_a_factory():
    model = regression_model()
    instance = torch.optim.Adam(model.parameters(), lr=0.3)
    assert trainer(model=model, optimizer=instance).optimizer is instance
    made = trainer(optimizer=lambda parameters: torch.optim.Adagrad(parameters, lr=0.2)).optimizer
    assert isinstance(made, torch.optim.Adagrad)


def test_a_backends_own_device_wins_over_the_configuration():
    run = trainer({"device": "auto"}, backend=TorchBackend("cpu"))
    assert run.backend.device.type == "cpu"


def test_a_single_tensor_dataset_works_with_pretrain():
    data = DataLoader(TensorDataset(torch.randint(0, 8, (8, 5))), batch_size=4)
    run = Trainer(Tokens(), data, strategy="pretrain")
    run.train()
    assert run.state.tokens == 32


@pytest.mark.parametrize(
    ("trained", "asked", "bound"),
    [
        ({"max_epochs": 2}, {"max_epochs": 2}, "max_epochs=2"),
        ({"max_epochs": 2}, {"max_epochs": 1}, "max_epochs=1"),
        ({"max_iterations": 13}, {"max_iterations": 13}, "max_iterations=13"),
        ({"max_iterations": 13}, {"max_iterations": 5}, "max_iterations=5"),
        ({"max_updates": 13}, {"max_updates": 5}, "max_updates=5"),
    ],
)
def test_resuming_a_run_at_its_bound_or_past_it_says_so(
    trained: dict[str, int], asked: dict[str, int], bound: str, tmp_path: Path
) -> None:
    trainer(trained, handlers=[Checkpointer(tmp_path)]).train()
    again = trainer(asked, handlers=[Checkpointer(tmp_path)])
    with capture_logs() as logs:
        again.train(resume="latest")
    (line,) = (line for line in logs if "has reached its bound already" in line["event"])
    assert (line["bound"], line["iteration"]) == (bound, again.state.iteration)


@pytest.mark.parametrize("has_length", [True, False])
@pytest.mark.parametrize("setting", ["max_epochs", "max_iterations", "max_updates"])
def test_a_resumed_run_that_trains_no_batch_says_so_wherever_its_checkpoint_was_made(
    setting: str, has_length: bool, tmp_path: Path
) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(pairs(12))

    def make(bound: int, *handlers: object) -> Trainer:
        data = loader(12) if has_length else DataLoader(Stream(), batch_size=4)
        return trainer({setting: bound}, train_loader=data, handlers=handlers)

    in_epochs = setting == "max_epochs"
    every_one = Checkpointer(tmp_path, every=Every(iterations=1), at_end=False, keep_last=99)
    make(2 if in_epochs else 6, every_one).train()
    for checkpoint in CheckpointManager(tmp_path / "checkpoints").valid():
        for bound in (1, 2) if in_epochs else (3, 5, 6):
            again = make(bound)
            again.load_checkpoint(checkpoint)
            first, seen = again.state.iteration, []
            again.add_event_handler(Events.ITERATION_COMPLETED, seen.append)
            with capture_logs() as logs:
                again.train()
            says = [line for line in logs if "has reached its bound already" in line["event"]]
            assert [line["iteration"] for line in says] == ([] if seen else [first]), (checkpoint.name, bound)
