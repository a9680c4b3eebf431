"""Loops written by hand and handlers whose result depends on nothing that is lost: none is warned of."""

from __future__ import annotations

import copy
import enum
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor, nn

from pulsetrain import Checkpointer, Every, Loop, Trainer, TrainingConfig
from pulsetrain.engine import Events, SupervisedStrategy
from tests.support.models import loader, regression_model
from tests.support.runs_hidden_state import warned


class Settings(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        return self[name]  # a KeyError, where an AttributeError is usual


class WithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.criterion = model, nn.MSELoss()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.model(inputs)
        return outputs


def make(folder: Path) -> tuple[Loop, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = regression_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    saver = Checkpointer(folder, Every(iterations=4))
    return (
        Loop(model, loader(), optimizer=optimizer, config=TrainingConfig(max_epochs=2, seed=0), handlers=[saver]),
        model,
        optimizer,
    )


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, loop: Loop) -> None:
    inputs, targets = batch
    loop.output = loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def with_settings(folder: Path) -> None:
    settings = Settings(rate=0.5)
    loop, model, optimizer = make(folder)
    for batch in loop.batches():
        assert settings.rate == 0.5
        step(model, optimizer, batch, loop)


def with_a_wrapped_model(folder: Path) -> None:
    loop, model, optimizer = make(folder)
    net = WithLoss(model)
    for batch in loop.batches():
        step(net, optimizer, batch, loop)


def with_data_parallel(folder: Path) -> None:
    loop, model, optimizer = make(folder)
    net = nn.DataParallel(model)
    for batch in loop.batches():
        step(net, optimizer, batch, loop)


def with_a_compiled_model(folder: Path) -> None:
    loop, model, optimizer = make(folder)
    net: Any = torch.compile(model, backend="eager")
    for batch in loop.batches():
        step(net, optimizer, batch, loop)


def with_variables_of_the_body(folder: Path) -> None:
    loop, model, optimizer = make(folder)
    for batch in loop.batches():
        step(model, optimizer, batch, loop)
        part, frozen, probe = model[:2], copy.deepcopy(model), nn.Linear(2, 2)  # type: ignore[index]
        del part, frozen, probe


def with_a_wrapped_optimizer(folder: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    loop, model, optimizer = make(folder)
    helper = accelerate.Accelerator(cpu=True)
    _, wrapped = helper.prepare(model, optimizer)
    for batch in loop.batches():
        step(model, wrapped, batch, loop)


BODIES = [
    with_settings, with_a_wrapped_model, with_data_parallel, with_variables_of_the_body, with_a_wrapped_optimizer,
    pytest.param(with_a_compiled_model, marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.parametrize("body", BODIES)
def test_a_loop_that_loses_nothing_is_not_warned_of(body: Callable[[Path], None], tmp_path: Path):
    with capture_logs() as logs:
        body(tmp_path)
    assert [each for each in logs if each["log_level"] == "warning"] == []


class InAClass:
    """A loop in a method, whose scheduler is an attribute."""

    def train(self, folder: Path) -> None:
        loop, model, optimizer = make(folder)
        self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        for batch in loop.batches():
            step(model, optimizer, batch, loop)
            self.scheduler.step()


def with_a_librarys_bar(folder: Path) -> None:
    from tqdm import tqdm

    loop, model, optimizer = make(folder)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    for batch in tqdm(loop.batches(), disable=True):
        step(model, optimizer, batch, loop)
        scheduler.step()


@pytest.mark.parametrize(
    ("body", "name"), [(with_a_librarys_bar, "scheduler"), (lambda folder: InAClass().train(folder), "self.scheduler")]
)
def test_a_scheduler_is_found_where_loops_have_one(body: Callable[[Path], None], name: str, tmp_path: Path):
    with capture_logs() as logs:
        body(tmp_path)
    assert warned(logs, "are in no checkpoint") == [f"variable {name} of the loop"]


def test_a_save_keeps_no_variable_of_the_body_alive(tmp_path: Path):
    class Large: ...

    loop, model, optimizer = make(tmp_path)
    kept: list[weakref.ref[Large]] = []
    for batch in loop.batches():
        large = Large()
        kept.append(weakref.ref(large))
        step(model, optimizer, batch, loop)
    del large
    gc.collect()
    assert [each() for each in kept if each() is not None] == []


loss, level = 0.5, 1  # global variables, of the names of attributes in the handlers below


class Kind(enum.Flag):
    ONE = 1
    TWO = 2


class Noting:
    def __init__(self, engine: Any) -> None:
        engine.add_event_handler(Events.ITERATION_COMPLETED, self.note)

    def note(self, engine: Any) -> None:
        self.loss = None
        assert engine.state.output.loss is not None
        assert Kind.ONE | Kind.TWO

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


def note(engine: Any) -> None:
    assert engine.state.output.loss is not None
    assert Kind.ONE | Kind.TWO


@pytest.mark.parametrize("attach", [Noting, lambda engine: engine.add_event_handler(Events.ITERATION_COMPLETED, note)])
def test_an_attributes_name_is_not_taken_for_a_global_variable_and_enums_are_constant(
    attach: Callable[[Any], object], tmp_path: Path
):
    config = TrainingConfig(max_epochs=1, seed=0)
    saver = Checkpointer(tmp_path, Every(iterations=4))
    run = Trainer(regression_model(), loader(), strategy=SupervisedStrategy("mse"), config=config, handlers=[saver])
    attach(run)

    @run.on(Events.ITERATION_COMPLETED(once=2))
    def change() -> None:
        globals()["loss"] += 1.0

    with capture_logs() as logs:
        run.train()
    assert warned(logs, "are in no checkpoint") == []
