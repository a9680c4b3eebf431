"""Several modules in one trainer, each with its optimizer and schedule, trained alternately by a strategy."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from pulsetrain import Trainer, TrainingConfig, verify
from pulsetrain.engine import Events, Every, Phase, SupervisedStrategy, TrainingBatch
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.schedules import Constant, Cosine, Linear
from pulsetrain.engine.step.accumulation import Accumulate
from pulsetrain.handlers import Checkpointer, EventRecorder, GradientMonitor, LRScheduler, NaNGuard

ROWS, BATCH = 32, 4


class InTurns:
    """An encoder that fits targets and a critic that fits the encoder's output: two losses of one batch."""

    def __init__(self, critic_updates: int = 1) -> None:
        self.critic_updates = critic_updates

    def prepare_batch(self, batch: Any) -> TrainingBatch:
        return TrainingBatch(batch[0], batch[1], len(batch[0]))

    def compute_losses(self, model: Any, batch: TrainingBatch) -> Iterator[tuple[str, Tensor]]:
        output = model["actor"](batch.inputs)
        for _ in range(self.critic_updates):
            yield "critic", (model["critic"](output.detach()) - batch.targets).square().mean()
        yield "actor", (model["critic"](output) - batch.targets).square().mean()


def modules() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {"actor": nn.Sequential(nn.Linear(4, 8), nn.Tanh()), "critic": nn.Linear(8, 1)}


def loader(shuffle: bool = True) -> DataLoader[Any]:
    inputs = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=BATCH, shuffle=shuffle)


def make(*handlers: Any, strategy: Any = None, model: Any = None, optimizer: Any = None, **settings: Any) -> Trainer:
    options = {"max_epochs": 2, "optimizer": "sgd", "learning_rate": 0.1, "schedule": None, "seed": 3}
    return Trainer(
        model or modules(),
        settings.pop("data", None) or loader(),
        settings.pop("val_loader", None),
        strategy=strategy or InTurns(),
        optimizer=optimizer,
        config=TrainingConfig(**{**options, **settings}),
        handlers=list(handlers),
    )


def by_hand(batches: list[Any], accumulate: int = 1) -> dict[str, nn.Module]:
    """The same in a hand-written loop, with an update of each after `accumulate` batches."""
    model = modules()
    critic, actor = (torch.optim.SGD(model[name].parameters(), lr=0.1, momentum=0.9) for name in ("critic", "actor"))
    for number, (inputs, targets) in enumerate(batches, start=1):
        output = model["actor"](inputs)
        loss = (model["critic"](output.detach()) - targets).square().mean() / accumulate
        loss.backward(inputs=[*model["critic"].parameters()])
        if number % accumulate == 0:
            critic.step()
            critic.zero_grad()
        loss = (model["critic"](output) - targets).square().mean() / accumulate
        loss.backward(inputs=[*model["actor"].parameters()])
        if number % accumulate == 0:
            actor.step()
            actor.zero_grad()
    return model


@pytest.mark.parametrize("accumulate", [1, 4])
def test_the_run_equals_a_loop_written_by_hand(accumulate: int) -> None:
    data = loader(shuffle=False)
    trainer = make(data=data, max_epochs=1, accumulate=accumulate)
    trainer.train()
    expected = by_hand(list(data), accumulate)
    for name, module in expected.items():
        for mine, theirs in zip(trainer.model[name].parameters(), module.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs)


def test_events_carry_whose_update_it_is() -> None:
    trainer = make(max_epochs=1, learning_rate=0.05)
    seen: list[Any] = []
    both = Events.GRADIENTS_READY | Events.OPTIMIZER_STEP_COMPLETED
    trainer.add_event_handler(both, lambda engine, event: seen.append((event.type, event.payload.optimizer)))
    trainer.train()
    of_a_batch = [
        ("gradients_ready", "critic"),
        ("optimizer_step_completed", "critic"),
        ("gradients_ready", "actor"),
        ("optimizer_step_completed", "actor"),
    ]
    assert seen == of_a_batch * 8
    assert trainer.state.update == 16


