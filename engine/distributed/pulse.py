"""The pulse: at iterations that all ranks know beforehand, they agree on what one of them has asked for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pulsetrain.engine.distributed.collectives import ControlGroup

__all__ = ["Pulse", "SharedFlag", "StopRequest"]

_RANKS = 2_500  # up to which a pulse takes a tenth of a second: a sum passes each rank twice, one after the other


class StopRequest(NamedTuple):
    """The request of one rank that the run ends."""

    reason: str
    observed: bool = False  # the moment depends on the clock, a signal or the machine
    signal: str = ""  # "SIGTERM", if that is the cause
    rank: int = 0
    skip_completed: bool = False


class SharedFlag:
    """A flag that any rank may raise: from the next pulse on it is up in all ranks, until each takes it down.

    >>> from pulsetrain.engine.distributed.ranks import Ranks
    >>> pulse = Pulse(ControlGroup(Ranks()), every=50)
    >>> flag = pulse.flag("the owner")
    >>> flag.raise_it()
    >>> before, _, after = flag.take(), pulse.beat(50, fixed=True), flag.take()
    >>> before, after, flag.take()
    (False, True, False)
    """

    raised: bool
    is_up: bool

    def __init__(self) -> None:
        self.raised = self.is_up = False  # by this rank since the last pulse, and in all

    def raise_it(self) -> None:
        """Raise it in all ranks with their next pulse."""
        self.raised = True

    def take(self) -> bool:
        """Whether it is up; takes it down."""
        was_up, self.is_up = self.is_up, False
        return was_up


class Pulse:
    """Agreement without a collective in each iteration.

    A rank asks for the run's end; all ranks learn it at their next pulse, and so end at the same iteration. Pulses lie
    at fixed points (log points, and wherever the trainer calls `beat` with `fixed`), and at one further iteration,
    which every rank computes from the sums of the last pulse. What depends on the clock or a signal acts at any pulse,
    anything else at the fixed points alone, so that it happens at the same iteration when the run is repeated.

    >>> from pulsetrain.engine.distributed.ranks import Ranks
    >>> pulse = Pulse(ControlGroup(Ranks()), every=50)
    >>> pulse.ask("enough")
    >>> pulse.is_due(49), pulse.is_due(50), pulse.beat(50, fixed=True)
    (False, True, (StopRequest(reason='enough', observed=False, signal='', rank=0, skip_completed=False), []))

    Args:
        control: joins the ranks.
        every: iterations between two fixed pulses.
        within: about how many seconds it may take until the ranks agree on a signal; longer with more than 2,500
            ranks, where a pulse takes longer, too.
        clock: monotonic, in seconds.
    """

    next: int

    def __init__(
        self,
        control: ControlGroup,
        every: int,
        within: float = 5.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._control, self._every, self._clock = control, every, clock
        self._within = within * max(1.0, control.ranks.world_size / _RANKS)
        self._asked: StopRequest | None
        self._flags: dict[int, tuple[object, SharedFlag]] = {}  # by their owners' ids
        self.begin(0)

    def begin(self, iteration: int) -> None:
        """A run starts or continues after this iteration; the first pulse comes after the next one."""
        self.next = iteration + 1  # the further iteration
        self._asked = None
        self._at, self._since = iteration, self._clock()
        for _, flag in self._flags.values():
            flag.raised = flag.is_up = False

    def flag(self, owner: object) -> SharedFlag:
        """The owner's flag, which the pulses carry; every rank has to create the same flags, in the same order."""
        return self._flags.setdefault(id(owner), (owner, SharedFlag()))[1]

    def ask(self, reason: str, *, observed: bool = False, signal: str = "", skip_completed: bool = False) -> None:
        """Ask for the run's end; the first request counts, and an observed one before any other."""
        if self._asked is None or (observed and not self._asked.observed):
            self._asked = StopRequest(reason, observed, signal, self._control.ranks.rank, skip_completed)

    def is_due(self, iteration: int) -> bool:
        """Whether all ranks have a pulse after this iteration."""
        return iteration == self.next or iteration % self._every == 0

    @property
    def further(self) -> int | None:
        """The further iteration; None if there is none, or it is a log point, too."""
        return self.next if self.next > 0 and self.next % self._every else None

    def beat(
        self, iteration: int, *, fixed: bool, values: Sequence[float] = ()
    ) -> tuple[StopRequest | None, list[float]]:
        """Agree with the other ranks, which all call this now.

        Args:
            iteration: the last one.
            fixed: whether this is a fixed point, at which requests count that are not observed.
            values: further numbers to add up.

        Returns:
            Why the run ends, or None, and the sums of the values; the same on every rank.
        """
        now, asked = self._clock(), self._asked
        done = iteration - self._at
        seconds = (now - self._since) / done if done > 0 else 0.0
        stops, observed, taken, ranks, *sums = self._control.sum(
            [
                *(asked is not None, asked is not None and asked.observed, seconds, 1.0, *values),
                *(flag.raised for _, flag in self._flags.values()),
            ],
            f"a pulse after iteration {iteration}",
        )
        for (_, flag), raised in zip(self._flags.values(), sums[len(values) :], strict=True):
            flag.is_up, flag.raised = flag.is_up or raised > 0, False
        del sums[len(values) :]
        if taken:
            self.next = iteration + max(1, int(self._within * ranks / taken))
        elif iteration >= self.next:
            self.next = -1
        if done > 0:
            self._at, self._since = iteration, self._clock()
        if not (stops if fixed else observed):
            return None, sums
        self._asked = None
        requests = [each for each in self._control.gather(asked) if each is not None]
        return min(requests, key=lambda request: (not request.observed, request.rank)), sums
