"""What a run's metrics were: read at log points, kept by epoch."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["History", "Losses", "Rate"]

_FOLD = 1000  # losses that are kept apart at most; more are folded into one on the device


class Losses:
    """The steps' losses, for two readers: the mean since the last log point, and the mean of the epoch.

    Adding costs a list append. Means are taken on the device, in an order that a checkpoint does not change.
    """

    def __init__(self) -> None:
        self._recent: list[Tensor] = []
        self._sums: dict[str, tuple[Tensor | None, int]] = {"log": (None, 0), "epoch": (None, 0)}

    def add(self, loss: Tensor) -> None:
        """One more loss, shape (), left on its device."""
        self._recent.append(loss)
        if len(self._recent) == _FOLD:
            self._fold()

    def count(self, reader: str) -> int:
        """How many losses the reader, "log" or "epoch", has not taken."""
        return self._sums[reader][1] + len(self._recent)

    def peek(self, reader: str) -> Tensor:
        """The reader's mean, shape (), on the device."""
        self._fold()
        total, count = self._sums[reader]
        assert total is not None  # count() says whether there is anything
        return total / count

    def take(self, reader: str) -> Tensor:
        """`peek`, and a fresh start for this reader."""
        mean = self.peek(reader)
        self._sums[reader] = None, 0
        return mean

    def forget(self, reader: str) -> None:
        """A fresh start for this reader."""
        self._fold()
        self._sums[reader] = None, 0

    def _fold(self) -> None:
        if not self._recent:
            return
        total, count = torch.stack(self._recent).float().sum(), len(self._recent)
        self._recent.clear()
        for reader, (before, counted) in self._sums.items():
            self._sums[reader] = total if before is None else before + total, counted + count

    def state_dict(self) -> dict[str, Any]:
        """Sums and losses not summed yet, as they are: saving must not change the order of adding."""
        recent = torch.stack(self._recent) if self._recent else None
        return {"sums": {reader: list(each) for reader, each in self._sums.items()}, "recent": recent}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with saved sums."""
        self._sums = {reader: (total, count) for reader, (total, count) in state["sums"].items()}
        self._recent = [] if state["recent"] is None else list(state["recent"].unbind())


class History(dict[str, list[float]]):
    """Metric name -> one value an epoch (train/loss, learning_rate) or a validation (val/loss ...).

    An epoch's end does not wait for the device: its mean stands here as a tensor until `settle()`, which log points,
    validations, checkpoints and the run's end call.
    """

    def __init__(self) -> None:
        super().__init__()
        self._unsettled: list[tuple[str, int]] = []
        self._provisional: tuple[str, ...] = ()  # names whose last value is that of an unfinished epoch

    def record(self, metrics: Mapping[str, Tensor | float], *, provisional: bool = False) -> None:
        """Append a value to each name; `provisional` says that a run which goes on will take it back."""
        if provisional:
            self._provisional = tuple(metrics)
        for name, value in metrics.items():
            values = self.setdefault(name, [])
            if isinstance(value, Tensor):
                self._unsettled.append((name, len(values)))
            values.append(value)  # type: ignore[arg-type]  # a tensor of shape () until settled

    def keep_provisional(self) -> None:
        """The unfinished epoch was given up: its values stay."""
        self._provisional = ()

    def completed(self) -> dict[str, list[float]]:
        """Without what an unfinished epoch left: what a checkpoint holds."""
        return {name: values[:-1] if name in self._provisional else list(values) for name, values in self.items()}

    def restart(self, values: Mapping[str, list[float]]) -> None:
        """Go on from these."""
        self.clear()
        self._unsettled.clear()
        self._provisional = ()
        self.update({name: list(each) for name, each in values.items()})

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
