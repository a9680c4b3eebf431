"""The range test finds what can be computed by hand, and the run behind it is to the bit the run without it."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Sampler

from engine import Accumulate, Engine, EventBus, Events, SupervisedStrategy
from engine.errors import RecordingError
from engine.recording import diff
from engine.recording.replay import Replay
from engine.schedules import Exponential
from handlers import EMA, Checkpointer, CSVLogger, EarlyStopping, EventRecorder, LRFinder, LRScheduler
from pulsetrain import Loop, Trainer, TrainingConfig
from tests.pulsetrain.small import loader, pairs, regression_model, trainer

SWEEP = {"start_lr": 1e-5, "end_lr": 1.0, "iterations": 20}


class Habits(nn.Module):
    """Has everything that a step may change in a module: buffers, plain attributes, a list, a tensor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = regression_model(dropout=0.3)
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.calls, self.sizes, self.last = 0, [1], torch.zeros(4, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        self.sizes.append(len(inputs))
        self.seen.add_(1)
        outputs = self.layers(inputs) * (1 + 0.01 * random.random()) + 0.01 * float(np.random.rand())
        self.last = outputs.detach()
        return outputs


class Drawing(SupervisedStrategy):
    """Holds progress."""

    def __init__(self) -> None:
        super().__init__("mse")
        self.batches = 0

    def compute_loss(self, outputs: Tensor, batch: Any) -> Tensor:
        self.batches += 1
        return super().compute_loss(outputs, batch) * (1 + 1e-3 * self.batches)


class Stateful:
    """No loader of torch's: where it stands is its own."""

    def __init__(self) -> None:
        self.position = 0
        self.order = list(range(10))

    def __iter__(self) -> Iterator[Any]:
        random.shuffle(self.order)
        for index in self.order:
            self.position += 1
            rows = pairs()[4 * index : 4 * index + 4]
            yield rows[0] + 1e-3 * self.position, rows[1]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for index in range(40):
            inputs, targets = pairs()[index]
            yield inputs + 0.01 * torch.randn(4), targets


class Alternating(Sampler[int]):
    """Another order each time, by a state of its own."""

    def __init__(self) -> None:
        self.times = 0

    def __iter__(self) -> Iterator[int]:
        self.times += 1
        yield from np.random.default_rng(self.times).permutation(40).tolist()

    def __len__(self) -> int:
        return 40


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled": loader,
    "shorter than the sweep": lambda: loader(rows=8),
    "workers": lambda: loader(num_workers=1, persistent_workers=True),
    "a sampler with a state": lambda: DataLoader(pairs(), batch_size=4, sampler=Alternating()),
    "a stream": lambda: DataLoader(Stream(), batch_size=4),
    "of its own": Stateful,
    "a list": lambda: list(loader(shuffle=False)),
    "a generator of its own": lambda: loader(generator=torch.Generator().manual_seed(5)),
}
RUNS: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer": "adamw"},
    "momentum": {"optimizer": "sgd", "optimizer_options": {"momentum": 0.9}, "schedule": "cosine", "warmup_steps": 3},
    "accumulated and clipped": {"accumulate": 3, "clip_grad_norm": 0.5, "clip_grad_value": 0.1},
    "fp16": {"precision": "fp16", "optimizer": "adam"},
}


def make(folder: Path, settings: dict[str, Any] | None = None, data: Any = None) -> Trainer:
    torch.manual_seed(3)
    return trainer(
        {"max_epochs": 2, "device": "cpu", **(settings or {})},
        model=Habits(),
        strategy=Drawing(),
        train_loader=loader() if data is None else data,
        val_loader=loader(8),
        handlers=[
            EventRecorder(folder),
            Checkpointer(folder, metric="val/loss"),
            CSVLogger(folder),
            EMA(),
            EarlyStopping(patience=9),
        ],
    )


def all_of(run: Trainer) -> Any:
    """Everything that the run holds, tensors as lists."""
    model = run.model
    own = {name: model.__dict__[name] for name in ("calls", "sizes", "last")}
    return plain(
        [run.checkpoint_state(), own, model.seen, run.state.metrics, run.learning_rates, run.bus.sequence.last]
    )


def plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, dict):
        # a checkpoint's path and the environment are those of another folder and moment
        return {key: plain(item) for key, item in value.items() if key not in ("environment", "handler_settings")}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def finished(run: Trainer) -> Any:
    run.train()
    run.handlers[0].detach()
    return all_of(run)


def assert_same_runs(tmp_path: Path, make_one: Callable[[Path], Trainer], sweep: Callable[[Trainer], Any]) -> None:
    plain_run, swept = make_one(tmp_path / "a"), make_one(tmp_path / "b")
    expected = finished(plain_run)
    before = all_of(swept)
    sweep(swept)
    assert all_of(swept) == before
    assert not (tmp_path / "b" / "metrics.csv").exists()
    assert without_files(finished(swept)) == without_files(expected)
    assert not diff(tmp_path / "a", tmp_path / "b")


