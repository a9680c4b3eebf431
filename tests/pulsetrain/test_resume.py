"""A run cut off anywhere and gone on with ends with the weights of the run that was never cut, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from ignite.metrics import Average
from torch import nn

from engine import CheckpointError, ConfigurationError, Events, Every, Preempted, SupervisedStrategy
from engine.checkpoint import CheckpointManager, load_checkpoint
from handlers import EMA, Checkpointer, EarlyStopping
from pulsetrain import Trainer
from tests.pulsetrain.small import loader, regression_model, trainer

CONFIG = {
    "max_epochs": 4,
    "optimizer": "adamw",
    "accumulate": 3,
    "clip_grad_norm": 1.0,
    "schedule": "cosine",
    "warmup_steps": 3,
    "seed": 7,
}


class PlugPulled(Exception):  # noqa: N818
    """The plug is pulled."""


def make(folder: Path, *, every: Every | None = None, config: dict[str, Any] | None = None) -> Trainer:
    return trainer(
        {**CONFIG, **(config or {})},
        model=regression_model(dropout=0.3),
        train_loader=loader(),
        val_loader=loader(12, shuffle=False),
        handlers=[
            Checkpointer(folder, every=every or Every(iterations=1), metric="val/loss", keep_last=100, at_end=False),
            EarlyStopping(patience=50),
        ],
    )


def weights(run: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in run.model.state_dict().items()}


def cut_after(run: Trainer, iteration: int) -> None:
    @run.on(Events.ITERATION_COMPLETED, phase=3)
    def pull(engine: Trainer) -> None:
        if engine.state.iteration == iteration:
            raise PlugPulled

    with pytest.raises(PlugPulled):
        run.train()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    run = make(tmp_path_factory.mktemp("whole"))
    run.train()
    return run


# an epoch has 10 batches, an update 3: first, inside an update, at an update, at an epoch's last batch, in later epochs
@pytest.mark.parametrize("iteration", [1, 5, 6, 10, 11, 20, 25, 39])
def test_a_resumed_run_equals_the_uninterrupted_one(iteration: int, uninterrupted: Trainer, tmp_path: Path):
    cut_after(make(tmp_path), iteration)
    torch.manual_seed(999)  # another process
    again = make(tmp_path)
    history = again.train(resume="latest")
    expected = weights(uninterrupted)
    assert all(torch.equal(expected[name], value) for name, value in weights(again).items())
    assert history == uninterrupted.history
    assert again.state.update == uninterrupted.state.update
    assert again.handlers[1].state_dict() == uninterrupted.handlers[1].state_dict()


def test_a_checkpoint_of_an_epochs_end_goes_on_with_the_next_epoch(uninterrupted: Trainer, tmp_path: Path):
    run = make(tmp_path, every=Every(epochs=1))
    run.add_event_handler(Events.EPOCH_STARTED(once=3), lambda engine: engine.terminate())
    run.train()
    again = make(tmp_path, every=Every(epochs=1))
    epochs: list[int] = []
    again.add_event_handler(Events.EPOCH_COMPLETED, lambda engine: epochs.append(engine.state.epoch))
    again.train(resume="latest")
    assert epochs == [3, 4]
    assert all(torch.equal(weights(uninterrupted)[name], value) for name, value in weights(again).items())


def test_a_preempted_run_saves_and_goes_on(uninterrupted: Trainer, tmp_path: Path):
    run = trainer(
        CONFIG,
        model=regression_model(dropout=0.3),
        val_loader=loader(12, shuffle=False),
        handlers=[Checkpointer(tmp_path, every=Every(epochs=9)), EarlyStopping(patience=50)],
    )
    run.add_event_handler(
        Events.ITERATION_COMPLETED(once=17), lambda engine: engine.post(Events.PREEMPTED, Preempted(signal="SIGTERM"))
    )
    run.train()
    assert run.state.stop_reason == "SIGTERM was received"
    assert run.state.iteration == 17
    again = make(tmp_path)
    again.train(resume="latest")
    assert all(torch.equal(weights(uninterrupted)[name], value) for name, value in weights(again).items())


def test_a_termination_between_a_batch_and_its_step_does_not_count_the_batch(uninterrupted: Trainer, tmp_path: Path):
    run = make(tmp_path, every=Every(epochs=9))
    run.handlers[0].detach()
    run.handlers[0].at_end = True
    run.handlers[0].attach(run)
    run.add_event_handler(Events.ITERATION_STARTED(once=17), lambda engine: engine.terminate())
    run.train()
    again = make(tmp_path)
    again.train(resume="latest")
    assert all(torch.equal(weights(uninterrupted)[name], value) for name, value in weights(again).items())


def test_resuming_a_finished_run_trains_nothing_more(tmp_path: Path):
    run = make(tmp_path)
    history = run.train()
    again = make(tmp_path)
    steps: list[int] = []
    again.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: steps.append(1))
    assert again.train(resume="latest") == history
    assert steps == []


def test_a_finished_run_goes_on_to_a_larger_bound(tmp_path: Path):
    make(tmp_path, config={"schedule": None, "warmup_steps": 0}).train()
    again = make(tmp_path, config={"schedule": None, "warmup_steps": 0, "max_epochs": 6})
    again.train(resume="latest")
    assert (again.state.epoch, again.state.iteration) == (6, 60)


def test_resume_latest_starts_where_there_is_no_checkpoint_yet(tmp_path: Path):
    run = make(tmp_path, config={"max_epochs": 2})
    run.train(resume="latest")
    assert run.state.iteration == 20


def test_resume_takes_a_path(uninterrupted: Trainer, tmp_path: Path):
    cut_after(make(tmp_path), 12)
    path = sorted((tmp_path / "checkpoints").glob("000000004-*"))[0]
    again = make(tmp_path / "elsewhere")
    loaded: list[Any] = []

    @again.on(Events.CHECKPOINT_LOADED)
    def keep(engine: Trainer, event: Any) -> None:
        loaded.append(event.payload)

    again.train(resume=path)
    assert [(entry.path, entry.iteration) for entry in loaded] == [(path, 4)]
    assert all(torch.equal(weights(uninterrupted)[name], value) for name, value in weights(again).items())


def test_the_newest_damaged_checkpoint_is_passed_over(uninterrupted: Trainer, tmp_path: Path):
    cut_after(make(tmp_path), 12)
    newest = sorted((tmp_path / "checkpoints").glob("0*"))[-1] / "state.pt"
    newest.write_bytes(newest.read_bytes()[:-100])
    again = make(tmp_path)
    again.train(resume="latest")
    assert all(torch.equal(weights(uninterrupted)[name], value) for name, value in weights(again).items())


def test_weights_that_do_not_fit_are_listed_by_name(tmp_path: Path):
    run = trainer({}, handlers=[Checkpointer(tmp_path)])
    run.train()
    path = CheckpointManager(tmp_path / "checkpoints").get_latest()
    other = trainer({}, model=nn.Sequential(nn.Linear(4, 9), nn.BatchNorm1d(9)))
    with pytest.raises(CheckpointError) as caught:
        other.load_checkpoint(path)
    assert "shape: 0.weight is (8, 4) in the checkpoint, (9, 4) in the model" in str(caught.value)
    assert "unexpected: 4.weight (1, 8)" in str(caught.value)


def test_a_changed_schedule_is_refused(tmp_path: Path):
    make(tmp_path).train()
    with pytest.raises(CheckpointError, match="total_steps"):
        make(tmp_path, config={"max_epochs": 9}).train(resume="latest")


def test_saving_by_hand_needs_one_checkpointer(tmp_path: Path):
    with pytest.raises(ConfigurationError, match="exactly one Checkpointer"):
        trainer().save_checkpoint("mine")
    run = trainer(handlers=[Checkpointer(tmp_path)])
    run.train()
    path = run.save_checkpoint("mine", is_best=True)
    assert path.name == "000000010-mine"
    assert CheckpointManager(tmp_path / "checkpoints").get_best() == path


def test_a_missing_checkpoint_says_what_is_there(tmp_path: Path):
    run = trainer(handlers=[Checkpointer(tmp_path)])
    with pytest.raises(CheckpointError, match="no checkpoint there"):
        run.train(resume=tmp_path / "checkpoints" / "000000123-x")
    with pytest.raises(CheckpointError, match="no checkpoint there"):
        run.load_checkpoint(tmp_path / "nowhere" / "000000123-x")


def test_ignites_state_dict_stays_three_keys():
    assert set(trainer().state_dict()) == {"epoch_length", "iteration", "max_epochs"}


def told(logs: list[Any], start: str) -> list[Any]:
    return [entry["differences"] for entry in logs if entry["event"].startswith(start)]


STEADY = {"schedule": "constant", "warmup_steps": 0}  # fits a run of any length


def test_another_environment_than_the_checkpoints_is_told_of(tmp_path: Path):
    make(tmp_path, config={**STEADY, "max_epochs": 1}).train()
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        run = make(tmp_path, config={**STEADY, "max_epochs": 2})
        with structlog.testing.capture_logs() as logs:
            run.train(resume="latest")
    finally:
        torch.set_num_threads(threads)
    assert told(logs, "the environment differs") == [[f"threads: {threads} -> {threads + 1}"]]
    assert run.environment_changes == [f"threads: {threads} -> {threads + 1}"]


def test_other_settings_than_the_checkpoints_are_told_of_but_for_a_longer_run(tmp_path: Path):
    make(tmp_path, config={**STEADY, "max_epochs": 1}).train()
    with structlog.testing.capture_logs() as logs:
        make(tmp_path, config={**STEADY, "max_epochs": 2}).train(resume="latest")
    assert not told(logs, "the run goes on under other settings")
    assert not told(logs, "the environment differs")
    with structlog.testing.capture_logs() as logs:
        make(tmp_path, config={**STEADY, "max_epochs": 3, "clip_grad_norm": 2.0}).train(resume="latest")
    assert told(logs, "the run goes on under other settings") == [["clip_grad_norm: 1.0 -> 2.0"]]


class Counting:
    """Listens by its own methods and holds progress, in nobody's list of handlers."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def note(self, engine: Trainer) -> None:
        self.losses.append(engine.state.output.loss.item())

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self.losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = list(state["losses"])


