"""The losses of a run on their way to log points: summed on the device, read when they are wanted."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pulsetrain import Checkpointer, Trainer, TrainingConfig
from pulsetrain.engine import Events, JaxBackend
from pulsetrain.training.running_stats import Losses
from tests.support.models import batches, function_model, loader, torch_model, trainer


class HostReads(TorchDispatchMode):
    """Counts how often a value is brought to the host."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_the_loop_brings_nothing_to_the_host_between_log_points():
    batches = list(loader())  # a DataLoader reads its own seed
    config = {"max_iterations": 40, "log_every_n_steps": 20, "clip_grad_norm": 1.0, "accumulate": 2}
    run = trainer(config, train_loader=batches)
    reads = HostReads()
    at: list[tuple[int, int]] = []
    run.add_event_handler(Events.METRICS_LOGGED, lambda engine: at.append((engine.state.iteration, reads.count)))
    counts: list[int] = []
    run.add_event_handler(Events.ITERATION_STARTED, lambda engine: counts.append(reads.count))
    with reads:
        run.train()
    assert [iteration for iteration, _ in at] == [20, 40]
    assert counts[0] == 0
    assert len(set(counts[2:20])) == 1  # targets and losses were looked at before the first update alone
    assert len(set(counts[20:])) == 1
    assert counts[-1] > counts[2] > 0  # the log point in between did read: the counter counts


def test_log_points_carry_the_mean_since_the_last_one():
    run = trainer({"max_iterations": 10, "learning_rate": 0.02})
    losses: list[float] = []
    logged: list[dict[str, float]] = []
    run.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.output.loss.item()))

    @run.on(Events.METRICS_LOGGED)
    def keep(engine: Trainer, event: Any) -> None:
        logged.append(event.payload.metrics)

    run.train()
    assert [entry["train/loss"] for entry in logged] == pytest.approx([sum(losses[:5]) / 5, sum(losses[5:]) / 5])
    assert logged[0]["learning_rate"] == 0.02
    assert logged[0]["samples_per_second"] > 0


def test_memory_of_unread_losses_is_bounded():
    losses = Losses()
    for value in range(2500):
        losses.add(torch.tensor(float(value)), 4)
    assert losses.count("log") == losses.count("epoch") == 2500
    assert losses.state_dict()["losses"].numel() < 300
    assert losses.peek("log").item() == losses.consume("log").item() == pytest.approx(1249.5)
    assert losses.count("log") == 0
    assert losses.consume("epoch").item() == pytest.approx(1249.5)


def test_each_reader_gets_the_losses_since_its_own_last_read_in_order():
    whole, read, saved = Losses(), Losses(), Losses()
    values = torch.rand(1000, generator=torch.Generator().manual_seed(0)).unbind()
    log_means = []
    for index, value in enumerate(values, 1):
        for losses in (whole, read, saved):
            losses.add(value, index % 7 + 1)
        if index % 90 == 0:
            log_means.append(read.consume("log").item())
            read.peek("epoch")
        if index % 170 == 0:
            state, saved = saved.state_dict(), Losses()
            saved.load_state_dict(state, "cpu")
    sizes = [index % 7 + 1 for index in range(1, 1001)]
    expected = [
        sum(v.item() * s for v, s in zip(values[i : i + 90], sizes[i : i + 90], strict=True)) / sum(sizes[i : i + 90])
        for i in range(0, 990, 90)
    ]
    assert log_means == pytest.approx(expected, rel=1e-6)
    assert whole.peek("epoch").item() == read.peek("epoch").item() == saved.peek("epoch").item()  # bit for bit
    assert whole.count("epoch") == saved.count("log") == 1000
    assert read.count("log") == 10


def test_a_batch_of_weight_zero_leaves_the_mean_alone():
    losses = Losses()
    for value, size in ((1.0, torch.tensor(3)), (math.nan, torch.tensor(0)), (2.0, torch.tensor(1))):
        losses.add(torch.tensor(value), size)
    assert losses.consume("log").item() == pytest.approx(1.25)


def test_saved_losses_continue_on_the_device_of_the_next_ones():
    losses = Losses()
    losses.add(torch.tensor(1.0), torch.tensor(2))
    resumed = Losses()
    resumed.load_state_dict(losses.state_dict(), "meta")
    resumed.add(torch.ones((), device="meta"), torch.ones((), device="meta"))
    assert resumed.consume("log").device.type == "meta"


def test_a_loss_that_is_still_computed_is_read_with_the_next_one_or_when_it_is_needed():
    losses, read = Losses(), []

    def later(value: float) -> Any:
        return lambda: read.append(value) or torch.tensor(value)

    losses.add_later(later(1.0), 1)
    assert read == []
    losses.add_later(later(4.0), 2)
    assert read == [1.0]
    assert losses.count("epoch") == 2
    assert read == [1.0, 4.0]
    losses.add_later(later(10.0), 1)
    losses.add(torch.tensor(2.0), 1)
    assert losses.state_dict()["losses"].tolist() == [1.0, 4.0, 10.0, 2.0], "in the order of the steps"
    losses.add_later(later(7.0), 1)
    saved = losses.state_dict()
    assert saved["losses"].tolist()[-1] == 7.0, "a checkpoint has the newest, too"
    losses.add_later(later(8.0), 1)
    losses.load_state_dict(saved, "cpu")
    assert losses.state_dict()["losses"].tolist() == [1.0, 4.0, 10.0, 2.0, 7.0], "not that of a step before it"


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_step_in_jax_is_not_waited_for_before_the_next_one_is_started(clip: float | None, monkeypatch: Any):
    pytest.importorskip("jax", reason="pip install 'pulsetrain[jax]'")
    happened: list[str] = []
    step, convert = JaxBackend.train_step, JaxBackend.tensor_of
    monkeypatch.setattr(
        JaxBackend, "train_step", lambda *args, **named: happened.append("step") or step(*args, **named)
    )
    config = TrainingConfig(max_epochs=1, learning_rate=0.01, device="cpu", log_every_n_steps=10, clip_grad_norm=clip)
    model = function_model(torch_model().state_dict())
    run = Trainer(model, batches(10), backend=JaxBackend("cpu"), config=config)
    run.add_event_handler(Events.STARTED, happened.clear)

    def converted(backend: Any, leaf: Any) -> Any:
        if getattr(leaf, "ndim", None) == 0 and hasattr(leaf, "block_until_ready"):
            happened.append("read")
        return convert(backend, leaf)

    monkeypatch.setattr(JaxBackend, "tensor_of", converted)
    run.train()
    assert happened[:5] == ["step", "step", "read", "step", "read"]
    assert run.history["train/loss"][-1] > 0.0


def test_what_an_earlier_process_has_trained_is_reported_without_a_speed(tmp_path: Path):
    def logged() -> list[dict[str, float]]:
        found: list[dict[str, float]] = []
        run = trainer({"max_epochs": 2, "log_every_n_steps": 1000}, handlers=[Checkpointer(tmp_path)])
        run.on(Events.METRICS_LOGGED)(lambda engine, event: found.append(event.payload.metrics))
        run.train(resume="latest")
        return found

    (first,), (again,) = logged(), logged()
    assert first["samples_per_second"] > 0
    assert "samples_per_second" not in again
    assert again["train/loss"] == first["train/loss"]
