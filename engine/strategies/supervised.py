"""Supervised learning: pairs of inputs and targets, and a loss between the model's outputs and the targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from torch import Tensor

from pulsetrain.engine.arrays import Array, is_array, require_tensor
from pulsetrain.engine.errors import ArgumentTypeError
from pulsetrain.engine.losses import check_first_batch, check_first_loss, get_loss, ignored_label
from pulsetrain.engine.step.protocols import TrainingBatch, Tree, describe

__all__ = ["SupervisedStrategy"]


class SupervisedStrategy:
    """Learns targets from inputs; a batch is a pair (inputs, targets).

    A batch's weight is the number of elements that its loss is a mean over: the elements of the targets, and for labels
    with more than one dimension (such as tokens) or an explicit `ignore_index`, those that are not ignored.

    >>> import torch
    >>> strategy = SupervisedStrategy("mse")
    >>> batch = strategy.prepare_batch((torch.ones(4, 2), torch.zeros(4, 1)))
    >>> strategy.compute_loss(torch.full((4, 1), 3.0), batch)
    tensor(9.)

    Args:
        loss: a name (cross_entropy, mse ...), or a callable (outputs, targets) -> scalar mean over the targets. Named
            losses work with torch tensors and jax arrays.
        loss_options: keywords of a named loss, such as label_smoothing.

    Raises:
        ConfigurationError: a name or option is unknown; the message lists the choices.
    """

    def __init__(
        self,
        loss: str | Callable[[Tree, Tree], Tensor] = "cross_entropy",
        loss_options: Mapping[str, object] | None = None,
    ) -> None:
        self.loss_name = loss if isinstance(loss, str) else getattr(loss, "__name__", type(loss).__name__)
        self._loss = get_loss(loss, **(loss_options or {}))
        self._ignored = ignored_label(self._loss)
        # a class label that nobody has named as ignored is taken to be a label: counting costs every step
        self._counts_labels = self._ignored not in (None, -100) or "ignore_index" in (loss_options or {})

    def prepare_batch(self, batch: object) -> TrainingBatch:
        """The pair as inputs and targets; torch tensors, also for other backends.

        Raises:
            TypeError: the batch is not a pair, or contains an array of another library.
        """
        if isinstance(batch, TrainingBatch):
            return batch
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise TypeError(
                f"SupervisedStrategy: a batch of {type(batch).__name__} cannot be split; let the loader return pairs "
                "(inputs, targets), or write a strategy whose prepare_batch accepts it"
            )
        inputs, targets = batch
        if not isinstance(inputs, Tensor):
            require_tensor("SupervisedStrategy", "inputs", inputs)
        if not isinstance(targets, Tensor):
            require_tensor("SupervisedStrategy", "targets", targets)
            return TrainingBatch(inputs, targets, _rows(inputs))
        samples = targets.shape[0] if targets.ndim else 1
        if targets.ndim == 1 and not self._counts_labels:
            return TrainingBatch(inputs, targets, samples)
        if self._ignored is not None and not targets.is_floating_point():
            return TrainingBatch(inputs, targets, samples, 0, (targets != self._ignored).sum())
        return TrainingBatch(inputs, targets, samples, 0, targets.numel())

    def check_batch(self, outputs: object, batch: TrainingBatch) -> None:
        """Rejects targets whose values are invalid for the loss; it waits for the device.

        Args:
            outputs: the model's outputs, or any object with their `shape`: a backend that compiles `compute_loss`,
                where values cannot be read, calls this beforehand.

        Raises:
            ValueError: names the first such target, its index, and how many there are.
        """
        check_first_batch(self._loss, outputs, batch.targets)

    def compute_loss(self, outputs: object, batch: TrainingBatch, check: bool = False) -> Array:
        """The loss between outputs and targets, shape (); `check` reads the values of targets and loss."""
        try:
            if check:  # before the loss: a label outside the classes brings a GPU down
                self.check_batch(outputs, batch)
            loss = self._loss(outputs, batch.targets)
        except Exception as error:
            error.add_note(
                f"in SupervisedStrategy(loss={self.loss_name!r}), given the model's output {describe(outputs)}"
            )
            raise
        if (not isinstance(loss, Tensor) or loss.ndim) and not _is_scalar_array(loss, batch.targets):
            rule = f"returned {describe(loss)}; needs a tensor of shape ()"
            raise ArgumentTypeError(rule, "SupervisedStrategy", loss=self.loss_name)
        if check:
            check_first_loss(loss, batch.targets, self.loss_name)
        return loss

    def compute_metrics(self, outputs: object, batch: TrainingBatch) -> Mapping[str, Tensor]:
        """No metrics besides the loss."""
        return {}


def _is_scalar_array(loss: Array, targets: object) -> bool:
    """Whether it is a scalar of another library; numpy's only with numpy targets, since it has no gradient."""
    if isinstance(loss, (np.ndarray, np.generic)) and not isinstance(targets, np.ndarray):
        return False
    return is_array(loss) and not loss.ndim


def _rows(value: object) -> int:
    if isinstance(value, Tensor):
        return value.shape[0] if value.ndim else 1
    if isinstance(value, Mapping):
        return _rows(next(iter(value.values())))
    return _rows(value[0]) if isinstance(value, (tuple, list)) else 1