@pytest.mark.parametrize("iteration", [3, 10, 14])
def test_what_listens_to_the_trainer_by_its_own_methods_goes_on_too(iteration: int, tmp_path: Path):
    def listening(folder: str) -> tuple[Trainer, Counting, list[float]]:
        run = make(tmp_path / folder, config={"schedule": None, "warmup_steps": 0, "max_epochs": 2})
        counting, averages = Counting(), []
        run.add_event_handler(Events.ITERATION_COMPLETED, counting.note)
        Average(output_transform=lambda output: output["loss"].item()).attach(run, "average")
        run.add_event_handler(Events.EPOCH_COMPLETED, lambda e: averages.append(e.state.metrics["average"]), phase=2)
        scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, step_size=2, gamma=0.5)
        run.add_event_handler(Events.OPTIMIZER_STEP_COMPLETED, scheduler.step)
        return run, counting, averages

    whole, everything, expected = listening("whole")
    whole.train()
    cut, _, before = listening("cut")
    cut_after(cut, iteration)
    again, counting, after = listening("cut")
    again.train(resume="latest")
    assert counting.losses == everything.losses
    assert before + after == expected
    assert again.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"]
    assert all(torch.equal(weights(whole)[name], value) for name, value in weights(again).items())


# ------------------------------------------------------------------------------------- a strategy's state


