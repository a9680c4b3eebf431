"""How often processes that train together wait for each other, apart from the gradients."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from torch.utils.data import DataLoader

from pulsetrain import Trainer
from pulsetrain.engine import FIRST, Events, Phase
from pulsetrain.engine.distributed.pulse import Pulse
from pulsetrain.engine.schedules import Cosine
from pulsetrain.handlers import Fingerprints, LRScheduler, NaNGuard
from tests.support.models import pairs
from tests.support.ranks import in_processes
from tests.support.runs_of_ranks import linear, make

ITERATIONS = 110  # of one epoch


class Clock:
    """Seconds that pass with the iterations of a run, each of which takes as long."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.iterations = seconds, 0

    def __call__(self) -> float:
        return self.seconds * self.iterations


def collectives(clock: Clock, loader: Any, log_every: int) -> dict[int, int]:
    """How many collectives the control group made after each iteration; before the first one is 0.

    Apart from those that add up the sizes of the ranks' batches, which are part of the gradients.
    """
    handlers = [NaNGuard(), LRScheduler(Cosine(initial_lr=1e-3, total_steps=ITERATIONS)), Fingerprints()]
    config: dict[str, Any] = {"max_epochs": 1, "clip_grad_norm": 1.0, "log_every_n_steps": log_every}
    made: Trainer = make(linear(), loader, *handlers, **config)
    control, met, sizes = made.agreement.control, [], []
    note = control._note  # what it calls with each collective's name
    control._note = lambda what: (note(what), (sizes if what.startswith("the batch of") else met).append(what))  # type: ignore[assignment, return-value]
    calls = [0]

    def count() -> None:
        clock.iterations = made.state.iteration
        calls.append(len(met))

    made.bus.subscribe(Events.ITERATION_STARTED, count, sender=made, phase=Phase.COMPUTE, order=FIRST)
    made.train()
    calls.append(len(met))
    assert len(sizes) == ITERATIONS
    return {each: calls[each + 1] - calls[each] for each in range(len(calls) - 1) if calls[each + 1] != calls[each]}


def test_a_run_makes_one_collective_at_a_log_point_and_one_in_five_seconds(monkeypatch: pytest.MonkeyPatch):
    def run(seconds: float, log_every: int) -> dict[int, int]:
        monkeypatch.setattr("pulsetrain.training.agreement.Pulse", partial(Pulse, clock=(clock := Clock(seconds))))
        return collectives(clock, DataLoader(pairs(4 * ITERATIONS), 4, shuffle=True), log_every)

    def body(rank: int) -> Any:
        return run(seconds=0.001, log_every=25), run(seconds=0.25, log_every=1000)

    first, second = in_processes(body)
    assert (first.error, second.error) == ("", "")
    assert first.value == second.value
    by_log_points, by_seconds = first.value
    # before the first iteration: where the run folders are; the first one: how batches are counted, and the first
    # pulse; the last one: the end of the epoch and of the run, and the losses of both
    ends = {0: 4, 1: 2, ITERATIONS: 3}
    assert by_log_points == {**ends, 25: 1, 50: 1, 75: 1, 100: 1}
    further = by_seconds.keys() - ends.keys()
    assert by_seconds == {**ends, **dict.fromkeys(further, 1)}
    at = [1, *sorted(further)]
    assert all(4.75 <= 0.25 * (b - a) <= 5.25 for a, b in pairwise(at))
    assert len(at) == 6
