"""Running statistics of a training run between two readings: mean losses, samples and tokens a second."""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import copy
from math import isfinite
from typing import TypeVar

import torch
from torch import Tensor

from pulsetrain.engine.metrics import RunningMean
from pulsetrain.engine.metrics.reading import number_on_host
from pulsetrain.state.part import StateDict

__all__ = ["Losses", "Rate"]

T = TypeVar("T")

_FOLD = 256  # losses that are kept apart at most; more are folded into one mean on the device


class Losses:
    """The steps' losses, for two readers: the mean since the last log point, and the mean of the epoch.

    Adding costs two list appends. The order in which losses are summed does not depend on when they are read or saved.

    Losses on the host are kept as numbers: a tensor that stays lies among the activations of its step, where the heap
    then has no room for those of the next one.

    >>> losses = Losses()
    >>> losses.add(torch.tensor(1.0), size=1)
    >>> losses.add(torch.tensor(4.0), size=2)
    >>> losses.consume("log").item(), losses.count("log"), losses.count("epoch")
    (3.0, 0, 2)
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget every loss, for both readers."""
        self._losses: list[Tensor | float] = []  # since both were folded last
        self._later: tuple[Callable[[], Tensor], int | Tensor] | None = None
        self._dtype = torch.float32  # of those on the host
        self._sizes: list[int | Tensor] = []
        self._since = {"log": 0, "epoch": 0}  # which of them are the reader's
        self._means = {"log": RunningMean(), "epoch": RunningMean()}  # of those before
        self._folded = {"log": 0, "epoch": 0}

    def add(self, loss: Tensor, size: int | Tensor) -> None:
        """Add one loss, shape (), which stays on its device: a mean over `size`, a number or of shape () there."""
        if self._later is not None:
            self._settle()
        if loss.is_cpu:
            self._losses.append(number_on_host(loss))
            self._dtype = loss.dtype
        else:
            self._losses.append(loss)
        self._sizes.append(size)
        if len(self._losses) == _FOLD:
            values = self._stacked(self._losses).float()
            for reader, mean in self._means.items():
                self._fold(reader, mean, values)
                self._folded[reader] += _FOLD - self._since[reader]
                self._since[reader] = 0
            self._losses.clear()
            self._sizes.clear()

    def add_later(self, read: Callable[[], Tensor], size: int | Tensor) -> None:
        """Add the loss of a step that is still being computed: it is read with the next one, or when one is needed.

        Meanwhile the host prepares the next step.
        """
        self._settle()
        self._later = read, size

    def _settle(self) -> None:
        later, self._later = self._later, None
        if later is not None:
            read, size = later
            self.add(read(), size)

    def count(self, reader: str) -> int:
        """How many losses the reader, "log" or "epoch", has not consumed."""
        self._settle()
        return self._folded[reader] + len(self._losses) - self._since[reader]

    def peek(self, reader: str) -> Tensor:
        """The reader's mean, shape (), on the device."""
        self._settle()
        whole = copy(self._means[reader]) if self._folded[reader] else RunningMean()
        self._fold(reader, whole)
        return whole.mean()

    def are_finite(self, reader: str) -> bool:
        """Whether the reader's mean is finite; without an operator on tensors where the losses are on the host.

        >>> losses = Losses()
        >>> losses.add(torch.tensor(1.0), size=1)
        >>> losses.add(torch.tensor(float("nan")), size=1)
        >>> losses.are_finite("log")
        False
        """
        self._settle()
        losses = self._losses[self._since[reader] :]
        if not self._folded[reader] and all(isinstance(loss, float) and isfinite(loss) for loss in losses):
            return True
        return isfinite(self.peek(reader))  # one wait for the device, where the losses are there

    def consume(self, reader: str) -> Tensor:
        """The reader's mean, as `peek`; its next mean starts after these losses."""
        mean = self.peek(reader)
        self.forget(reader)
        return mean

    def sums(self, reader: str) -> tuple[float, float]:
        """The losses times their sizes, and the sizes, added up for the reader; waits for the device."""
        self._settle()
        whole = copy(self._means[reader])
        self._fold(reader, whole)
        return whole.sums()

    def forget(self, reader: str) -> None:
        """Start this reader's next mean here."""
        self._settle()
        self._means[reader].reset()
        self._folded[reader], self._since[reader] = 0, len(self._losses)

    def _fold(self, reader: str, mean: RunningMean, values: Tensor | None = None) -> None:
        """Fold the losses that are kept apart into the reader's mean; `values` are all of them, if already stacked."""
        since = self._since[reader]
        sizes = self._sizes[since:]
        if not sizes:
            return
        values = self._stacked(self._losses[since:]).float() if values is None else values[since:]
        if {*map(type, sizes)} != {int} and any(isinstance(size, Tensor) for size in sizes):
            weights = torch.stack([torch.as_tensor(size, device=values.device) for size in sizes])
            counted = torch.where(weights > 0, values * weights, 0.0)  # a batch of ignored targets has no loss: nan
            mean.update(counted.sum() / weights.sum(), weights.sum())
        elif sizes.count(sizes[0]) == len(sizes):  # no weights to bring to the device
            # on the host as a number, whose sums are those of a tensor of float64 and take less time
            mean.update(number_on_host(values.mean()) if values.is_cpu else values.mean(), sizes[0] * len(sizes))
        else:
            mean.update((values * torch.tensor(sizes, device=values.device)).sum() / sum(sizes), sum(sizes))

    def _stacked(self, losses: list[Tensor | float]) -> Tensor:
        if {*map(type, losses)} == {float}:  # on the host
            return torch.tensor(losses, dtype=self._dtype)
        return torch.stack([loss if isinstance(loss, Tensor) else torch.tensor(loss) for loss in losses])

    def state_dict(self) -> StateDict:
        """The means so far, and the losses that are not folded into them yet."""
        self._settle()
        return {
            "means": {reader: mean.state_dict() for reader, mean in self._means.items()},
            "folded": dict(self._folded),
            "since": dict(self._since),
            "losses": self._stacked(self._losses) if self._losses else None,
            "sizes": list(self._sizes),
        }

    def load_state_dict(self, state: StateDict, device: torch.device | str) -> None:
        """Continue saved means, on the device where the next losses will be."""
        self._later = None
        for reader, saved in state["means"].items():
            self._means[reader].load_state_dict({name: _on(device, value) for name, value in saved.items()})
        self._folded, self._since = dict(state["folded"]), dict(state["since"])
        losses = None if state["losses"] is None else state["losses"].to(device)
        self._losses = []
        if losses is not None:
            self._losses = losses.tolist() if losses.is_cpu else list(losses.unbind())
            self._dtype = losses.dtype
        self._sizes = [_on(device, size) for size in state["sizes"]]

    def absorb(self, state: StateDict) -> None:
        """Add what another process has saved to the means."""
        other = Losses()
        other.load_state_dict(state, "cpu")
        for reader, mean in self._means.items():
            total, weight = other.sums(reader)
            if weight:
                mean.update(total / weight, weight)
                self._folded[reader] += other.count(reader)


def _on(device: torch.device | str, value: T) -> T | Tensor:
    return value.to(device) if isinstance(value, Tensor) else value


class Rate:
    """Samples and tokens a second between two readings, without the time spent validating."""

    paused: float

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
        if samples == self._samples:  # nothing was trained: a resumed run reports what another process has trained
            return {}
        seconds = max(time.perf_counter() - self._since - self.paused, 1e-9)
        rates = {"samples_per_second": (samples - self._samples) / seconds}
        if tokens:
            rates["tokens_per_second"] = (tokens - self._tokens) / seconds
        self.restart(samples, tokens)
        return rates
