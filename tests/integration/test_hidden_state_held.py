"""State in what objects are and hold besides plain attributes: subclasses of containers, callable objects of classes,
classes and modules of a closure, backends, scripted modules, metrics of any type, and tensors of another dtype.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from pulsetrain import Checkpointer, Every, Loop, Trainer, TrainingConfig
from pulsetrain.engine import Engine, Events, SupervisedStrategy, TorchBackend
from tests.support.cases import Make
from tests.support.models import loader, pairs, regression_model
from tests.support.runs import cut_after
from tests.support.runs_hidden_state import (
    CUT,
    CasesOfHiddenState,
    check_that_what_has_changed_is_resumed_or_named,
    run,
    warned,
)

CASES = CasesOfHiddenState()
case = CASES.case

ROWS, BATCH = 20, 4


def slow_down(engine: Any, number: float) -> None:
    engine.optimizer.param_groups[0]["lr"] = 0.05 / (1 + number % 5)


class Named(dict[str, Any]):
    """A container with an attribute."""

    position = 0


class Ring(deque[float]):
    position = 0


class Scaling(nn.Module):
    def __init__(self, held: Any) -> None:
        super().__init__()
        self.inner, self.held = regression_model(), held

    def forward(self, inputs: Tensor) -> Tensor:
        self.held.position += self.training
        return self.inner(inputs) * (1 + self.held.position % 3)


@case("model.held")
def a_dict_of_the_model_has_an_attribute() -> dict[str, Any]:
    return {"model": Scaling(Named())}


@case("strategy._loss", slow=True)
def a_deque_of_the_loss_has_an_attribute() -> dict[str, Any]:
    ring = Ring()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        ring.position += 1
        return (outputs - targets).square().mean() * (1 + ring.position % 3)

    return {"strategy": SupervisedStrategy(loss)}


class Samples(list[Any]):
    level = 0

    def __getitem__(self, row: Any) -> Any:
        inputs, targets = super().__getitem__(row)
        return inputs * (1 + self.level), targets


@case("dataset.level")
def a_dataset_that_is_a_list_has_a_level() -> dict[str, Any]:
    samples = Samples(list(pairs(ROWS)))
    return {
        "train_loader": DataLoader(samples, BATCH, shuffle=True), "act": lambda: setattr(samples, "level", 1)
    }  # fmt: skip


class Jitter:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self, value: Tensor) -> Tensor:
        self.count += 1
        return value * (1 + self.count % 3)


class Jittered(Dataset[Any]):
    transform: ClassVar[Any] = Jitter()

    def __init__(self) -> None:
        self.pairs = pairs(ROWS)
        type(self).transform = Jitter()

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> Any:
        inputs, targets = self.pairs[row]
        return self.transform(inputs), targets


@case("dataset.transform")
def a_class_holds_an_object_that_is_called() -> dict[str, Any]:
    return {"train_loader": DataLoader(Jittered(), BATCH, shuffle=True)}


@case(f"handler {__name__}.a_class_of_a_closure_counts.<locals>.attach.<locals>.count.Progress.level")
def a_class_of_a_closure_counts() -> dict[str, Any]:
    class Progress:
        level = 0

    def attach(engine: Any) -> None:
        @engine.on(Events.ITERATION_STARTED)
        def count() -> None:
            Progress.level += 1
            slow_down(engine, Progress.level)

    return {"attached": attach}


@case(f"handler {__name__}.a_module_of_a_closure_counts.<locals>.attach.<locals>.count.module.level", slow=True)
def a_module_of_a_closure_counts() -> dict[str, Any]:
    module: Any = ModuleType("settings_that_a_function_imports")
    module.level = 0

    def attach(engine: Any) -> None:
        @engine.on(Events.ITERATION_STARTED)
        def count() -> None:
            module.level += 1
            slow_down(engine, module.level)

    return {"attached": attach}


class CountingBackend(TorchBackend):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def train_step(self, state: Any, *arguments: Any, **options: Any) -> Any:
        self.count += 1
        state.optimizer.param_groups[0]["lr"] = 0.05 / (1 + self.count % 3)
        return super().train_step(state, *arguments, **options)


@case("backend.count")
def a_backend_of_the_users_counts() -> dict[str, Any]:
    return {"backend": CountingBackend()}


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.count = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.count += 1
        outputs = self.linear(inputs)
        return outputs * (1 + self.count % 3)


@case("model.count", slow=True)
def a_scripted_module_counts() -> dict[str, Any]:
    return {"model": torch.jit.script(Scripted())}


class Replaced(nn.Module):
    factor = staticmethod(lambda: 1.0)

    def __init__(self) -> None:
        super().__init__()
        self.inner = regression_model()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs) * self.factor()


@case("model.factor", slow=True)
def a_static_method_is_replaced() -> dict[str, Any]:
    Replaced.factor = staticmethod(lambda: 1.0)
    return {"model": Replaced(), "act": lambda: setattr(Replaced, "factor", staticmethod(lambda: 2.0))}


@case()
def metrics_of_plain_values_are_used() -> dict[str, Any]:
    def attach(engine: Any) -> None:
        @engine.on(Events.ITERATION_STARTED)
        def count() -> None:
            metrics = engine.state.metrics
            metrics["rounds"] = metrics.get("rounds", 0) + 1
            metrics.setdefault("history", []).append(metrics["rounds"])
            assert type(metrics["rounds"]) is int
            slow_down(engine, len(metrics["history"]))

    return {"attached": attach}


class Level:
    def __init__(self) -> None:
        self.value = 0


@case("state.metrics['level']", slow=True)
def a_metric_is_an_object() -> dict[str, Any]:
    def attach(engine: Any) -> None:
        @engine.on(Events.ITERATION_STARTED)
        def count() -> None:
            level = engine.state.metrics.setdefault("level", Level())
            level.value += 1
            slow_down(engine, level.value)

    return {"attached": attach}


class Widening(nn.Module):
    """Keeps an average in float64 from its first batch on, although its buffer was made in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = regression_model()
        self.register_buffer("average", torch.zeros(()))
        self.average: Tensor

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.average = 0.9 * self.average.double() + 0.1 * inputs.double().mean()
        return self.inner(inputs) + (1e8 * (self.average - self.average.float().double())).float()


