"""What losses and metrics read from the outputs of a model: logits, values, an auxiliary loss."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pulsetrain.engine.arrays import Array
from pulsetrain.engine.step.protocols import Tree, describe

__all__ = ["aux_loss_of", "logits_of", "predictions_of", "values_of"]


def predictions_of(outputs: Tree) -> Tree:
    """The logits in a `ModelOutput` of transformers; outputs of any other kind, or without logits, unchanged.

    >>> predictions_of({"logits": 1.0}), predictions_of((1.0, 2.0))
    ({'logits': 1.0}, (1.0, 2.0))
    """
    # without importing transformers: no other mapping has this method
    is_model_output = isinstance(outputs, Mapping) and hasattr(outputs, "to_tuple")
    return outputs["logits"] if is_model_output and "logits" in outputs else outputs


def logits_of(outputs: object) -> Array:
    """The logits, shape (batch, length, vocabulary), in the outputs of a model.

    A model may return them alone, first in a tuple, or under the name `logits`, as Hugging Face models do.

    >>> import torch
    >>> logits_of({"logits": torch.zeros(1, 2, 5), "loss": None}).shape
    torch.Size([1, 2, 5])

    Raises:
        TypeError: there are none.
    """
    if isinstance(outputs, Mapping):
        logits = outputs.get("logits")
    else:
        first = outputs[0] if isinstance(outputs, (tuple, list)) and outputs else outputs
        logits = getattr(outputs, "logits", first)
    if not hasattr(logits, "shape"):
        raise TypeError(
            f"the model returned {describe(outputs)}; needs logits of shape (batch, length, vocabulary), alone, first "
            "in a tuple, or as `.logits`"
        )
    return logits


def aux_loss_of(outputs: object) -> Array | None:
    """The auxiliary loss that a model returns under the name `aux_loss`, shape (); None if there is none.

    >>> import torch
    >>> aux_loss_of({"logits": torch.zeros(1, 2, 5), "aux_loss": torch.tensor(2.0)})
    tensor(2.)
    """
    return outputs.get("aux_loss") if isinstance(outputs, Mapping) else getattr(outputs, "aux_loss", None)


def values_of(outputs: object, shape: Iterable[int]) -> Array:
    """The values of a critic, with this shape: second in a tuple, or under the name `values`.

    >>> import torch
    >>> values_of((torch.zeros(1, 2, 5), torch.ones(1, 2, 1)), (1, 2))
    tensor([[1., 1.]])

    Raises:
        TypeError: there are none, or the shape differs.
    """
    values: Array = outputs.get("values") if isinstance(outputs, Mapping) else getattr(outputs, "values", None)
    if values is None and isinstance(outputs, (tuple, list)) and len(outputs) > 1:
        values = outputs[1]
    shape = tuple(shape)
    if hasattr(values, "shape") and tuple(values.shape) == (*shape, 1):
        values = values[..., 0]
    if not hasattr(values, "shape") or tuple(values.shape) != shape:
        raise TypeError(
            f"the model returned {describe(outputs)}; needs a pair (logits, values), values of shape {shape}; "
            "pulsetrain.engine.strategies.WithValueHead gives a language model such"
        )
    return values
