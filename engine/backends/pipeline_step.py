"""The micro-batches of one batch in a pipeline: what goes in, what comes out, and what each adds to the loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pulsetrain.engine.backends.micro_batches import MicroBatches, cut, filled, rows_of, tensors_in
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.step.log_point import split_loss
from pulsetrain.engine.step.model_call import call
from pulsetrain.engine.step.protocols import TrainingStrategy, Tree

__all__ = ["PipelineStep", "arguments_of"]

_Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


class PipelineStep:
    """The micro-batches of one batch, and what becomes of them.

    Args:
        inputs: positional arguments and keywords, of each micro-batch that has rows.
        count: of micro-batches; those that lack rows get the last row of the batch, which then does not count.
    """

    learns: bool

    def __init__(self, inputs: Sequence[_Arguments], count: int) -> None:
        rows = [rows_of(each) or 0 for each in inputs]
        self._size, self._rows = rows[0], [*rows, *[0] * (count - len(rows))]
        found = [filled(each, number, self._size) for each, number in zip(inputs, rows, strict=True)]
        self.inputs: list[_Arguments] = [*found, *[found[-1]] * (count - len(rows))]
        self.learns = False
        self.outputs: dict[int, Tree] = {}  # in the process with the last part
        self.losses: list[Tensor] = []  # likewise: what each has added to the batch's loss

    def learn(self, batch: MicroBatches, strategy: TrainingStrategy, scale: float | Tensor) -> None:
        """Compute the gradients of the batch's loss, times `scale`."""
        self.learns = True
        self._batches, self._strategy, self._scale, self._whole = batch.batches, strategy, scale, batch.size

    def kind(self) -> object:
        """Equal for steps that the same schedule can compute.

        Raises:
            ConfigurationError: the micro-batches differ in their shapes.
        """
        kinds = [tuple((each.shape, each.dtype) for each in tensors_in(inputs)) for inputs in self.inputs]
        for other in kinds[1:]:
            if other != kinds[0]:
                raise ConfigurationError(
                    f"the parts of a batch differ: one has tensors of {_shapes(kinds[0])}, another of "
                    f"{_shapes(other)}; pad all rows of a batch to one length",
                    "Topology",
                    microbatches=len(kinds),
                )
        return self.learns, kinds[0]

    def outputs_of(self, at: int) -> Tree:
        """The model's outputs for the rows of a micro-batch; they can be asked for once."""
        return cut(self.outputs.pop(at), self._size, self._rows[at])

    def loss(self, at: int) -> Tensor:
        """What a micro-batch adds to the batch's loss, which is a mean over all that counts in it."""
        outputs = self.outputs_of(at)
        if not self._rows[at]:
            return _nothing(outputs)
        batch = self._batches[at]
        if not (isinstance(batch.size, Tensor) and batch.size.device.type != "cpu") and not batch.size:
            return _nothing(outputs)  # its mean would be nan; on a device, asking would wait
        found, _ = split_loss(self._strategy.compute_loss(outputs, batch), self._strategy)
        loss: Tensor = found * _ratio(batch.size, self._whole, found)
        self.losses.append(loss.detach())
        return loss * self._scale


def arguments_of(inputs: Tree) -> _Arguments:
    """Positional arguments and keywords, as `call` gives them to a model."""
    found: _Arguments = call(lambda *args, **kwargs: (args, kwargs), inputs)
    return found


def _nothing(outputs: Tree) -> Tensor:
    """0, with gradients of 0 for all outputs."""
    return torch.stack([each.nan_to_num().sum() * 0.0 for each in tensors_in(outputs) if each.requires_grad]).sum()


def _ratio(size: float | Tensor, whole: float | Tensor, like: Tensor) -> float | Tensor:
    """In the loss's own dtype; divided in float64, since half precision would round the counts."""
    if not isinstance(size, Tensor) and not isinstance(whole, Tensor):
        return size / whole
    part, total = (torch.as_tensor(each, device=like.device).double() for each in (size, whole))
    return (part / torch.where(total > 0, total, torch.ones_like(total))).to(like.dtype)


def _shapes(kind: Sequence[tuple[torch.Size, torch.dtype]]) -> str:
    return ", ".join(str(tuple(shape)) for shape, _ in kind)
