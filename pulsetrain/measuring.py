"""What a run measures of itself between two readings: mean losses, and how fast it goes."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from engine.metrics import RunningMean

__all__ = ["MeanLoss", "Rate"]

_FOLD = 1000  # losses that are kept apart at most; more are folded into one on the device


class MeanLoss:
    """The mean of the steps' losses since it was last taken, on the device.

    Adding costs two list appends. Looking and saving do not change the order in which losses are added up.
    """

    def __init__(self) -> None:
        self._mean = RunningMean()
        self._losses: list[Tensor] = []
        self._sizes: list[int] = []
        self._folded = 0

    def add(self, loss: Tensor, size: int) -> None:
        """One more loss, shape (), left on its device; it is a mean over `size` samples or tokens."""
        self._losses.append(loss)
        self._sizes.append(size)
        if len(self._losses) == _FOLD:
            self._fold_into(self._mean)
            self._folded += _FOLD
            self._losses.clear()
            self._sizes.clear()

    @property
    def count(self) -> int:
        """How many losses the mean is taken over."""
        return self._folded + len(self._losses)

    def peek(self) -> Tensor:
        """The mean, shape (), on the device."""
        whole = RunningMean()
        whole.load_state_dict(self._mean.state_dict())
        self._fold_into(whole)
        return whole.mean()

    def take(self) -> Tensor:
        """`peek`, and a fresh start."""
        mean = self.peek()
        self.restart()
        return mean

    def restart(self) -> None:
        """A fresh start."""
        self._mean.reset()
        self._losses.clear()
        self._sizes.clear()
        self._folded = 0

    def _fold_into(self, mean: RunningMean) -> None:
        if not self._losses:
            return
        losses, total = torch.stack(self._losses).float(), sum(self._sizes)
        if self._sizes.count(self._sizes[0]) == len(self._sizes):  # no weights to bring to the device
            mean.update(losses.mean(), total)
        else:
            mean.update((losses * torch.tensor(self._sizes, device=losses.device)).sum() / total, total)

    def state_dict(self) -> dict[str, Any]:
        """The mean so far, and the losses that are not in it yet."""
        losses = torch.stack(self._losses) if self._losses else None
        return {"mean": self._mean.state_dict(), "folded": self._folded, "losses": losses, "sizes": list(self._sizes)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with a saved mean."""
        self._mean.load_state_dict(state["mean"])
        self._folded, self._sizes = state["folded"], list(state["sizes"])
        self._losses = [] if state["losses"] is None else list(state["losses"].unbind())


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
