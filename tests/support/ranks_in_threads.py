"""Ranks that are threads of one process: what they agree on, and what they send and ask for it, can be counted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from pulsetrain.engine.distributed.collectives import ControlGroup
from pulsetrain.engine.distributed.ranks import Ranks

__all__ = ["Counting", "Meeting", "in_threads"]


class Counting:
    """A store that counts the requests of one rank."""

    def __init__(self, store: Any) -> None:
        self._store, self.requests = store, 0

    def __getattr__(self, name: str) -> Any:
        self.requests += 1
        return getattr(self._store, name)


class Meeting(ControlGroup):
    """A rank's control group; the ranks meet in memory."""

    def __init__(self, ranks: Ranks, barrier: threading.Barrier, slots: list[Any]) -> None:
        super().__init__(ranks)
        self._barrier, self._slots = barrier, slots
        self.gathered: list[Any] = []  # what this rank has received of objects

    @property
    def is_shared(self) -> bool:
        return True

    def sum(self, values: Sequence[float], what: str = "a sum") -> list[float]:
        return [sum(each) for each in zip(*self._exchange(list(values)), strict=True)]

    def gather(self, value: Any) -> list[Any]:
        return self._received(self._exchange(value))

    def collect(self, value: Any) -> list[Any]:
        found = self._exchange(value)
        return self._received(found) if self.ranks.is_main else []

    def broadcast(self, value: Any) -> Any:
        return self._received(self._exchange(value)[:1])[0]

    def _received(self, values: list[Any]) -> list[Any]:
        self.gathered.append(values)
        return values

    def _exchange(self, value: Any) -> list[Any]:
        self._slots[self.ranks.rank] = value
        self._barrier.wait(60.0)
        found = list(self._slots)
        self._barrier.wait(60.0)
        return found


def in_threads(body: Callable[[Meeting], Any], world: int) -> tuple[list[Any], list[Meeting]]:
    """What the function returns, or raises, for each rank, and their control groups."""
    barrier, slots = threading.Barrier(world), [None] * world
    controls = [Meeting(Ranks(rank, world), barrier, slots) for rank in range(world)]
    found: list[Any] = [None] * world

    def run(control: Meeting) -> None:
        try:
            found[control.ranks.rank] = body(control)
        except Exception as error:
            found[control.ranks.rank] = error

    threads = [threading.Thread(target=run, args=(control,)) for control in controls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found, controls