def without_files(state: Any) -> Any:
    """What the log holds is compared by `diff`; the states of those that write files name bytes, paths and times."""
    state = copy.deepcopy(state)
    for name in ("EventRecorder", "CSVLogger", "Checkpointer(val/loss)"):
        state[0]["handlers"].pop(name, None)
    return state


@pytest.mark.parametrize("settings", RUNS.values(), ids=list(RUNS))
def test_the_run_behind_a_sweep_is_the_run_without_one(tmp_path: Path, settings: dict[str, Any]):
    assert_same_runs(tmp_path, lambda folder: make(folder, settings), LRFinder(**SWEEP).run)


@pytest.mark.parametrize("data", LOADERS.values(), ids=list(LOADERS))
def test_no_batch_is_missing_behind_a_sweep(tmp_path: Path, data: Callable[[], Any]):
    assert_same_runs(tmp_path, lambda folder: make(folder, data=data()), LRFinder(**SWEEP).run)


def test_a_sweep_in_mid_run_with_gradients_waiting_changes_nothing(tmp_path: Path):
    def half_way(folder: Path) -> Trainer:
        run = make(folder, {"accumulate": 3, "optimizer": "adamw"})
        if folder.name == "b":
            run.add_event_handler(Events.ITERATION_COMPLETED(once=[7, 20]), lambda: LRFinder(**SWEEP).run(run))
        return run

    assert_same_runs(tmp_path, half_way, lambda run: None)


def test_an_attached_finder_sweeps_once_before_the_first_batch_and_changes_nothing(tmp_path: Path):
    finder = LRFinder(**SWEEP, folder=tmp_path / "found")

    def attached(folder: Path) -> Trainer:
        run = make(folder)
        if folder.name == "b":
            finder.attach(run)
        return run

    assert_same_runs(tmp_path, attached, lambda run: None)
    assert finder.result is not None
    assert finder.result == LRFinder(**SWEEP).run(make(tmp_path / "c"))
    assert sorted(path.name for path in (tmp_path / "found" / "plots").iterdir()) == ["lr_finder.png", "lr_finder.svg"]


def test_an_attached_finder_logs_what_it_has_found():
    told = []
    for start in (1e-4, 1e5):
        run = parabola()
        finder = LRFinder(start_lr=start, end_lr=1e6).attach(run)
        with structlog.testing.capture_logs() as logs:
            run.train()
        told += logs
    first, second = told
    assert first["event"] == "LRFinder suggests a learning rate"
    assert first["configured"] == 0.001
    assert 0.01 < first["suggestion"] < 1
    assert (second["event"], second["reason"]) == ("LRFinder suggests no learning rate", finder.result.reason)


def test_a_resumed_run_is_not_swept(tmp_path: Path):
    make(tmp_path).train()
    again = make(tmp_path, {"max_epochs": 3})
    finder = LRFinder(**SWEEP).attach(again)
    again.train(resume="latest")
    assert finder.result is None


def test_nobody_hears_of_the_sweep(tmp_path: Path):
    run, heard = make(tmp_path), []
    for event in Events:
        run.bus.subscribe(event, lambda engine, event: heard.append(event.type))
    LRFinder(**SWEEP).run(run)
    assert heard == []


def test_a_sweep_that_fails_puts_everything_back_as_well(tmp_path: Path):
    class Fails(Stateful):
        def __iter__(self) -> Iterator[Any]:
            for number, batch in enumerate(super().__iter__()):
                if number == 6:
                    raise OSError("the disk is gone")
                yield batch

    run = make(tmp_path, {"accumulate": 2}, data=Fails())
    before = all_of(run)
    with pytest.raises(OSError, match="the disk is gone"):
        LRFinder(**SWEEP).run(run)
    assert all_of(run) == before


def test_tensors_stay_the_same_objects(tmp_path: Path):
    run = make(tmp_path, {"optimizer": "adamw"})
    run.train()
    held = [*run.model.parameters(), *run.model.buffers(), *(s["exp_avg"] for s in run.optimizer.state.values())]
    LRFinder(**SWEEP).run(run)
    now = [*run.model.parameters(), *run.model.buffers(), *(s["exp_avg"] for s in run.optimizer.state.values())]
    assert all(one is other for one, other in zip(held, now, strict=True))


# ---------------------------------------------------------------------------------------------------- what it finds


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
def test_its_updates_are_the_trainers(settings: dict[str, Any]):
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


def test_the_losses_are_those_of_the_recurrence():
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
def test_the_suggestion_scales_with_the_problem_and_lies_where_steps_converge(curvature: float):
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


