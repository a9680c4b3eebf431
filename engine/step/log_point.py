"""What a strategy reports besides its loss: the parts of the loss, and metrics of the outputs at hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pulsetrain.engine.arrays import Array, stop_gradient
from pulsetrain.engine.errors import ArgumentTypeError
from pulsetrain.engine.step.first_batch import FirstBatch
from pulsetrain.engine.step.model_call import evaluating
from pulsetrain.engine.step.protocols import TrainingBatch, TrainingStrategy, describe

__all__ = ["LogPoint", "measured", "split_loss"]


class LogPoint:
    """A strategy in the step before a log point: with the loss, it computes the metrics of the same outputs.

    Any backend can be given one in the strategy's place. Nothing but the metrics is kept of the outputs.

    >>> class Absolute:
    ...     def compute_loss(self, outputs, batch):
    ...         return (outputs - batch.targets).square().mean(), {"bias": outputs.mean()}
    ...     def compute_metrics(self, outputs, batch):
    ...         return {"mae": (outputs - batch.targets).abs().mean()}
    >>> point = LogPoint(Absolute())
    >>> point.compute_loss(torch.ones(4), TrainingBatch(None, torch.full((4,), 3.0), samples=4))
    tensor(4.)
    >>> point.metrics, point.size
    ({'bias': tensor(1.), 'mae': tensor(2.)}, 4)

    Args:
        strategy: computes the loss; its values may be checked.
    """

    def __init__(self, strategy: TrainingStrategy) -> None:
        self.strategy = strategy
        self.metrics: Mapping[str, Array] = {}
        self.size: int | Tensor = 0  # what the metrics are means over

    def keep(self, metrics: Mapping[str, Array], batch: TrainingBatch) -> None:
        """Keep the metrics of a batch."""
        self.metrics, self.size = metrics, batch.size

    def compute_loss(self, outputs: object, batch: TrainingBatch) -> Array:
        """The strategy's loss alone; computing the metrics leaves torch's generators as they are."""
        loss, parts = split_loss(self.strategy.compute_loss(outputs, batch), self.strategy)
        devices = [loss.device] if isinstance(loss, Tensor) and loss.is_cuda else []
        with evaluating(self.strategy), torch.random.fork_rng(devices):  # else later draws would depend on who logs
            self.keep(measured(self.strategy, outputs, batch, parts), batch)
        return loss

    def __getattr__(self, name: str) -> Any:  # what else a backend asks of its strategy
        return getattr(self.strategy, name)


def split_loss(found: Any, strategy: object) -> tuple[Array, Mapping[str, Array]]:
    """The loss that `compute_loss` returned, and its parts by name; there are none if it returned the loss alone.

    >>> split_loss((torch.tensor(3.0), {"kl": torch.tensor(1.0)}), "a strategy")
    (tensor(3.), {'kl': tensor(1.)})

    Raises:
        TypeError: neither a loss nor a pair of a loss and its parts, or a part is not one number.
    """
    if not isinstance(found, (tuple, list, Mapping)):
        return found, {}
    place = f"{type(_named(strategy)).__name__}.compute_loss"
    if isinstance(found, Mapping) or len(found) != 2 or not isinstance(found[1], Mapping):
        raise ArgumentTypeError(
            f"{place}: returned {describe(found)}; needs the loss, of shape (), or a pair of the loss and a mapping "
            "with its parts by name"
        )
    loss, parts = found
    for name, value in parts.items():
        if not isinstance(name, str) or name in ("", "loss"):
            raise ArgumentTypeError(f"{place}: names a part {name!r}; needs text other than 'loss'")
        _require_number(place, name, value)
    return loss, parts


def measured(
    strategy: TrainingStrategy, outputs: object, batch: TrainingBatch, parts: Mapping[str, Array]
) -> dict[str, Array]:
    """The parts of a loss, and the strategy's metrics of the outputs: numbers, or arrays of shape () without gradients.

    Raises:
        TypeError: a metric is not one number.
    """
    place = f"{type(_named(strategy)).__name__}.compute_metrics"
    try:
        found = {**parts, **strategy.compute_metrics(outputs, batch)}
        for name, value in found.items():
            _require_number(place, name, value)
    except Exception as error:
        error.add_note(
            f"in {place}, for the metrics of a training step; TrainingConfig(log_strategy_metrics=False) leaves them "
            "to validation"
        )
        raise
    return {name: stop_gradient(value) if hasattr(value, "shape") else value for name, value in found.items()}


def _require_number(place: str, name: str, value: object) -> None:
    shape = getattr(value, "shape", None)
    if shape is None and isinstance(value, (bool, int, float)):
        return
    if shape is None or tuple(shape) not in ((), (1,)):
        raise ArgumentTypeError(f"{place}: gave {describe(value)} as {name!r}; needs one number, of shape ()")


def _named(strategy: object) -> object:
    """The strategy that a message names."""
    return strategy.strategy if isinstance(strategy, (FirstBatch, LogPoint)) else strategy
