"""Which of a run's current metrics a checkpoint can hold: plain values and tensors, also in containers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pulsetrain.engine.checkpoint.plain import plain
from pulsetrain.engine.errors import CheckpointError
from pulsetrain.engine.named_values import NamedValues

__all__ = ["metrics_to_save", "unsavable_metrics"]

_PLAIN = (bool, int, float, str, type(None))


def metrics_to_save(metrics: Mapping[str, object]) -> dict[str, Any]:
    """Copies of the metrics that come back as they are, or as a number where an array of one element was.

    >>> metrics_to_save({"rounds": 3, "best": [0.5], "probe": object()})
    {'rounds': 3, 'best': [0.5]}
    """
    found = {name: _savable(name, value) for name, value in metrics.items()}
    return {name: held[0] for name, held in found.items() if held}


def unsavable_metrics(metrics: Mapping[str, object]) -> dict[str, object]:
    """The other ones."""
    return {name: value for name, value in metrics.items() if not _savable(name, value)}


def _savable(name: str, value: Any) -> tuple[Any, ...]:
    """The copy as a tuple, which is empty if there is none."""
    if not _is_whole(value):
        try:
            value = value.item()  # of numpy, or another library of arrays
        except Exception:  # whatever the user has put there has none, or has more elements
            return ()
    try:
        return (_copy(plain({name: value})[name]),)
    except CheckpointError:
        return ()


def _is_whole(value: object) -> bool:
    """Whether it comes back as what it is."""
    if type(value) is dict or type(value) is NamedValues:
        return all(type(key) in _PLAIN and _is_whole(each) for key, each in value.items())
    if type(value) in (list, tuple):
        return all(map(_is_whole, value))  # type: ignore[call-overload]  # a list or a tuple
    return type(value) in (*_PLAIN, torch.Tensor)


def _copy(value: Any) -> Any:
    """Apart from the run's own, which continues to change; of tensors, without their graphs."""
    if isinstance(value, dict):
        return {key: _copy(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_copy, value))
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