@case()
def a_buffer_becomes_more_precise() -> dict[str, Any]:
    return {"model": Widening()}


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.inner(inputs.to(self.inner.weight.dtype))
        return self.head(hidden.to(self.head.weight.dtype))


@case()
def the_parameters_of_a_module_become_more_precise() -> dict[str, Any]:
    model = Mixed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return {"model": model, "optimizer": optimizer, "act": lambda: model.inner.double()}


@pytest.mark.parametrize(("make", "lacks"), CASES)
def test_what_has_changed_is_resumed_or_named(make: Make, lacks: tuple[str, ...], tmp_path: Path):
    check_that_what_has_changed_is_resumed_or_named(make, lacks, tmp_path)


def test_a_resumed_model_takes_the_dtypes_of_the_checkpoint_with_a_warning(tmp_path: Path):
    cut_after(run(tmp_path, lambda: {"model": Widening()}), CUT)
    with capture_logs() as logs:
        run(tmp_path, lambda: {"model": Widening()}).train(resume="latest")
    converted = [each["tensors"] for each in logs if "other dtypes in the checkpoint" in each["event"]]
    assert converted == [{"average": "float32 to float64"}]


def test_a_second_engine_that_a_handler_runs_is_listed_as_not_seen(tmp_path: Path):
    other = Engine(lambda engine, batch: None)

    def attach(engine: Any) -> None:
        @engine.on(Events.EPOCH_COMPLETED)
        def run_other() -> None:
            other.run([0])

    made = run(tmp_path, lambda: {"attached": attach})
    cut_after(made, CUT)
    assert [each for each in made.checkpoint_state()["unsaved"]["not_seen"] if each.endswith("run_other.other")]


def test_a_second_trainer_that_a_handler_trains_is_named(tmp_path: Path):
    other = Trainer(
        regression_model(), loader(8), strategy=SupervisedStrategy("mse"), config=TrainingConfig(max_epochs=9)
    )

    def attach(engine: Any) -> None:
        @engine.on(Events.EPOCH_COMPLETED)
        def train_other() -> None:
            other.train_epoch()

    with capture_logs() as logs:
        cut_after(run(tmp_path, lambda: {"attached": attach}), CUT)
    assert [each for each in warned(logs, "are in no checkpoint") if each.endswith("train_other.other")]


def batches_of(loop: Loop, resume: str | None) -> Any:
    yield from loop.batches(resume=resume)


@pytest.mark.parametrize("holder", [{}, []])
def test_objects_of_a_loop_are_found_in_containers_and_beyond_a_generator(holder: Any, tmp_path: Path):
    model = regression_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3)
    held = {"scheduler": scheduler} if isinstance(holder, dict) else [scheduler]
    saver = Checkpointer(tmp_path, Every(iterations=4), at_end=False)
    config = TrainingConfig(max_epochs=1, seed=0, schedule=None)
    loop = Loop(model, loader(), optimizer=optimizer, config=config, handlers=[saver])
    with capture_logs() as logs:
        for inputs, targets in batches_of(loop, None):
            loop.output = loss = (model(inputs) - targets).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            next(iter(held.values() if isinstance(held, dict) else held)).step()
    name = "held['scheduler']" if isinstance(held, dict) else "held[0]"
    assert f"variable {name} of the loop" in warned(logs, "are in no checkpoint")
