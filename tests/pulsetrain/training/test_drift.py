"""Ranks whose copies are no longer the same are found and named, by the value that differs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from torch import nn
from torch.utils.data import DataLoader

from pulsetrain import Trainer
from pulsetrain.engine import Events, Every
from pulsetrain.engine.recording import EventLog
from pulsetrain.engine.schedules import Cosine
from pulsetrain.handlers import EventRecorder, Fingerprints, LRScheduler, NaNGuard, ReduceLROnPlateau
from tests.support.models import pairs
from tests.support.ranks import in_processes
from tests.support.runs_of_ranks import make


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
        self.register_buffer("table", torch.ones(3))
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("rare", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += inputs.abs().sum()  # each rank's own
            if inputs[0, 0] > 0:
                self.rare += 1  # in some ranks alone
        output: torch.Tensor = self.layers[1](self.layers[0](inputs) * self.table)
        return output


def flip(tensor: torch.Tensor, bit: int = 0) -> None:
    tensor.view(-1).view(torch.int32)[0] ^= 1 << bit


def flip_a_weight(trainer: Trainer) -> None:
    flip(trainer.model.layers[1].weight.data, bit=4)  # on some processors, the next updates would round the lowest off


def flip_a_moment(trainer: Trainer) -> None:
    flip(next(iter(trainer.optimizer.state.values()))["exp_avg_sq"])


def flip_a_buffer(trainer: Trainer) -> None:
    bits = trainer.model.table.numpy().view("int32")  # as a machine does, which writes nothing
    bits[0] ^= 1


def change_a_rate(trainer: Trainer) -> None:
    group = trainer.optimizer.param_groups[0]
    group["lr"] = math.nextafter(group["lr"], 1.0)


def count_an_update(trainer: Trainer) -> None:
    trainer.state.update += 1


class Frozen(Net):
    """Its first layer does not learn."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].requires_grad_(False)


@dataclass
class Case:
    """A run of 4 iterations an epoch, in which a rank does something after an iteration."""

    act: Callable[[Trainer], None] | None = None
    who: int = 1
    when: int = 9
    handlers: Sequence[Callable[[], Any]] = ()
    epochs: int = 4
    passes: int = 1
    model: type[Net] = Net
    validates: bool = False
    config: dict[str, Any] = field(default_factory=lambda: {"optimizer": "adamw", "learning_rate": 1e-3})

    def run(self, rank: int, world: int) -> Any:
        """What is reported, what is logged as an error, and the rates in the end."""
        made = make(
            self.model(), DataLoader(pairs(8 * world * self.passes), 2 * world), *(each() for each in self.handlers),
            val_loader=DataLoader(pairs(8), 4) if self.validates else None, max_epochs=self.epochs,
            log_every_n_steps=2, clip_grad_norm=1.0, **self.config,
        )  # fmt: skip
        found: list[Any] = []
        if self.act is not None and rank == self.who:
            made.on(Events.ITERATION_COMPLETED(once=self.when))(self.act)
        made.on(Events.RANKS_DIVERGED)(
            lambda engine, event: found.append((engine.state.iteration, event.payload.field, event.payload.ranks))
        )
        with structlog.testing.capture_logs() as logs:
            made.train()
        said = [each["field"] for each in logs if "have diverged" in each["event"]]
        return found, said, [float(rate) for rate in made.learning_rates]


def diverged(*cases: Case, world: int = 2) -> list[Any]:
    """What the ranks report in each case, and the main one's rates in the end; the same processes run all of them."""
    ended = in_processes(lambda rank: [case.run(rank, world) for case in cases], world, limit=240.0)
    for each in ended:
        assert each.error == ""
    for number in range(len(cases)):
        (found, said, _), *others = [each.value[number] for each in ended]
        assert said == [field for _, field, _ in found]
        for theirs in others:
            assert theirs[:2] == (found, [])  # all ranks report the same, and the main one says it for all
    return [(found, rates) for found, _, rates in ended[0].value]


