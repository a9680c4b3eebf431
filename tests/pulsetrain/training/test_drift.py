"""Ranks whose copies are no longer the same are found and named, by the value that differs."""

from __future__ import annotations

import math
from collections.abc import Callable
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
from pulsetrain.handlers import EventRecorder, Fingerprints, LRScheduler, NaNGuard
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


def flip(tensor: torch.Tensor) -> None:
    tensor.view(-1).view(torch.int32)[0] ^= 1  # its lowest bit


def flip_a_weight(trainer: Trainer) -> None:
    flip(trainer.model.layers[1].weight.data)


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


def diverged(
    act: Callable[[Trainer], None] | None,
    who: int,
    *handlers: Any,
    world: int = 2,
    epochs: int = 4,
    when: int = 9,
    passes: int = 1,
) -> list[Any]:
    """What each rank reports if this one does something at this iteration, with 4 iterations an epoch."""

    def body(rank: int) -> Any:
        made = make(
            Net(), DataLoader(pairs(4 * world * 2 * passes), 2 * world), *(each() for each in handlers),
            optimizer="adamw", learning_rate=1e-3, max_epochs=epochs, log_every_n_steps=2, clip_grad_norm=1.0,
        )  # fmt: skip
        found: list[Any] = []
        if act is not None and rank == who:
            made.on(Events.ITERATION_COMPLETED(once=when))(act)
        made.on(Events.RANKS_DIVERGED)(
            lambda engine, event: found.append((engine.state.iteration, event.payload.field, event.payload.ranks))
        )
        with structlog.testing.capture_logs() as logs:
            made.train()
        return found, [each["field"] for each in logs if "have diverged" in each["event"]]

    ended = in_processes(body, world)
    for each in ended:
        assert each.error == ""
    assert len({str(each.value[0]) for each in ended}) == 1  # all ranks report the same
    found, said = ended[0].value
    assert said == [field for _, field, _ in found]
    assert all(each.value[1] == [] for each in ended[1:])  # the main process says it for all
    return list(found)


@pytest.mark.parametrize(
    ("act", "field", "at"),
    [
        (flip_a_weight, "layers.1.weight", 12),
        (flip_a_moment, "optimizer, parameter 0, exp_avg_sq", 12),
        (flip_a_buffer, "buffers", 12),
        (change_a_rate, "learning_rates", 10),
        (count_an_update, "update", 10),
    ],
    ids=["weight", "moment", "buffer", "rate", "update"],
)
@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_differs_by_one_bit_is_found(act: Callable[[Trainer], None], field: str, at: int, who: int):
    found = diverged(act, who, when=12 if act is flip_a_moment else 9)  # later steps would round it off
    assert found[0] == (at, field, (1,))  # of two ranks, rank 0's value counts as the usual one


def test_of_three_ranks_the_odd_one_is_named():
    assert diverged(change_a_rate, 0, world=3)[0] == (10, "learning_rates", (0,))


def test_weights_are_compared_where_fingerprints_digest_them():
    found = diverged(flip_a_weight, 1, lambda: Fingerprints(Every(iterations=1)))
    assert found[0][0] == 10
    assert found[0][2] == (1,)


@pytest.mark.parametrize("iterations", [240, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_run_without_a_fault_raises_no_alarm(iterations: int):
    def schedule() -> LRScheduler:
        return LRScheduler(Cosine(initial_lr=1e-3, total_steps=iterations))

    passes = iterations // 80  # of 4 iterations, in an epoch; 20 epochs
    prints = lambda: Fingerprints(Every(iterations=10))  # noqa: E731
    assert diverged(None, 0, schedule, NaNGuard, prints, epochs=20, passes=passes) == []


def test_the_event_is_in_the_logs_of_all_ranks(tmp_path: Path):
    diverged(change_a_rate, 1, lambda: EventRecorder(tmp_path))
    for rank in (0, 1):
        (event,) = EventLog(tmp_path, rank).read(event="ranks_diverged")
        assert event.payload["field"] == "learning_rates"
        assert event.payload["ranks"] == [1]
