"""Supervised learning: pairs of inputs and targets, and a loss between the model's outputs and the targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor, nn

from pulsetrain.engine.argument_checks import answer_unknown_keywords
from pulsetrain.engine.arrays import Array, at_least_float32, is_array, require_tensor
from pulsetrain.engine.errors import ArgumentTypeError, nearest, raised_by
from pulsetrain.engine.logs import get_logger
from pulsetrain.engine.losses import check_first_batch, check_first_loss, class_weights, get_loss, ignored_label
from pulsetrain.engine.step.log_point import split_loss
from pulsetrain.engine.step.model_outputs import predictions_of
from pulsetrain.engine.step.protocols import TrainingBatch, Tree, describe

if TYPE_CHECKING:
    from typing import Any

__all__ = ["SupervisedStrategy"]

_TARGETS = ("labels", "label")  # the names that data sets and models of Hugging Face use


class SupervisedStrategy:
    """Learns targets from inputs; a batch is a pair (inputs, targets), or a mapping with the targets under a name.

    The other fields of a mapping are keyword arguments of the model, as the collators of Hugging Face make them:
    {"input_ids", "attention_mask", "labels"}, or {"pixel_values", "labels"}.

    A batch's weight is the number of elements that its loss is a mean over: the elements of the targets, and for labels
    with more than one dimension (such as tokens) or an explicit `ignore_index`, those that are not ignored. With
    torch's cross entropy and a weight for each class, it is the sum of the weights of these labels, relative to the
    mean weight of the classes.

    >>> import torch
    >>> strategy = SupervisedStrategy("mse")
    >>> batch = strategy.prepare_batch((torch.ones(4, 2), torch.zeros(4, 1)))
    >>> strategy.compute_loss(torch.full((4, 1), 3.0), batch)
    tensor(9.)
    >>> batch = SupervisedStrategy().prepare_batch({"pixels": torch.ones(2, 3), "label": torch.tensor([0, 1])})
    >>> batch.inputs, batch.targets
    ({'pixels': tensor([[1., 1., 1.],
            [1., 1., 1.]])}, tensor([0, 1]))

    Args:
        loss: a name (cross_entropy, mse ...), or a callable (outputs, targets) -> scalar mean over the targets, or a
            pair of it and a mapping with its parts by name. Named losses work with torch tensors and jax arrays. They
            and torch's own losses get the logits where a model of transformers returns a `ModelOutput`; any other
            callable gets the outputs as they are.
        loss_options: keywords of a named loss, such as label_smoothing.
        target: the field of a mapping that holds the targets; None takes "labels" or "label".

    Raises:
        ConfigurationError: a name or option is unknown; the message lists the choices.
    """

    loss_name: str | Any

    def __init__(
        self,
        loss: str | Callable[[Tree, Tree], Tensor] = "cross_entropy",
        loss_options: Mapping[str, object] | None = None,
        target: str | None = None,
    ) -> None:
        self.loss_name = loss if isinstance(loss, str) else getattr(loss, "__name__", type(loss).__name__)
        with raised_by("SupervisedStrategy", _as_argument):
            self._loss = get_loss(loss, **(loss_options or {}))
        learnable = list(loss.parameters()) if isinstance(loss, nn.Module) else []
        if count := sum(each.numel() for each in learnable if each.requires_grad):
            get_logger("engine").warning(
                "the loss has parameters, and the optimizer updates those of the model only; make the loss a part of "
                "the model, or freeze it with requires_grad_(False)",
                loss=self.loss_name,
                parameters=count,
            )
        if target is not None and not isinstance(target, str):
            raise ArgumentTypeError("needs the name of a field", "SupervisedStrategy", target=target)
        self.target = target
        self._reads_logits = isinstance(loss, str) or _is_of_torch(loss)
        self._ignored = ignored_label(self._loss)
        # a class label that nobody has named as ignored is taken to be a label: counting costs every step
        self._counts_labels = self._ignored not in (None, -100) or "ignore_index" in (loss_options or {})
        self._weighs_classes = class_weights(self._loss) is not None

    def prepare_batch(self, batch: object) -> TrainingBatch:
        """The pair as inputs and targets; torch tensors, also for other backends.

        Raises:
            TypeError: the batch is neither a pair nor a mapping with targets, or contains an array of another library.
        """
        if isinstance(batch, (tuple, list)) and len(batch) == 2:
            inputs, targets = batch
        elif isinstance(batch, TrainingBatch):
            return batch
        else:
            inputs, targets = self._fields(batch)
        if not isinstance(inputs, Tensor):
            require_tensor("SupervisedStrategy", "inputs", inputs)
        if not isinstance(targets, Tensor):
            require_tensor("SupervisedStrategy", "targets", targets)
            return TrainingBatch(inputs, targets, _rows(inputs))
        samples = targets.shape[0] if targets.ndim else 1
        if targets.ndim == 1 and not (self._counts_labels or self._weighs_classes):
            return TrainingBatch(inputs, targets, samples)
        if self._ignored is not None and not targets.is_floating_point():
            return TrainingBatch(inputs, targets, samples, 0, self._size_of(targets, targets != self._ignored))
        return TrainingBatch(inputs, targets, samples, 0, targets.numel())

    def _size_of(self, labels: Tensor, counted: Tensor) -> Tensor:
        """What the mean over labels is divided by, shape (): how many count, or the sum of their relative weights."""
        given = class_weights(self._loss)
        if given is None:
            return counted.sum()
        weights: Tensor = at_least_float32(given.detach().to(labels.device))
        weights = weights / weights.mean()  # so that sizes are about those of batches whose labels are counted
        # a label outside the classes is left to the loss, which names it
        return (weights[labels.long().clamp(0, len(weights) - 1)] * counted).sum()

    def prepare_inputs(self, batch: Tree) -> Tree:
        """What the model is called with to predict: the batch without its targets, if it has any.

        >>> strategy = SupervisedStrategy()
        >>> strategy.prepare_inputs(("inputs", "targets")), strategy.prepare_inputs({"x": 1, "label": 2})
        ('inputs', {'x': 1})
        """
        if isinstance(batch, (tuple, list)) and len(batch) == 2:
            return batch[0]
        if isinstance(batch, TrainingBatch):
            return batch.inputs
        if isinstance(batch, Mapping):
            targets = _TARGETS if self.target is None else (self.target,)
            return {name: value for name, value in batch.items() if name not in targets}
        return batch

    def _fields(self, batch: object) -> tuple[dict[str, Tree], Tree]:
        """The inputs by name, and the targets, of a mapping."""
        fields = batch if isinstance(batch, Mapping) else {}
        wanted = _TARGETS if self.target is None else (self.target,)
        found = [name for name in wanted if name in fields]
        if len(found) == 1 and len(fields) > 1:
            for name, value in fields.items():
                require_tensor("SupervisedStrategy", name, value)
            return {name: value for name, value in fields.items() if name != found[0]}, fields[found[0]]
        names = ", ".join(map(str, fields)) or "no field"
        if len(found) > 1:
            raise TypeError(
                f"SupervisedStrategy: a batch with {names}: both {' and '.join(found)} may be the targets; name one, "
                f"as SupervisedStrategy(target={found[0]!r}), and let the loader drop the other"
            )
        expected = " or ".join(map(repr, wanted))
        if found:
            raise TypeError(
                f"SupervisedStrategy: a batch with {names} has targets and no inputs; let the loader return these too"
            )
        if isinstance(batch, Mapping):
            remedy = "let the loader return pairs (inputs, targets), or a mapping with both"
            if len(fields) > 1:
                near = nearest(self.target, map(str, fields)) if self.target is not None else []
                remedy = (
                    f"name the field that holds them, as SupervisedStrategy(target={(near or [*fields])[-1]!r}); the "
                    "other fields are keywords of the model"
                )
            raise TypeError(
                f"SupervisedStrategy: a batch with {names} has no field {expected} for the targets; {remedy}"
            )
        length = f" of {len(batch)}" if isinstance(batch, (tuple, list)) else ""
        raise TypeError(
            f"SupervisedStrategy: a batch of {type(batch).__name__}{length} cannot be split; let the loader return "
            f"pairs (inputs, targets), or a mapping with inputs and {expected}; or write a strategy whose "
            "prepare_batch accepts it"
        )

    def check_batch(self, outputs: object, batch: TrainingBatch) -> None:
        """Rejects targets whose values are invalid for the loss; it waits for the device.

        Args:
            outputs: the model's outputs, or any object with their `shape`: a backend that compiles `compute_loss`,
                where values cannot be read, calls this beforehand.

        Raises:
            ValueError: names the first such target, its index, and how many there are.
        """
        check_first_batch(self._loss, predictions_of(outputs) if self._reads_logits else outputs, batch.targets)

    def compute_loss(self, outputs: object, batch: TrainingBatch, check: bool = False) -> Array:
        """The loss between outputs and targets, shape (); `check` reads the values of targets and loss.

        If the callable returned a pair, this is a pair, too: the loss, and its parts by name.
        """
        if not isinstance(outputs, Tensor) and self._reads_logits:
            outputs = predictions_of(outputs)
        try:
            if check:  # before the loss: a label outside the classes brings a GPU down
                self.check_batch(outputs, batch)
            loss = self._loss(outputs, batch.targets)
        except Exception as error:
            error.add_note(
                f"in SupervisedStrategy(loss={self.loss_name!r}), given the model's output {describe(outputs)}"
            )
            if isinstance(outputs, (tuple, list)) and self._reads_logits:
                error.add_note(
                    f"{self.loss_name} takes one tensor: let the model return the predictions alone, or pass as loss a "
                    "function of the output and the targets"
                )
            raise
        if not isinstance(loss, Tensor) or loss.ndim:
            self._check_loss(loss, batch.targets)
        if check:
            check_first_loss(split_loss(loss, self)[0], batch.targets, self.loss_name)
        return loss

    def _check_loss(self, found: Tree, targets: object) -> None:
        """Rejects a loss that is not a scalar.

        Raises:
            TypeError: it is not.
        """
        loss, _ = split_loss(found, self)
        if not (isinstance(loss, Tensor) and not loss.ndim) and not _is_scalar_array(loss, targets):
            rule = f"returned {describe(found)}; needs a tensor of shape ()"
            raise ArgumentTypeError(rule, "SupervisedStrategy", loss=self.loss_name)

    def compute_metrics(self, outputs: object, batch: TrainingBatch) -> Mapping[str, Tensor]:
        """No metrics besides the loss."""
        return {}


answer_unknown_keywords(
    SupervisedStrategy,
    {
        **dict.fromkeys(("loss_fn", "criterion", "loss_function", "objective"), "pass loss=..."),
        **dict.fromkeys(("labels", "label_key", "target_key"), "pass target=..."),
        **dict.fromkeys(("label_smoothing", "ignore_index"), "pass loss_options={...}"),
        **dict.fromkeys(("weight", "class_weight"), "pass loss=torch.nn.CrossEntropyLoss(weight=...)"),
    },
)


def _as_argument(name: str, value: object) -> tuple[str, object]:
    """The strategy's argument that an argument of `get_loss`, or of the loss itself, came from."""
    return ("loss", value) if name == "name" else ("loss_options", {name: value})


def _is_of_torch(loss: object) -> bool:
    """Whether it is a function or a module of torch.nn, or derived from one of its losses."""
    function = loss.func if isinstance(loss, partial) else loss
    modules = [getattr(function, "__module__", None), *(kind.__module__ for kind in type(function).__mro__)]
    return any(module in ("torch.nn.functional", "torch.nn.modules.loss") for module in modules)


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