def test_each_loss_is_reported_and_loss_is_their_sum() -> None:
    trainer = make(val_loader=loader(), log_every_n_steps=4)
    logged: list[Any] = []
    trainer.add_event_handler(Events.METRICS_LOGGED, lambda engine, event: logged.append(dict(event.payload.metrics)))
    history = trainer.train()
    for metrics in (*logged, {name: values[-1] for name, values in history.items()}):
        assert metrics["train/loss"] == pytest.approx(metrics["train/actor_loss"] + metrics["train/critic_loss"])
        assert metrics["learning_rate/actor"] == metrics["learning_rate/critic"] == 0.1
    assert history["val/loss"][-1] == pytest.approx(history["val/actor_loss"][-1] + history["val/critic_loss"][-1])


def test_each_has_its_own_optimizer_and_schedule() -> None:
    updates = 16
    schedules = [
        LRScheduler(Cosine(initial_lr=0.1, total_steps=updates), "actor"),
        LRScheduler(Linear(initial_lr=0.01, total_steps=updates), "critic"),
    ]
    factory = {"critic": lambda parameters: torch.optim.Adam(parameters, lr=0.01)}
    trainer = make(*schedules, optimizer=factory)
    rates: dict[str, list[float]] = {"actor": [], "critic": []}

    @trainer.on(Events.OPTIMIZER_STEP_COMPLETED)
    def note(engine: Any, event: Any) -> None:
        rates[event.payload.optimizer] += event.payload.learning_rates

    trainer.train()
    assert isinstance(trainer.optimizers["critic"], torch.optim.Adam)
    assert rates["actor"] == pytest.approx([schedules[0].schedule.get_lr(step) for step in range(updates)])
    assert rates["critic"] == pytest.approx([schedules[1].schedule.get_lr(step) for step in range(updates)])


def test_one_optimizer_may_be_updated_several_times_a_batch() -> None:
    counted: Counter[str] = Counter()
    trainer = make(strategy=InTurns(critic_updates=3), max_epochs=1)
    trainer.add_event_handler(
        Events.OPTIMIZER_STEP_COMPLETED, lambda engine, event: counted.update([event.payload.optimizer])
    )
    trainer.train()
    assert counted == {"critic": 24, "actor": 8}


def test_a_bound_in_updates_and_a_configured_schedule_apply() -> None:
    trainer = make(max_epochs=None, max_updates=12, schedule="linear")
    trainer.train()
    assert (trainer.state.update, trainer.state.iteration) == (12, 6)
    schedules = [each for each in trainer.handlers if isinstance(each, LRScheduler)]
    assert [handler.optimizer for handler in schedules] == ["actor", "critic"]
    assert [handler.get_last_lr() for handler in schedules] == [0.0, 0.0]


def test_a_resumed_run_is_bit_for_bit_the_same(tmp_path: Path) -> None:
    def begin(folder: Path, epochs: int) -> Trainer:
        saver = Checkpointer(folder, every=Every(iterations=5))
        optimizer = {"actor": "adamw", "critic": "sgd"}
        return make(saver, optimizer=optimizer, max_epochs=epochs, schedule="cosine", schedule_options={})

    whole = begin(tmp_path / "whole", 2)
    expected = whole.train()
    parts = begin(tmp_path / "parts", 2)

    @parts.on(Events.ITERATION_STARTED(once=14))
    def fail() -> None:
        raise RuntimeError("the power went")

    with pytest.raises(RuntimeError, match="the power went"):
        parts.train()
    again = begin(tmp_path / "parts", 2)
    history = again.train(resume="latest")
    assert history == expected
    for mine, theirs in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_recorded_run_is_verified(tmp_path: Path) -> None:
    make(EventRecorder(tmp_path), Checkpointer(tmp_path, every=Every(iterations=6))).train()
    found = verify(
        tmp_path, lambda folder: make(EventRecorder(folder), Checkpointer(folder, every=Every(iterations=6)))
    )
    assert found, str(found)


