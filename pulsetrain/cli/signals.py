"""SIGINT, SIGTERM and SIGUSR1: a run that is under way ends at a safe point, anything else ends at once."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any, Self

from engine import Events
from engine.payloads import Preempted

__all__ = ["SignalWatch"]

NAMES = ("SIGINT", "SIGTERM", "SIGUSR1")


class SignalWatch:
    """While it is entered, the first signal becomes PREEMPTED of the trainer it follows.

    Before there is a trainer, any of them raises KeyboardInterrupt; so does a SIGINT behind the first signal. Further
    SIGTERM and SIGUSR1 change nothing: the run is ending already.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.obeyed = False  # the run has ended because of it
        self._trainer: Any = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for name in NAMES:
            if hasattr(signal, name):
                number = signal.Signals[name]
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *error: object) -> None:
        self._trainer = None
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @property
    def status(self) -> int:
        """128 + the signal's number."""
        return 128 + (self.received or signal.SIGINT)

    def follow(self, trainer: Any) -> None:
        """From now on a signal ends this trainer's run."""
        trainer.add_event_handler(Events.PREEMPTED, self._obey)
        self._trainer = trainer

    def _obey(self) -> None:
        self.obeyed = True

    def _receive(self, number: int, frame: FrameType | None) -> None:
        first = self.received is None
        if first:
            self.received = signal.Signals(number)
        if first and self._trainer is not None:
            name = signal.Signals(number).name
            # not through sys.stderr: the signal may have come in the midst of a write there
            os.write(2, f"\n{name}: stopping at the next safe point; Ctrl-C stops at once\n".encode())
            self._trainer.post(Events.PREEMPTED, Preempted(signal=name))
        elif self._trainer is None or number == signal.SIGINT:
            raise KeyboardInterrupt