class Warming(SupervisedStrategy):
    """Its loss depends on how many batches it has seen."""

    def __init__(self) -> None:
        super().__init__("mse")
        self.seen = 0

    def compute_loss(self, outputs: Any, batch: Any) -> torch.Tensor:
        self.seen += 1
        return super().compute_loss(outputs, batch) * (1 + 0.1 * self.seen)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["seen"] < 0:
            raise ValueError(f"Warming: seen={state['seen']}")
        self.seen = state["seen"]


class WarmingModule(nn.Module):
    """The same, in a buffer that is loaded in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = SupervisedStrategy("mse")
        self.register_buffer("seen", torch.zeros(()))
        self.prepare_batch, self.compute_metrics = self.inner.prepare_batch, self.inner.compute_metrics

    def compute_loss(self, outputs: Any, batch: Any) -> torch.Tensor:
        self.seen += 1
        return self.inner.compute_loss(outputs, batch) * (1 + 0.1 * self.seen)


def with_strategy(folder: Path, strategy: Any, *handlers: Any) -> Trainer:
    checkpointer = Checkpointer(folder, every=Every(iterations=1), keep_last=100, at_end=False)
    return trainer({"max_epochs": 2, "seed": 7}, strategy=strategy, handlers=[checkpointer, *handlers])


@pytest.mark.parametrize("kind", [Warming, WarmingModule])
def test_a_strategys_state_goes_on(kind: Any, tmp_path: Path):
    whole = with_strategy(tmp_path / "whole", kind())
    whole.train()
    cut_after(with_strategy(tmp_path / "cut", kind()), 13)
    again = with_strategy(tmp_path / "cut", kind())
    again.train(resume="latest")
    assert again.strategy.seen == whole.strategy.seen == 20
    assert all(torch.equal(weights(whole)[name], value) for name, value in weights(again).items())


def test_a_strategy_that_cannot_take_the_saved_state_is_refused_before_anything_is_loaded(tmp_path: Path):
    with_strategy(tmp_path, Warming()).train()
    other = with_strategy(tmp_path, SupervisedStrategy("mse"))
    before = weights(other)
    with pytest.raises(
        CheckpointError, match=r"SupervisedStrategy has no state_dict\(\) and load_state_dict\(\); resume"
    ):
        other.train(resume="latest")
    assert all(torch.equal(before[name], value) for name, value in weights(other).items())
    assert other.state.iteration == 0


def test_a_strategy_without_a_saved_state_begins_anew_and_says_so(tmp_path: Path):
    with_strategy(tmp_path, SupervisedStrategy("mse")).train()
    with structlog.testing.capture_logs() as logs:
        with_strategy(tmp_path, Warming()).train(resume="latest")
    assert [line["strategy"] for line in logs if line["event"] == "the strategy begins anew"] == ["Warming"]


def altered(folder: Path, **parts: Any) -> Path:
    """A checkpoint in which parts are others."""
    manager = CheckpointManager(folder / "checkpoints")
    state = load_checkpoint(manager.get_latest())
    return manager.save({**state, **parts}, "altered", step=99)


class Averaging:
    """Loads its state in place."""

    def __init__(self) -> None:
        self.values = torch.zeros(2)

    def attach(self, engine: Any) -> None:
        engine.add_event_handler(Events.ITERATION_COMPLETED, self.add)

    def add(self, engine: Any) -> None:
        self.values += 1

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values.copy_(state["values"])


class Refusing(Averaging):
    """Takes no negative sum."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if state["values"][0] < 0:
            raise CheckpointError("does not fit")


