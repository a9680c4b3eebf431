"""The run after a range test is bit for bit the run without it."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Sampler

from pulsetrain import Trainer
from pulsetrain.engine import Events, SupervisedStrategy
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.recording import diff
from pulsetrain.handlers import EMA, Checkpointer, CSVLogger, EarlyStopping, EventRecorder, LRFinder
from tests.support.models import loader, pairs, regression_model, trainer

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
    """Not a DataLoader: it keeps its own position."""

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


@pytest.mark.slow
@pytest.mark.parametrize("settings", RUNS.values(), ids=list(RUNS))
def test_the_run_after_a_sweep_is_the_run_without_one(tmp_path: Path, settings: dict[str, Any]):
    assert_same_runs(tmp_path, lambda folder: make(folder, settings), LRFinder(**SWEEP).run)


@pytest.mark.slow
@pytest.mark.parametrize("data", LOADERS.values(), ids=list(LOADERS))
def test_no_batch_is_missing_after_a_sweep(tmp_path: Path, data: Callable[[], Any]):
    assert_same_runs(tmp_path, lambda folder: make(folder, data=data()), LRFinder(**SWEEP).run)


def test_a_sweep_in_mid_run_keeps_accumulated_gradients(tmp_path: Path):
    def half_way(folder: Path) -> Trainer:
        run = make(folder, {"accumulate": 3, "optimizer": "adamw"})
        if folder.name == "b":
            run.add_event_handler(Events.ITERATION_COMPLETED(once=[7, 20]), lambda: LRFinder(**SWEEP).run(run))
        return run

    assert_same_runs(tmp_path, half_way, lambda run: None)


@pytest.mark.slow
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


def test_a_resumed_run_is_not_swept(tmp_path: Path):
    make(tmp_path).train()
    again = make(tmp_path, {"max_epochs": 3})
    finder = LRFinder(**SWEEP).attach(again)
    again.train(resume="latest")
    assert finder.result is None


def test_no_receiver_sees_the_sweep(tmp_path: Path):
    run, received = make(tmp_path), []
    for event in Events:
        run.bus.subscribe(event, lambda engine, event: received.append(event.type))
    LRFinder(**SWEEP).run(run)
    assert received == []


def test_a_failed_sweep_restores_everything(tmp_path: Path):
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


def test_rollouts_are_not_swept():
    run = trainer({"seed": 1})
    run.train_loader.fires_rollouts = True  # as a loader says whose batches the policy makes
    with pytest.raises(ConfigurationError, match=r"LRFinder: the policy makes the batches itself.*compare the returns"):
        LRFinder().run(run)
