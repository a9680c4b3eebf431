"""The part of the predictions that is right: of samples, among the best k, of tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pulsetrain.engine.class_indices import check_indices, check_labels_fit
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.metrics.reading import nothing_yet

__all__ = ["Accuracy", "TokenAccuracy", "TopKAccuracy"]


class _PartRight:
    """Two whole numbers on the device, right and counted: exact over any number of samples; NaN where none counted."""

    def __init__(self, ignore_index: int | None) -> None:
        if ignore_index is not None and type(ignore_index) is not int:
            raise ConfigurationError(
                f"{type(self).__name__}(ignore_index={ignore_index!r}): needs a whole number; or None to count all"
            )
        self.ignore_index = ignore_index
        self.reset()

    def reset(self) -> None:
        """Forget what was seen."""
        # Never changed in place: a state that was handed out stays as it was.
        self._right: Tensor | None = None
        self._counted: Tensor | int = 0

    def update(self, y_pred: Tensor, y: Tensor) -> None:
        """One more batch, without waiting for the device.

        Args:
            y_pred: logits or probabilities, shape (..., classes).
            y: class indices, shape (...).

        Raises:
            ValueError: the shapes do not fit, or there are fewer than k classes.
            TypeError: y holds no class indices.
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
        """The part that is right, from 0 to 1, brought to the host.

        Raises:
            MetricNotFoundError: nothing was counted yet.
        """
        if self._right is None:
            raise nothing_yet(type(self).__name__)
        right, counted = int(self._right), int(self._counted)  # the second does not wait any more
        return right / counted if counted else math.nan

    def state_dict(self) -> dict[str, Any]:
        return {"right": self._right, "counted": self._counted}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._right, self._counted = state["right"], state["counted"]

    def _hits(self, y_pred: Tensor, y: Tensor) -> Tensor:
        """Which are right, shape of y."""
        return y_pred.argmax(-1) == y

    def _check(self, y_pred: Tensor, y: Tensor) -> None:
        place = f"{type(self).__name__}.update"
        if not isinstance(y_pred, Tensor) or not isinstance(y, Tensor):
            raise TypeError(f"{place}(y_pred={type(y_pred).__name__}, y={type(y).__name__}): needs two tensors")
        check_labels_fit(place, y_pred, y, ("y_pred", "y"), "for binary logits pass (y_pred > 0).long() and y.long()")


class Accuracy(_PartRight):
    """The part of the samples whose class is predicted; where scores are equal, the class that argmax takes.

    `y_pred` may also hold predicted classes: whole numbers, of the shape of y.

    Args:
        ignore_index: targets of this value do not count.
    """

    def __init__(self, ignore_index: int | None = None) -> None:
        super().__init__(ignore_index)

    def _hits(self, y_pred: Tensor, y: Tensor) -> Tensor:
        return y_pred == y if y_pred.shape == y.shape else super()._hits(y_pred, y)

    def _check(self, y_pred: Tensor, y: Tensor) -> None:
        tensors = isinstance(y_pred, Tensor) and isinstance(y, Tensor)
        if tensors and y_pred.shape == y.shape and not y_pred.is_floating_point():
            check_indices("Accuracy.update", "y_pred", y_pred)
            check_indices("Accuracy.update", "y", y)
        else:
            super()._check(y_pred, y)


class TopKAccuracy(_PartRight):
    """The part of the samples whose class is among the k with the highest scores.

    Args:
        k: how many; at most the number of classes.
        ignore_index: targets of this value do not count.
    """

    def __init__(self, k: int = 5, ignore_index: int | None = None) -> None:
        if type(k) is not int or k < 1:
            raise ConfigurationError(f"TopKAccuracy(k={k!r}): needs a whole number of at least 1")
        super().__init__(ignore_index)
        self.k = k

    def _hits(self, y_pred: Tensor, y: Tensor) -> Tensor:
        return (y_pred.topk(self.k, -1).indices == y.unsqueeze(-1)).any(-1)

    def _check(self, y_pred: Tensor, y: Tensor) -> None:
        super()._check(y_pred, y)
        if self.k > y_pred.shape[-1]:
            raise ValueError(
                f"TopKAccuracy(k={self.k}): y_pred of shape {tuple(y_pred.shape)} has {y_pred.shape[-1]} classes only; "
                "choose a smaller k"
            )


class TokenAccuracy(_PartRight):
    """The part of the tokens that is predicted, padding left out.

    Args:
        ignore_index: targets of this value do not count.
    """

    def __init__(self, ignore_index: int = -100) -> None:
        super().__init__(ignore_index)