@pytest.mark.parametrize("strategy", [Warming, WarmingModule])
def test_where_a_handler_refuses_its_state_all_others_are_as_they_were(strategy: Any, tmp_path: Path):
    run = with_strategy(tmp_path, strategy(), Averaging(), EMA(decay=0.9), Refusing())
    run.train()
    saved = load_checkpoint(CheckpointManager(tmp_path / "checkpoints").get_latest())
    path = altered(tmp_path, handlers={**saved["handlers"], "Refusing": {"values": torch.full((2,), -1.0)}})
    other = with_strategy(tmp_path / "other", strategy(), Averaging(), EMA(decay=0.9), Refusing())
    before = weights(other)
    ema = {name: value.clone() for name, value in other.handlers[2].state_dict()["average"]["weights"].items()}
    with pytest.raises(CheckpointError, match="does not fit"):
        other.load_checkpoint(path)
    assert other.strategy.seen == 0
    assert [handler.values.tolist() for handler in other.handlers[1::2]] == [[0, 0], [0, 0]]
    assert other.handlers[2].number_averaged == 0
    after = other.handlers[2].state_dict()["average"]["weights"]
    assert all(torch.equal(ema[name], value) for name, value in after.items())
    assert all(torch.equal(before[name], value) for name, value in weights(other).items())
    other.load_checkpoint(altered(tmp_path, handlers=saved["handlers"]))
    assert (other.strategy.seen, other.handlers[1].values.tolist()) == (20, [20, 20])
    assert other.handlers[2].number_averaged == 20


