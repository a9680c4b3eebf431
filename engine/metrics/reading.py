"""Finds metrics by name and copies their values to the host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor

from pulsetrain.engine.errors import MetricNotFoundError
from pulsetrain.engine.named_values import UnknownMetricError

__all__ = ["canonical", "nothing_yet", "number_on_host", "to_host"]


def canonical(name: str, known: Iterable[str], *, place: str = "") -> str:
    """The full name of a metric among known names, from itself or its underscore form.

    >>> canonical("val_loss", ["train/loss", "val/loss"])
    'val/loss'

    Raises:
        MetricNotFoundError: none or several match; names the metrics that exist.
    """
    names = list(known)
    if name in names:
        return name
    flat = name.replace("/", "_")
    matches = [other for other in names if other.replace("/", "_") == flat]
    if len(matches) == 1:
        return matches[0]
    raise UnknownMetricError.among(names, name, place, matches)


def to_host(tensors: Sequence[Tensor]) -> list[float]:
    """The values of tensors of shape (), in order, with one copy and one wait per device and dtype.

    >>> to_host([torch.tensor(1.0), torch.tensor(2), torch.tensor(3.0)])
    [1.0, 2, 3.0]
    """
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, tensor.dtype), []).append(index)
    values = [0.0] * len(tensors)
    for indices in groups.values():
        copied = torch.stack([tensors[index].detach() for index in indices]).tolist()
        for index, value in zip(indices, copied, strict=True):
            values[index] = value
    return values


def number_on_host(tensor: Tensor) -> float:
    """The value of a CPU tensor of shape (), which is there already: no operator runs, as `item()` would run one.

    >>> number_on_host(torch.tensor(0.5))
    0.5
    """
    return cast(float, tensor.tolist())


def nothing_yet(place: str) -> MetricNotFoundError:
    """The error for a metric that is read before its first update."""
    return MetricNotFoundError(f"{place}.compute(): has no value before the first update(); was the data empty?")