DIFFERS: dict[str, tuple[Callable[[Trainer], None], str, int]] = {
    "weight": (flip_a_weight, "layers.1.weight", 12),
    "moment": (flip_a_moment, "optimizer, parameter 0, exp_avg_sq", 12),
    "buffer": (flip_a_buffer, "buffers", 12),
    "rate": (change_a_rate, "learning_rates", 10),
    "update": (count_an_update, "update", 10),
}


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_differs_by_one_bit_is_found(who: int):
    # later steps would round a moment off
    cases = [Case(act, who, 12 if name == "moment" else 9) for name, (act, _, _) in DIFFERS.items()]
    for name, (found, _) in zip(DIFFERS, diverged(*cases), strict=True):
        _, value, at = DIFFERS[name]
        assert found[0] == (at, value, (1,)), name  # of two ranks, rank 0's value counts as the usual one


def with_a_rate_tensor(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=torch.tensor(1e-3))


def flip_a_rate(trainer: Trainer) -> None:
    flip(trainer.optimizer.param_groups[0]["lr"])


def flip_a_frozen_weight(trainer: Trainer) -> None:
    flip(trainer.model.layers[0].weight.data)


def plateau() -> ReduceLROnPlateau:
    return ReduceLROnPlateau(factor=0.5, patience=0, threshold=0.9)  # hardly anything is an improvement


UNUSUAL: dict[str, tuple[Case, Callable[[Trainer], None], str, int]] = {
    "a frozen layer": (Case(model=Frozen), flip_a_frozen_weight, "layers.0.weight", 12),
    "a rate that is a tensor": (
        Case(config={"optimizer": with_a_rate_tensor}), flip_a_rate, "learning_rates", 10
    ),
    "rates by a validation": (Case(handlers=[plateau], validates=True), flip_a_weight, "layers.1.weight", 12),
}  # fmt: skip


def test_unusual_runs_raise_no_alarm_and_one_bit_is_found():
    usual = [case for case, _, _, _ in UNUSUAL.values()]
    faulty = [replace(case, act=act) for case, act, _, _ in UNUSUAL.values()]
    outcomes = diverged(*usual, *faulty)
    for name, (found, _) in zip(UNUSUAL, outcomes, strict=False):
        assert found == [], name
    for (name, (_, _, value, at)), (found, _) in zip(UNUSUAL.items(), outcomes[len(UNUSUAL) :], strict=True):
        assert found[0] == (at, value, (1,)), name
    assert outcomes[2][1][0] < 1e-3, "the validations have lowered the rate"


def test_of_three_ranks_the_odd_one_is_named():
    ((found, _),) = diverged(Case(change_a_rate, 0), world=3)
    assert found[0] == (10, "learning_rates", (0,))


def test_weights_are_compared_where_fingerprints_digest_them():
    ((found, _),) = diverged(Case(flip_a_weight, handlers=[lambda: Fingerprints(Every(iterations=1))]))
    assert found[0][0] == 10
    assert found[0][2] == (1,)


@pytest.mark.parametrize("iterations", [240, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.exhaustive])])
def test_a_run_without_a_fault_raises_no_alarm(iterations: int):
    def schedule() -> LRScheduler:
        return LRScheduler(Cosine(initial_lr=1e-3, total_steps=iterations))

    passes = iterations // 80  # of 4 iterations, in an epoch; 20 epochs
    prints = lambda: Fingerprints(Every(iterations=10))  # noqa: E731
    ((found, _),) = diverged(Case(handlers=[schedule, NaNGuard, prints], epochs=20, passes=passes))
    assert found == []


def test_the_event_is_in_the_logs_of_all_ranks(tmp_path: Path):
    diverged(Case(change_a_rate, handlers=[lambda: EventRecorder(tmp_path)]))
    for rank in (0, 1):
        (event,) = EventLog(tmp_path, rank).read(event="ranks_diverged")
        assert event.payload["field"] == "learning_rates"
        assert event.payload["ranks"] == [1]


def test_the_example_of_the_guide_ends_all_ranks_with_the_field(tmp_path: Path):
    guide = (Path(__file__).parents[3] / "docs" / "distributed.md").read_text()
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", guide, re.S) if "RANKS_DIVERGED" in block)

    def body(rank: int) -> Any:
        trainer = make(Net(), DataLoader(pairs(16), 4), max_epochs=9, log_every_n_steps=2)
        exec(code, {"trainer": trainer, "Events": Events})
        if rank == 1:
            trainer.on(Events.ITERATION_COMPLETED(once=5))(change_a_rate)
        trainer.train()
        return trainer.state.iteration, trainer.state.stop_reason

    ended = in_processes(body)
    assert [(each.error, each.value) for each in ended] == [("", (6, "learning_rates differs in rank (1,)"))] * 2