@pytest.mark.parametrize("part", ["counters", "position"])
def test_a_state_with_a_piece_missing_inside_is_refused_before_anything_is_loaded(part: str, tmp_path: Path):
    make(tmp_path).train()
    run = make(tmp_path)
    before = weights(run)
    with pytest.raises(CheckpointError, match=f"the checkpoint's state lacks .*{part}.epoch"):
        run.load_checkpoint(altered(tmp_path, **{part: {}}))
    assert all(torch.equal(before[name], value) for name, value in weights(run).items())


# ------------------------------------------------------------------------------------ generators of devices


def test_generators_of_devices_that_are_not_seen_are_told_of_and_the_run_goes_on(tmp_path: Path):
    cut_after(make(tmp_path), 12)
    state = load_checkpoint(CheckpointManager(tmp_path / "checkpoints").get_latest())
    count = torch.cuda.device_count() + 2
    states = [torch.get_rng_state() if count == 2 else torch.cuda.get_rng_state()] * count
    run = make(tmp_path)
    with structlog.testing.capture_logs() as logs:
        run.train(resume=altered(tmp_path, rng={**state["rng"], "cuda": states}))
    assert [line["devices"] for line in logs if "sees fewer devices" in line["event"]] == [
        [f"cuda: {count} -> {count - 2}"]
    ]
    assert run.state.epoch == 4


def test_a_state_without_a_generator_is_refused_before_anything_is_loaded(tmp_path: Path):
    make(tmp_path).train()
    run = make(tmp_path)
    before = weights(run)
    with pytest.raises(CheckpointError, match="lacks python, numpy, torch, cuda"):
        run.load_checkpoint(altered(tmp_path, rng={}))
    assert all(torch.equal(before[name], value) for name, value in weights(run).items())


# ---------------------------------------------------------------------------- several handlers of one class


class Adding:
    """Adds its step up; two of them differ by their settings."""

    def __init__(self, step: Any, name: str | None = None) -> None:
        self.step, self.total = step, 0
        if name is not None:
            self.name = name

    def attach(self, engine: Any) -> None:
        engine.add_event_handler(Events.ITERATION_COMPLETED, self.add)

    def add(self, engine: Any) -> None:
        self.total += int(self.step)

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total = state["total"]


def told_on_resume(folder: Path, *handlers: Any, epochs: int) -> list[tuple[str, Any]]:
    run = trainer({"max_epochs": epochs, "seed": 7}, handlers=[Checkpointer(folder), *handlers])
    with structlog.testing.capture_logs() as logs:
        run.train(resume="latest")
    found = [
        (line["event"], line.get("handler", line.get("handlers"))) for line in logs if line["log_level"] == "warning"
    ]
    return [("by order", names) if "only their order tells" in event else (event, names) for event, names in found]


GONE = "saved state of a handler that is not here any more"


def test_two_of_a_class_in_another_order_get_their_own_states(tmp_path: Path):
    told_on_resume(tmp_path, Adding(1), Adding(100), epochs=1)
    one, hundred = Adding(1), Adding(100)
    assert told_on_resume(tmp_path, hundred, one, epochs=2) == []
    assert (one.total, hundred.total) == (20, 2000)


