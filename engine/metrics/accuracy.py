"""Accuracy over samples, over the k best classes, and over tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pulsetrain.engine.argument_checks import check_whole_number
from pulsetrain.engine.class_indices import check_class_indices, check_indices
from pulsetrain.engine.errors import ArgumentTypeError, refused
from pulsetrain.engine.metrics.reading import nothing_yet

__all__ = ["Accuracy", "TokenAccuracy", "TopKAccuracy"]


class _ShareCorrect:
    """Counts correct and all predictions as integers on the device, exact for any number; NaN if nothing counted."""

    higher_is_better = True

    def __init__(self, ignore_index: int | None = None) -> None:
        self.ignore_index = ignore_index
        if ignore_index is not None and type(ignore_index) is not int:
            raise refused(self, "needs a whole number; or None to count all", "ignore_index")
        self.reset()

    def reset(self) -> None:
        """Discards all counts."""
        # never changed in place, so a state that was returned stays valid
        self._right: Tensor | None = None
        self._counted: Tensor | int = 0

    def update(self, y_pred: Tensor, y: Tensor) -> None:
        """Adds a batch, without waiting for the device.

        Args:
            y_pred: logits or probabilities, shape (..., classes).
            y: class indices, shape (...).

        Raises:
            ValueError: the shapes do not fit, or there are fewer than k classes.
            TypeError: y does not hold class indices.
        """
        self._check(y_pred, y)
        right = self._hits(y_pred, y)
        counted: Tensor | int = y.numel()
        if self.ignore_index is not None:
            kept = y != self.ignore_index
            right, counted = right & kept, kept.sum()
        self._right = right.sum() if self._right is None else self._right + right.sum()
        self._counted = self._counted + counted

    def compute(self) -> float:
        """The share of correct predictions, from 0 to 1; waits for the device.

        Raises:
            MetricNotFoundError: there was no update yet.
        """
        if self._right is None:
            raise nothing_yet(type(self).__name__)
        right, counted = int(self._right), int(self._counted)  # the second no longer waits
        return right / counted if counted else math.nan

    def state_dict(self) -> dict[str, Tensor | int | None]:
        """The two counts."""
        return {"right": self._right, "counted": self._counted}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues with the saved counts."""
        self._right, self._counted = state["right"], state["counted"]

    def _hits(self, y_pred: Tensor, y: Tensor) -> Tensor:
        """A mask of the correct predictions, the shape of y."""
        return y_pred.argmax(-1) == y

    def _check(self, y_pred: Tensor, y: Tensor) -> None:
        place = f"{type(self).__name__}.update"
        if not isinstance(y_pred, Tensor) or not isinstance(y, Tensor):
            raise ArgumentTypeError("needs two tensors", place, y_pred=type(y_pred), y=type(y))
        check_class_indices(
            place, y_pred, y, ("y_pred", "y"), "for binary logits pass (y_pred > 0).long() and y.long()"
        )


class Accuracy(_ShareCorrect):
    """The share of samples whose class has the highest score; ties are decided as `argmax` does.

    `y_pred` may also hold predicted classes: integers with the shape of y.

    >>> import torch
    >>> accuracy = Accuracy()
    >>> accuracy.update(torch.tensor([[2.0, 1.0], [0.0, 3.0]]), torch.tensor([0, 0]))
    >>> accuracy.compute()
    0.5

    Args:
        ignore_index: targets with this value do not count.
    """

    def _hits(self, y_pred: Tensor, y: Tensor) -> Tensor:
        return y_pred == y if y_pred.shape == y.shape else super()._hits(y_pred, y)

    def _check(self, y_pred: Tensor, y: Tensor) -> None:
        tensors = isinstance(y_pred, Tensor) and isinstance(y, Tensor)
        if tensors and y_pred.shape == y.shape and not y_pred.is_floating_point():
            check_indices("Accuracy.update", "y_pred", y_pred)
            check_indices("Accuracy.update", "y", y)
        else:
            super()._check(y_pred, y)


class TopKAccuracy(_ShareCorrect):
    """The share of samples whose class is among the k highest scores.

    >>> import torch
    >>> accuracy = TopKAccuracy(k=2)
    >>> accuracy.update(torch.tensor([[0.1, 0.2, 0.7], [0.7, 0.2, 0.1]]), torch.tensor([1, 2]))
    >>> accuracy.compute()
    0.5

    Args:
        k: the number of scores, at most the number of classes.
        ignore_index: targets with this value do not count.
    """

    def __init__(self, k: int = 5, ignore_index: int | None = None) -> None:
        check_whole_number("TopKAccuracy", "k", k)
        super().__init__(ignore_index)
        self.k = k

    def _hits(self, y_pred: Tensor, y: Tensor) -> Tensor:
        return (y_pred.topk(self.k, -1).indices == y.unsqueeze(-1)).any(-1)

    def _check(self, y_pred: Tensor, y: Tensor) -> None:
        super()._check(y_pred, y)
        if self.k > y_pred.shape[-1]:
            rule = f"y_pred of shape {tuple(y_pred.shape)} has only {y_pred.shape[-1]} classes; choose a smaller k"
            raise refused(self, rule, "k")


class TokenAccuracy(_ShareCorrect):
    """The share of tokens that are predicted correctly, without padding.

    >>> import torch
    >>> accuracy = TokenAccuracy()
    >>> accuracy.update(torch.eye(3).unsqueeze(0), torch.tensor([[0, 2, -100]]))  # predicts 0, 1, 2
    >>> accuracy.compute()
    0.5

    Args:
        ignore_index: targets with this value do not count.
    """

    def __init__(self, ignore_index: int = -100) -> None:
        super().__init__(ignore_index)