def test_the_host_looks_at_the_losses_every_few_updates(monkeypatch: pytest.MonkeyPatch):
    looks: list[int] = []

    def counting(tensors: Any) -> list[float]:
        looks.append(len(tensors))
        return [tensor.item() for tensor in tensors]

    monkeypatch.setattr("handlers.lr_finder.to_host", counting)
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
        (lambda n: 1000.0 - n**3 / 100, "falls fastest at the very last rates; go on to a larger end_lr", 30),
    ],
)
def test_where_there_is_no_suggestion_it_says_why(losses: Callable[[int], float], reason: str, entries: int):
    found = LRFinder(iterations=30, smoothing=0.5, diverge=1e9).run(trainer({"device": "cpu"}, strategy=Broken(losses)))
    assert found.suggestion is None
    assert reason in found.reason
    assert len(found.rates) == len(found.losses) == len(found.smoothed) == entries


def test_groups_keep_their_ratios_and_rates_that_are_tensors_their_place():
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


def test_another_loader_may_be_given():
    run = trainer({"device": "cpu"}, train_loader=iter(loader()))
    with pytest.raises(ValueError, match=r"train_loader=\w+: it can be read once, .*; pass loader="):
        LRFinder(**SWEEP).run(run)
    assert len(LRFinder(**SWEEP).run(run, loader=loader()).rates) > 10
    assert len(list(run.train_loader)) == 10


def test_a_loader_that_cannot_be_copied_is_refused(tmp_path: Path):
    class Reading:
        def __init__(self) -> None:
            self.file = (tmp_path / "data").open("w")

        def __iter__(self) -> Iterator[Any]:
            return iter(loader())

    data = Reading()
    with pytest.raises(ValueError, match=r"train_loader=Reading: it cannot be copied .*; pass loader="):
        LRFinder(**SWEEP).run(trainer({"device": "cpu"}, train_loader=data))
    data.file.close()


def test_data_without_a_batch_is_refused():
    with pytest.raises(ValueError, match="train_loader=list: gives no batch"):
        LRFinder(**SWEEP).run(trainer({"device": "cpu"}), loader=[])


def test_what_is_no_trainer_is_refused(tmp_path: Path):
    with pytest.raises(TypeError, match=r"LRFinder\(Engine\): needs a pulsetrain.Trainer; this has no model, strategy"):
        LRFinder().run(Engine(lambda engine, batch: None))
    with pytest.raises(TypeError, match="LRFinder"):
        LRFinder().attach(EventBus())
    loop = Loop(regression_model(), loader())
    with pytest.raises(ValueError, match="the step of Loop is the loop's body"):
        LRFinder().run(loop)
    make(tmp_path).train()
    replay = Replay(tmp_path)
    with pytest.raises(RecordingError):
        LRFinder().attach(replay)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"start_lr": 0.0}, r"LRFinder\(start_lr=0.0\): needs a positive number"),
        ({"start_lr": "1e-3"}, r"LRFinder\(start_lr='1e-3'\): needs"),
        ({"end_lr": math.inf}, r"LRFinder\(end_lr=inf\): needs"),
        ({"start_lr": 1.0, "end_lr": 1.0}, r"LRFinder\(start_lr=1.0, end_lr=1.0\): has to begin below its end"),
        ({"iterations": 19}, r"LRFinder\(iterations=19\): needs a whole number of at least 20"),
        ({"iterations": 50.0}, r"LRFinder\(iterations=50.0\): needs"),
        ({"smoothing": 1.0}, r"LRFinder\(smoothing=1.0\): needs a number from 0 to below 1"),
        ({"diverge": 1.0}, r"LRFinder\(diverge=1.0\): needs a number above 1"),
    ],
)
def test_wrong_arguments_are_refused_when_constructing(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        LRFinder(**arguments)


@pytest.mark.parametrize("smoothing", [0.98, 0.5])
def test_the_suggestion_lies_in_the_fall_whatever_the_batches_draw(smoothing: float):
    finder, generator = LRFinder(smoothing=smoothing), np.random.default_rng(0)
    updates = np.arange(100)
    curve = 2.0 - 0.6 / (1 + np.exp((60 - updates) / 5)) + np.where(updates > 85, (updates - 85.0) ** 2 * 0.05, 0.0)
    noise = generator.standard_normal((200, 100))
    quiet = [finder._judge(list(curve + 0.03 * each)).suggestion for each in noise]
    noisy = [finder._judge(list(curve + 0.3 * each)).suggestion for each in noise]  # half of what there is to find
    nothing = [finder._judge(list(2.0 + 0.3 * each)).suggestion for each in noise]
    assert finder.rate(55) < min(quiet) <= max(quiet) < finder.rate(65)
    found = sorted(rate for rate in noisy if rate is not None)
    assert len(found) > 180
    assert finder.rate(50) < found[len(found) // 4] < found[3 * len(found) // 4] < finder.rate(70)
    assert sum(rate is not None for rate in nothing) < 20
