"""What a run's metrics were: read at log points, kept by epoch."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["History", "Rate", "Window"]

_FOLD = 1000  # losses that are kept apart at most; more are folded into one on the device


class Window:
    """Losses since it was last read. Adding costs a list append; the mean is taken on the device when it is read."""

    def __init__(self) -> None:
        self._losses: list[Tensor] = []
        self._sum: Tensor | None = None
        self._count = 0

    def add(self, loss: Tensor) -> None:
        """One more loss, shape (), left on its device."""
        self._losses.append(loss)
        if len(self._losses) == _FOLD:
            self._fold()

    def __len__(self) -> int:
        return self._count + len(self._losses)

    def take(self) -> Tensor:
        """The mean, shape (), on the device, and a fresh start."""
        self._fold()
        assert self._sum is not None  # len() says whether there is anything
        mean = self._sum / self._count
        self._sum, self._count = None, 0
        return mean

    def _fold(self) -> None:
        if self._losses:
            total = torch.stack(self._losses).float().sum()
            self._sum = total if self._sum is None else self._sum + total
            self._count += len(self._losses)
            self._losses.clear()

    def state_dict(self) -> dict[str, Any]:
        """The unread sum."""
        self._fold()
        return {"sum": self._sum, "count": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with a saved sum."""
        self._losses.clear()
        self._sum, self._count = state["sum"], state["count"]


class History(dict[str, list[float]]):
    """Metric name -> one value an epoch (train/loss, learning_rate) or a validation (val/loss ...).

    An epoch's end does not wait for the device: its mean stands here as a tensor until `settle()`, which log points,
    validations, checkpoints and the run's end call.
    """

    def __init__(self) -> None:
        super().__init__()
        self._unsettled: list[tuple[str, int]] = []

    def record(self, metrics: Mapping[str, Tensor | float]) -> None:
        """Append a value to each name."""
        for name, value in metrics.items():
            values = self.setdefault(name, [])
            if isinstance(value, Tensor):
                self._unsettled.append((name, len(values)))
            values.append(value)  # type: ignore[arg-type]  # a tensor of shape () until settled

    def settle(self) -> None:
        """Bring what is still on the device to the host."""
        for name, index in self._unsettled:
            self[name][index] = float(self[name][index])
        self._unsettled.clear()


class Rate:
    """How many samples and tokens a second, between two readings; time spent validating is left out."""

    def __init__(self) -> None:
        self.paused = 0.0  # seconds since the last reading that were not training
        self._since = time.perf_counter()
        self._samples = self._tokens = 0

    def restart(self, samples: int, tokens: int) -> None:
        """Count from here."""
        self._since, self.paused = time.perf_counter(), 0.0
        self._samples, self._tokens = samples, tokens

    def read(self, samples: int, tokens: int) -> dict[str, float]:
        """The rates since the last reading, given the run's totals so far."""
        seconds = max(time.perf_counter() - self._since - self.paused, 1e-9)
        rates = {"samples_per_second": (samples - self._samples) / seconds}
        if tokens > self._tokens:
            rates["tokens_per_second"] = (tokens - self._tokens) / seconds
        self.restart(samples, tokens)
        return rates
