"""The weights that a run validated with: those of its model, or the average that a handler kept of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from pulsetrain.engine.checkpoint.frozen import left_out_of
from pulsetrain.engine.errors import CheckpointError
from pulsetrain.engine.logs import get_logger

__all__ = ["validated_weights"]

_TRAINED = "averages=False (--no-averages) loads the weights that were trained"


def validated_weights(checkpoint: Mapping[str, Any], place: str) -> Mapping[str, Any]:
    """The entry "model" of a checkpoint, with the averages of EMA or SWA if the run validated with them.

    A log line names the handler. Before its first average, a handler has none. The average of a schedule-free optimizer
    is not in the checkpoint: a warning says so.

    >>> saved = {"averaged_at": [1, 1], "average": {"number_averaged": 1, "weights": {"bias": torch.ones(1)}}}
    >>> handlers = {"EMA": {"settings": "EMA: validate=False", "state": saved}}
    >>> validated_weights({"model": {"bias": torch.zeros(1)}, "handlers": handlers}, "here")
    {'bias': tensor([0.])}

    Args:
        checkpoint: with whole tensors, as `load_checkpoint` returns it.
        place: the start of an error message.

    Raises:
        CheckpointError: the average is not of these weights, or lacks the statistics of batch normalisation.
    """
    weights: Mapping[str, Any] = checkpoint["model"]
    averages: dict[str, Any] = {}
    for handler, path, state in _validated_averages(checkpoint):
        if not state.get("measured", True):
            raise CheckpointError(
                f"{place}: {handler} has not measured the statistics of batch normalisation with its average, since no "
                f"validation came after it; choose a checkpoint that was saved after a validation, or {_TRAINED}"
            )
        averages |= {f"{path}.{name}" if path else name: each for name, each in state["average"]["weights"].items()}
        get_logger("engine").info(f"loading the averages with which the run validated; {_TRAINED}", handler=handler)
    left_out = left_out_of(checkpoint)
    odd = averages.keys() - weights.keys() - set(left_out["names"] if left_out is not None else ())
    if odd:
        names = ", ".join(sorted(odd))
        raise CheckpointError(f"{place}: there are averages of {names}, which the model's weights lack; {_TRAINED}")
    if not averages and _is_schedule_free(checkpoint):
        get_logger("engine").warning(
            "loading the weights that were trained: the run validated with the average of its schedule-free optimizer, "
            "which a checkpoint does not hold; BestModel(folder=...) writes the weights that were validated"
        )
    return {name: averages.get(_averaged_as(name, weights, averages), each) for name, each in weights.items()}


def _validated_averages(checkpoint: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Each handler that averaged what was validated, the path of that module in the model, and its state."""
    handlers = checkpoint.get("handlers")
    for handler, entry in handlers.items() if isinstance(handlers, Mapping) else ():
        state = entry.get("state", entry) if isinstance(entry, Mapping) else None  # formats 3 and 4: the state alone
        if not isinstance(state, Mapping) or not {"averaged_at", "average"} <= state.keys():
            continue
        if not state["average"] or not state["average"]["number_averaged"]:
            continue
        if "validates" in state:
            path = state["validates"]
        else:  # saved before that was noted
            path = None if "validate=False" in str(entry.get("settings")) else ""
        if path is not None:
            yield str(handler), path, state


def _averaged_as(name: str, weights: Mapping[str, Any], averages: Mapping[str, Any]) -> str:
    """The name under which a tensor was averaged: a shared one has a single average. Its own if there is none."""
    value = weights[name]
    if name in averages or not isinstance(value, Tensor) or not value.is_floating_point():
        return name
    # by value: a checkpoint of shards has a copy for each name; of two tensors that are equal by chance, such as
    # biases that are not trained, the averages are equal, too
    return next((other for other in averages if other in weights and _are_equal(value, weights[other])), name)


def _are_equal(one: Tensor, other: object) -> bool:
    return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)


def _is_schedule_free(checkpoint: Mapping[str, Any]) -> bool:
    optimizer = checkpoint.get("optimizer")
    groups = optimizer.get("param_groups") if isinstance(optimizer, Mapping) else None
    return isinstance(groups, list) and any(group.get("train_mode") for group in groups)
