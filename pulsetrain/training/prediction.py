"""Predictions of a trained model: its outputs for the batches of a loader, without targets and without a loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from pulsetrain.engine.argument_checks import check_type
from pulsetrain.engine.backends.pipeline import pipeline_of
from pulsetrain.engine.errors import ArgumentTypeError, ConfigurationError
from pulsetrain.engine.notebook import shorten_traceback
from pulsetrain.engine.step.model_outputs import predictions_of
from pulsetrain.engine.step.protocols import AlternatingStrategy, TrainingBatch, TrainingStrategy, Tree, describe
from pulsetrain.training.validation import Evaluation

__all__ = ["predict"]


def predict(
    evaluation: Evaluation,
    loader: Iterable[Any],
    callback: Callable[[Any], object] | None,
    inputs: Callable[[Any], Any] | None,
) -> Any:
    """The model's outputs for every batch, in order; see `Trainer.predict`."""
    check_type("Trainer.predict", "loader", loader, Iterable, "an iterable of batches, such as a DataLoader")
    if hasattr(loader, "__array__"):
        rule = "is one batch, whose rows would be taken for batches; pass a DataLoader, or a list, as predict([x])"
        raise ArgumentTypeError(rule, "Trainer.predict", loader=type(loader))
    if isinstance(evaluation.strategy, AlternatingStrategy):
        raise ConfigurationError(
            f"{type(evaluation.strategy).__name__} trains several models in turns, so it is not known which one "
            "predicts; call that one itself, as trainer.model['generator'](inputs)",
            "Trainer.predict",
        )
    if pipeline_of(evaluation.store.module) is not None:
        raise ConfigurationError(
            "the stages of a pipeline are in several processes; load the checkpoint in one, as pulsetrain.load(run, "
            "model), and predict there",
            "Trainer.predict",
        )
    parts: list[Tree] = []
    receive = parts.append if callback is None else callback
    try:
        with evaluation.engine.around_run():
            for outputs in _outputs(evaluation, loader, inputs):
                receive(outputs)
    except BaseException as error:
        shorten_traceback(error)
        raise
    if callback is not None:
        return None
    if not parts:
        raise ConfigurationError("gave no batch; it is empty", "Trainer.predict", loader=type(loader))
    return _joined(parts)


def _outputs(evaluation: Evaluation, loader: Iterable[Any], inputs: Callable[[Any], Any] | None) -> Iterator[Tree]:
    backend = evaluation.backend
    strategy = _InputsOnly(evaluation.strategy, inputs)
    for batch in loader:
        prepared = backend.prepare_batch(batch, cast(TrainingStrategy, strategy))
        try:
            outputs, _ = backend.eval_step(evaluation.store.eval_state, prepared, cast(TrainingStrategy, strategy))
        except TypeError as error:
            if not strategy.chooses and isinstance(batch, (tuple, list)):
                error.add_note("predict(loader, inputs=lambda batch: batch[0]) chooses what the model is given")
            raise
        yield tree_map(_to_host, backend.to_torch(predictions_of(outputs)))


class _InputsOnly:
    """A strategy whose batches are inputs, so that a backend's step for validation computes outputs alone."""

    def __init__(self, strategy: object, inputs: Callable[[Any], Any] | None) -> None:
        self.needs_gradients = getattr(strategy, "needs_gradients", False)
        self._inputs = inputs or getattr(strategy, "prepare_inputs", None)
        self.chooses = inputs is not None
        self._strategy = cast(TrainingStrategy, strategy)

    def prepare_batch(self, batch: Any) -> TrainingBatch:
        if self._inputs is not None:
            return TrainingBatch(self._inputs(batch), None, samples=1)
        if isinstance(batch, Tensor):
            return TrainingBatch(batch, None, samples=1)
        return TrainingBatch(self._strategy.prepare_batch(batch).inputs, None, samples=1)

    def compute_loss(self, outputs: Tree, batch: TrainingBatch) -> Any:
        """Zero, as an array of the backend's library."""
        leaves = [leaf for leaf in tree_leaves(predictions_of(outputs)) if hasattr(leaf, "dtype")]
        if not leaves:
            raise ArgumentTypeError(
                f"the model returned {describe(outputs)}, which holds no array; its outputs cannot be predictions",
                "Trainer.predict",
                model=type(outputs),
            )
        return (leaves[0] * 0).sum()

    def compute_metrics(self, outputs: object, batch: TrainingBatch) -> Mapping[str, Tensor]:
        return {}


def _to_host(value: object) -> object:
    return value.detach().cpu() if isinstance(value, Tensor) else value


def _joined(parts: list[Tree]) -> Tree:
    """The batches' outputs one after the other, along the first dimension."""
    try:
        return tree_map(_concatenated, *parts)
    except (RuntimeError, ValueError) as error:
        shapes = list(dict.fromkeys(describe(part) for part in parts))
        raise ConfigurationError(
            f"the outputs of different batches cannot be joined: {', '.join(shapes[:3])}; receive each batch's by "
            "itself, as predict(loader, callback=outputs.append)",
            "Trainer.predict",
        ) from error


def _concatenated(*values: Any) -> Any:
    if not isinstance(values[0], Tensor):
        return values[0] if len(values) == 1 else list(values)
    return torch.cat(values) if values[0].ndim else torch.stack(values)