def test_precision_clipping_and_the_guard_work_on_each(tmp_path: Path) -> None:
    for precision in ("bf16", "fp16"):
        trainer = make(NaNGuard(), precision=precision, clip_grad_norm=0.5, optimizer="adamw")
        trainer.train()
        assert all(p.isfinite().all() for p in trainer.model.parameters())


@pytest.mark.parametrize(("accumulate", "critic_updates", "of"), [(1, 1, (4, 4)), (2, 1, (2, 2)), (1, 3, (12, 4))])
def test_each_optimizers_update_count_filters_its_gradient_events(
    accumulate: int, critic_updates: int, of: tuple[int, int]
) -> None:
    trainer = make(
        GradientMonitor(Every(updates=2), updates=True),
        strategy=InTurns(critic_updates), accumulate=accumulate, max_epochs=1, learning_rate=0.01,
    )  # fmt: skip
    norms: dict[str, float] = {}
    seen: dict[str, list[tuple[Any, bool]]] = {"critic": [], "actor": []}

    @trainer.on(Events.GRADIENTS_READY, phase=Phase.COMPUTE)
    def note(engine: Any, event: Any) -> None:
        norms[event.payload.optimizer] = event.payload.grad_norm.item()

    @trainer.on(Events.METRICS_LOGGED)
    def compare(engine: Any, event: Any) -> None:
        own = {name: value for name, value in event.payload.metrics.items() if re.match(r"grad_norm/.+\.", name)}
        names = {name.removeprefix("grad_norm/").partition(".")[0] for name in own}
        if names & seen.keys():
            (name,) = names  # not the other's, whose gradients may be incomplete
            ratios = [each for each in event.payload.metrics if each.startswith(f"update_ratio/{name}")]
            whole = sum(value**2 for value in own.values()) ** 0.5 == pytest.approx(norms[name], rel=1e-5)
            seen[name].append((len(ratios) == len(own), whole))

    trainer.train()
    assert seen == {"critic": [(True, True)] * of[0], "actor": [(True, True)] * of[1]}


def test_update_counts_start_with_the_run() -> None:
    trainer = make(GradientMonitor(Every(updates=3)), max_epochs=1, learning_rate=0.01)
    at: list[int] = []

    @trainer.on(Events.METRICS_LOGGED)
    def note(engine: Any, event: Any) -> None:
        if "grad_norm/critic.bias" in event.payload.metrics:
            at.append(engine.state.iteration)

    for _ in range(2):
        trainer.train()
    assert at == [3, 6] * 2


def test_a_step_that_fails_midway_leaves_no_gradient() -> None:
    class Failing(InTurns):
        def compute_losses(self, model: Any, batch: TrainingBatch) -> Iterator[tuple[str, Tensor]]:
            yield from super().compute_losses(model, batch)
            raise ValueError("no more")

    trainer = make(strategy=Failing(), accumulate=2)
    with pytest.raises(ValueError, match="no more") as raised:
        trainer.train()
    assert any("given inputs float32 (4, 4)" in note for note in raised.value.__notes__)
    assert all(p.grad is None for p in trainer.model.parameters())
    assert trainer.accumulated == 0


def test_updates_in_a_row_are_counted_for_each_optimizer() -> None:
    class Broken(InTurns):
        def compute_losses(self, model: Any, batch: TrainingBatch) -> Iterator[tuple[str, Tensor]]:
            for name, loss in super().compute_losses(model, batch):
                yield name, loss * (float("nan") if name == "actor" else 1.0)

    trainer = make(NaNGuard(every=Every(iterations=1), max_in_a_row=3), strategy=Broken())
    trainer.train()
    assert trainer.state.iteration == 3
    assert "3 updates in a row" in str(trainer.state.stop_reason)


def test_the_gradient_norm_is_logged_for_each_optimizer() -> None:
    trainer = make(clip_grad_norm=1.0, log_every_n_steps=4)
    logged: list[Any] = []
    trainer.add_event_handler(Events.METRICS_LOGGED, lambda engine, event: logged.append(event.payload.metrics))
    trainer.train()
    assert all({"grad_norm/actor", "grad_norm/critic"} <= metrics.keys() for metrics in logged)
    assert not any("grad_norm" in metrics for metrics in logged)


