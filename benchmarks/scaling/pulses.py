"""Simulated ranks that run the product's Pulse, and a model of what a sum over them takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from pulsetrain.engine.distributed.collectives import ControlGroup
from pulsetrain.engine.distributed.pulse import Pulse, StopRequest
from pulsetrain.engine.distributed.ranks import Ranks

__all__ = ["HOP", "NUMBERS", "RATE", "Training", "in_ring", "in_tree", "seconds_between_pulses", "simulate"]

HOP = 20e-6  # seconds for a small message from one host's process to another's over TCP
RATE = 1.25e9  # bytes a second of a link: 10 Gbit/s
NUMBERS = 64  # float64 that a sum sends, whatever the pulse carries


def in_ring(ranks: int) -> float:
    """Seconds of a sum in a ring, as gloo makes it: each part of the vector passes each rank twice."""
    return 2 * (ranks - 1) * (HOP + 8 * NUMBERS / ranks / RATE)


def in_tree(ranks: int) -> float:
    """Seconds of a sum in a tree of pairs: up to one rank, and down again."""
    return 2 * math.ceil(math.log2(ranks)) * (HOP + 8 * NUMBERS / RATE)


class _SentError(Exception):
    """A rank has sent its numbers: the sums are not known yet."""


class _Meeting:
    """A rank's ControlGroup in the simulation. It calls `beat` twice: to collect what each sends, and with the sums."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.sent: list[float] = []
        self.sums: list[float] | None = None
        self.requests: Sequence[StopRequest] = ()

    def sum(self, values: Sequence[float], what: str = "") -> list[float]:
        """The sums, once every rank has sent its values."""
        if self.sums is None:
            self.sent = list(values)
            raise _SentError
        return self.sums

    def gather(self, value: object) -> Sequence[StopRequest]:
        """What the ranks have asked for."""
        return self.requests


@dataclass(frozen=True, kw_only=True)
class Training:
    """How long iterations take.

    Args:
        mean: seconds of an iteration on each rank.
        jitter: the standard deviation, in times the mean.
        straggling: the probability that a rank takes three times the mean.
        every: iterations between two log points.
    """

    mean: float = 1.0
    jitter: float = 0.05
    straggling: float = 1e-4
    every: int = 50


@dataclass
class Found:
    """What the simulated runs have shown."""

    disagreements: int = 0  # where ranks would have done different things, or not what was asked
    pulses: int = 0
    seconds: list[float] = field(default_factory=list)  # from a signal to the end of the run in all ranks


def seconds_between_pulses(ranks: int, mean: float) -> float:
    """How far apart two further pulses are, as the product's Pulse places them.

    Args:
        ranks: how many there are.
        mean: seconds of an iteration.
    """
    control = _Meeting(Ranks(0, ranks))
    control.sums = [0.0, 0.0, ranks * mean, float(ranks)]
    pulse = Pulse(cast(ControlGroup, control), every=1 << 40)
    pulse.beat(1, fixed=False)
    return (pulse.next - 1) * mean


def simulate(ranks: int, runs: int, training: Training, seed: int = 0) -> Found:
    """Train runs, in each of which one to three ranks ask for the end: by a signal, or by a request of a handler.

    The ranks compute each iteration together, as data-parallel training does: it takes as long as on the slowest one.
    Their clocks have offsets of hours, and each comes to a pulse a little earlier or later than the others.
    """
    draw, found = np.random.default_rng([seed, ranks]), Found()
    for _ in range(runs):
        _run(ranks, training, draw, found)
    return found


def _run(ranks: int, training: Training, draw: np.random.Generator, found: Found) -> None:
    offsets, clock = draw.uniform(0, 1e5, ranks), _Clock()
    controls = [_Meeting(Ranks(rank, ranks)) for rank in range(ranks)]
    pulses = [
        Pulse(cast(ControlGroup, control), training.every, clock=clock.of(offset))
        for control, offset in zip(controls, offsets.tolist(), strict=True)
    ]
    asking = sorted(draw.choice(ranks, size=min(ranks, int(draw.integers(1, 4))), replace=False).tolist())
    at, observed = int(draw.integers(2, 3 * training.every)), bool(draw.integers(2))
    requests = [StopRequest("asked", observed, "SIGTERM" if observed else "", rank) for rank in asking]
    asked_at = 0.0
    for iteration in range(1, 20 * training.every):
        took = training.mean * (1 + training.jitter * np.abs(draw.standard_normal(ranks)).max())
        if draw.random() < 1 - (1 - training.straggling) ** ranks:
            took = max(took, 3 * training.mean)
        clock.now += took
        if iteration == at:
            asked_at = clock.now
            for each in requests:
                pulses[each.rank].ask(each.reason, observed=each.observed, signal=each.signal)
        due = {pulse.is_due(iteration) for pulse in pulses}
        found.disagreements += len(due) > 1
        if due != {True}:
            continue
        found.pulses += 1
        clock.late = draw.uniform(0, 0.1 * training.mean, ranks).tolist()
        answers = _beat(pulses, controls, clock, iteration, training.every, requests if iteration >= at else [])
        found.disagreements += len(answers) > 1
        ((stop, _),) = list(answers)[:1]
        if stop is not None:
            found.disagreements += stop != requests[0]
            if observed:
                found.seconds.append(clock.now - asked_at)
            return
    found.disagreements += 1  # nobody has ended the run


def _beat(
    pulses: Sequence[Pulse],
    controls: Sequence[_Meeting],
    clock: _Clock,
    iteration: int,
    every: int,
    requests: Sequence[StopRequest],
) -> set[tuple[StopRequest | None, int]]:
    """A pulse of all ranks; returns what they end for, and their next iteration: one pair if they agree."""
    fixed = iteration % every == 0
    for rank, (pulse, control) in enumerate(zip(pulses, controls, strict=True)):
        clock.rank, control.sums = rank, None
        try:
            pulse.beat(iteration, fixed=fixed)
        except _SentError:
            pass
    # one after the other in float64, each number beginning at another rank, as the parts of a vector do in a ring
    sent: Any = np.array([control.sent for control in controls])
    sums = [np.roll(sent[:, at], at).cumsum()[-1].item() for at in range(sent.shape[1])]
    answers = set()
    for rank, (pulse, control) in enumerate(zip(pulses, controls, strict=True)):
        clock.rank, control.sums, control.requests = rank, sums, requests
        stop, _ = pulse.beat(iteration, fixed=fixed)
        answers.add((stop, pulse.next))
    return answers


class _Clock:
    """The time, as each rank's clock shows it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.rank = 0  # which reads it
        self.late: list[float] = []

    def of(self, offset: float) -> Any:
        """The clock of a rank."""
        return lambda: offset + self.now + (self.late[self.rank] if self.late else 0.0)
