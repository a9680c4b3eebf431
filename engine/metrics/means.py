"""Weighted means over a run, and the perplexity and bits per byte of a mean loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from pulsetrain.engine.argument_checks import check_positive
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.metrics.reading import nothing_yet

__all__ = ["RunningMean", "bits_per_byte", "perplexity"]

Number = TypeVar("Number", float, Tensor)


class RunningMean:
    """`sum(weight * value) / sum(weight)`, summed in float64 on the device of the values (float32 on mps).

    It is NaN if all weights are zero.

    >>> mean = RunningMean()
    >>> mean.update(1.0, weight=3)
    >>> mean.update(torch.tensor(5.0))
    >>> mean.compute()
    2.0
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Discards all values."""
        # never changed in place, so a state that was returned stays valid
        self._total: Tensor | float | None = None
        self._weight: Tensor | float = 0.0

    def update(self, value: Tensor | float, weight: Tensor | float = 1.0) -> None:
        """Adds a value, without waiting for the device.

        Args:
            value: a number or a tensor of one element, on any device.
            weight: for example the number of samples in the mean `value`; a tensor's value is not checked.

        Raises:
            ValueError: there is more than one value, or the weight is negative or not finite.
        """
        if not isinstance(weight, Tensor) and not 0.0 <= weight < math.inf:
            raise ConfigurationError("needs a finite number of at least 0", "RunningMean.update", weight=weight)
        value, weight = _wide("value", value), _wide("weight", weight)
        if isinstance(weight, Tensor):  # the mean of nothing is nan, which must not enter the sum with weight 0
            weighted: Tensor | float = torch.where(weight > 0, value * weight, 0.0)
        else:
            weighted = value * weight if weight else 0.0
        self._total = weighted if self._total is None else self._total + weighted
        self._weight = self._weight + weight

    def mean(self) -> Tensor:
        """The mean as a tensor of shape (), on the device.

        Raises:
            MetricNotFoundError: there was no update yet.
        """
        if self._total is None:
            raise nothing_yet("RunningMean")
        # as a tensor even on the host: 0 / 0 is NaN for tensors and an exception for floats
        total = self._total if isinstance(self._total, Tensor) else torch.tensor(self._total, dtype=torch.float64)
        return total / self._weight

    def sums(self) -> tuple[float, float]:
        """The weighted values and the weights, added up, as numbers; waits for the device.

        >>> mean = RunningMean()
        >>> mean.update(1.5, weight=2)
        >>> mean.sums()
        (3.0, 2.0)
        """
        return float(self._total or 0.0), float(self._weight)

    def compute(self) -> float:
        """The mean as a number; waits for the device.

        Raises:
            MetricNotFoundError: there was no update yet.
        """
        return self.mean().item()

    def state_dict(self) -> dict[str, Tensor | float | None]:
        """The sums of the weighted values and of the weights."""
        return {"total": self._total, "weight": self._weight}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues with the saved sums."""
        self._total, self._weight = state["total"], state["weight"]


def perplexity(mean_loss: Number) -> Number:
    """`exp(mean_loss)`: the number of equally likely tokens with the same loss; infinite on overflow.

    >>> round(perplexity(math.log(50)), 6)
    50.0

    Args:
        mean_loss: nats per token; a tensor stays on its device.
    """
    if isinstance(mean_loss, Tensor):
        return mean_loss.exp()
    try:
        return math.exp(mean_loss)
    except OverflowError:
        return math.inf


def bits_per_byte(mean_loss: Number, bytes_per_token: float = 1.0) -> Number:
    """`mean_loss / (ln 2 * bytes_per_token)`: the bits that the model needs per byte of text.

    >>> bits_per_byte(math.log(2) * 3.0, bytes_per_token=4.0)
    0.75

    Args:
        mean_loss: nats per token; a tensor stays on its device.
        bytes_per_token: mean length of a token in bytes of UTF-8; 1 if tokens are bytes.

    Raises:
        ConfigurationError: bytes_per_token is not positive and finite.
    """
    check_positive("bits_per_byte", "bytes_per_token", bytes_per_token)
    return mean_loss / (math.log(2) * bytes_per_token)


def _wide(argument: str, value: Tensor | float) -> Tensor | float:
    """The value in float64, shape ()."""
    if not isinstance(value, Tensor):
        return float(value)
    if value.numel() != 1:
        raise ValueError(
            f"RunningMean.update({argument} of shape {tuple(value.shape)}): needs one number; pass {argument}.mean() "
            "and the number of elements as the weight"
        )
    return value.detach().reshape(()).to(torch.float32 if value.device.type == "mps" else torch.float64)