def test_a_loss_with_a_penalty_on_gradients_is_validated_too() -> None:
    class Penalised(InTurns):
        def compute_losses(self, model: Any, batch: TrainingBatch) -> Iterator[tuple[str, Tensor]]:
            inputs = model["actor"](batch.inputs).detach().requires_grad_()
            (slope,) = torch.autograd.grad(model["critic"](inputs).sum(), inputs, create_graph=True)
            yield "critic", (slope.norm(dim=1) - 1).square().mean()

    history = make(strategy=Penalised(), val_loader=loader()).train()
    assert history["val/critic_loss"][-1] < history["val/critic_loss"][0]


class TestBadInput:
    def test_several_optimizers_cannot_accumulate_in_fp16(self) -> None:
        with pytest.raises(ConfigurationError, match="set accumulate=1, or use bf16"):
            make(precision="fp16", accumulate=2)

    def test_two_losses_of_one_optimizer_cannot_be_accumulated(self) -> None:
        with pytest.raises(ValueError, match="two losses for 'critic'"):
            make(strategy=InTurns(critic_updates=2), accumulate=2).train()

    def test_a_single_module_for_a_strategy_of_several_is_refused(self) -> None:
        with pytest.raises(TypeError, match=r"model=Linear.*by name"):
            make(model=nn.Linear(1, 1))

    def test_several_optimizers_for_a_strategy_of_one_are_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="SupervisedStrategy has one loss"):
            make(strategy=SupervisedStrategy("mse"), model=nn.Linear(4, 1), optimizer={"a": "sgd"})

    @pytest.mark.parametrize("given", [{"lr": 0.1}, {"name": "sgd", "lr": 0.1}])
    def test_the_options_of_an_optimizer_are_not_taken_for_several(self, given: dict[str, object]) -> None:
        with pytest.raises(TypeError, match=r"is not an optimizer; pass one, or its name, as optimizer='sgd'"):
            make(strategy=SupervisedStrategy("mse"), model=nn.Linear(4, 1), optimizer=given)

    def test_an_optimizer_without_a_module_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match=r"'judge'.*actor.*critic"):
            make(optimizer={"judge": "sgd"})

    def test_one_optimizer_instance_for_all_modules_is_refused(self) -> None:
        model = modules()
        with pytest.raises(TypeError, match="one for each module"):
            make(model=model, optimizer=torch.optim.SGD(model["actor"].parameters(), lr=0.1))

    def test_a_loss_without_an_optimizer_is_refused(self) -> None:
        class Wrong(InTurns):
            def compute_losses(self, model: Any, batch: TrainingBatch) -> Iterator[tuple[str, Tensor]]:
                yield "judge", next(iter(super().compute_losses(model, batch)))[1]

        with pytest.raises(ValueError, match=r"'judge'.*actor, critic"):
            make(strategy=Wrong()).train()

    def test_a_batch_without_a_loss_is_refused(self) -> None:
        class Silent(InTurns):
            def compute_losses(self, model: Any, batch: TrainingBatch) -> Iterator[tuple[str, Tensor]]:
                yield from ()

        with pytest.raises(ValueError, match="gave no loss"):
            make(strategy=Silent()).train()

    def test_a_schedule_must_name_one_of_the_optimizers(self) -> None:
        with pytest.raises(ConfigurationError, match="has several, actor, critic; name one"):
            make(LRScheduler(Constant(initial_lr=0.1)))
        with pytest.raises(ConfigurationError, match=r"'judge'"):
            make(LRScheduler(Constant(initial_lr=0.1), "judge"))

    def test_two_schedules_of_one_optimizer_are_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="rates of one optimizer"):
            make(*(LRScheduler(Constant(initial_lr=0.1), "actor") for _ in range(2)))

    def test_scheduled_accumulation_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="accumulate a fixed number"):
            make(accumulate=Accumulate(schedule={0: 1, 4: 2}))