def test_where_the_first_of_two_is_gone_the_other_keeps_its_state(tmp_path: Path):
    told_on_resume(tmp_path, Adding(1), Adding(100), epochs=1)
    hundred = Adding(100)
    assert told_on_resume(tmp_path, hundred, epochs=2) == [(GONE, "Adding")]
    assert hundred.total == 2000


def test_where_one_is_added_before_it_the_other_keeps_its_state(tmp_path: Path):
    told_on_resume(tmp_path, Adding(100), epochs=1)
    one, hundred = Adding(1), Adding(100)
    assert told_on_resume(tmp_path, one, hundred, epochs=2) == [("handler begins anew", "Adding")]
    assert (one.total, hundred.total) == (10, 2000)


def test_one_of_a_class_keeps_its_state_under_other_settings(tmp_path: Path):
    told_on_resume(tmp_path, Adding(1), epochs=1)
    other = Adding(100)
    assert told_on_resume(tmp_path, other, epochs=2) == []
    assert other.total == 1010


def test_what_only_the_order_tells_apart_is_told_of(tmp_path: Path):
    class Number:  # no plain setting
        def __init__(self, value: int) -> None:
            self.value = value

        def __int__(self) -> int:
            return self.value

    told_on_resume(tmp_path / "alike", Adding(Number(1)), Adding(Number(100)), epochs=1)
    told = told_on_resume(tmp_path / "alike", Adding(Number(1)), Adding(Number(100)), epochs=2)
    assert told == [("by order", ["Adding", "Adding_2"])]

    told_on_resume(tmp_path / "changed", Adding(1), Adding(100), epochs=1)
    assert told_on_resume(tmp_path / "changed", Adding(1), Adding(50), epochs=2) == [("by order", ["Adding_2"])]

    told_on_resume(tmp_path / "named", Adding(Number(1), "a"), Adding(Number(100), "b"), epochs=1)
    a, b = Adding(Number(1), "a"), Adding(Number(100), "b")
    assert told_on_resume(tmp_path / "named", b, a, epochs=2) == []
    assert (a.total, b.total) == (20, 2000)


def test_settings_that_change_as_the_run_goes_on_tell_apart_as_they_were_at_first(tmp_path: Path):
    """A torch scheduler's last_epoch is an argument of its constructor."""

    def scheduled(folder: Path, *sizes: int) -> tuple[Trainer, dict[int, Any]]:
        checkpointer = Checkpointer(folder, every=Every(iterations=1), at_end=False)
        run = trainer({"max_epochs": 2, "seed": 7}, handlers=[checkpointer])
        made = {size: torch.optim.lr_scheduler.StepLR(run.optimizer, size, gamma=0.9) for size in sizes}
        for scheduler in made.values():
            run.add_event_handler(Events.ITERATION_COMPLETED, scheduler.step)
        return run, made

    first, _ = scheduled(tmp_path, 3, 4)
    first.add_event_handler(Events.EPOCH_COMPLETED(once=1), lambda engine: engine.terminate())
    first.train()
    run, made = scheduled(tmp_path, 4, 3)
    with structlog.testing.capture_logs() as logs:
        run.train(resume="latest")
    assert not [line for line in logs if "only their order tells" in line["event"]]
    assert {size: (each.step_size, each.last_epoch) for size, each in made.items()} == {4: (4, 20), 3: (3, 20)}


def test_the_run_folder_may_be_another(tmp_path: Path):
    def run(folder: Path) -> Trainer:
        in_two_places = [Adding(folder), Adding(folder / "inside")]
        for each in in_two_places:
            each.add = lambda engine: None  # type: ignore[method-assign]
        return trainer({"max_epochs": 1, "seed": 7}, handlers=[Checkpointer(folder), *in_two_places])

    run(tmp_path / "a").train()
    other = run(tmp_path / "b")
    with structlog.testing.capture_logs() as logs:
        other.load_checkpoint(CheckpointManager(tmp_path / "a" / "checkpoints").get_latest())
    assert not [line for line in logs if line["log_level"] == "warning"]
