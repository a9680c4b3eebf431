"""A training run that evaluates its model on request: validation, other data, predictions, logged values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from inspect import unwrap
from typing import TYPE_CHECKING, Any

from pulsetrain.engine import Events
from pulsetrain.engine.argument_checks import answers_unknown_keywords, check_type
from pulsetrain.engine.events.payloads import MetricsLogged
from pulsetrain.engine.named_values import NamedValues
from pulsetrain.familiar_names import OF_EVALUATION, missing_attribute
from pulsetrain.training.arguments import named_loaders
from pulsetrain.training.prediction import predict
from pulsetrain.training.run_view import RunView

__all__ = ["EvaluatedRun"]


class EvaluatedRun(RunView):
    """What a trainer computes with its model besides training it."""

    if not TYPE_CHECKING:  # to type checkers, an unknown name is an error

        def __getattr__(self, name: str) -> Any:
            raise missing_attribute(self, name)

    @answers_unknown_keywords(lambda trainer: f"{type(trainer).__name__}.validate", OF_EVALUATION)
    def validate(self, loader: Iterable[Any] | None = None) -> dict[str, float]:
        """One round over every validation set; fires VALIDATION_STARTED and VALIDATION_COMPLETED.

        Args:
            loader: evaluate this data instead, as "val". Then no event of the trainer is fired, and early stopping and
                checkpointers do not see the metrics.

        Returns:
            The metrics by their full names; those of the validation sets are in `state.metrics` from then on.

        Raises:
            ConfigurationError: the trainer has no validation set, or the data is empty.
        """
        return self.validator.validate() if loader is None else self._evaluate(loader, "val")

    @answers_unknown_keywords(lambda trainer: f"{type(trainer).__name__}.test", OF_EVALUATION)
    def test(self, loader: Iterable[Any] | Mapping[str, Iterable[Any]]) -> dict[str, float]:
        """Evaluate data that takes no part in training, and log the metrics: METRICS_LOGGED is fired, as observed.

        The loss and the metrics are those of a validation; early stopping and checkpointers do not see them.

        >>> import torch
        >>> from pulsetrain import Trainer, SupervisedStrategy, TrainingConfig
        >>> data = [(torch.ones(4, 2), torch.ones(4, 1))]
        >>> trainer = Trainer(
        ...     torch.nn.Linear(2, 1), strategy=SupervisedStrategy("mse"), config=TrainingConfig(progress=False)
        ... )
        >>> list(trainer.test(data)), list(trainer.test({"easy": data, "hard": data}))
        (['test/loss'], ['easy/loss', 'hard/loss'])

        Args:
            loader: gives batches as in validation; one set, named "test", or several by name.

        Raises:
            ConfigurationError: a set is empty.
        """
        sets = loader if isinstance(loader, Mapping) else {"test": loader}
        metrics: NamedValues[float] = NamedValues()
        for name, each in sets.items():
            metrics.update(self._evaluate(each, name))
        self.fire(Events.METRICS_LOGGED, MetricsLogged(metrics=metrics), observed=True)
        return metrics

    @answers_unknown_keywords(lambda trainer: f"{type(trainer).__name__}.predict", OF_EVALUATION)
    def predict(
        self,
        loader: Iterable[Any],
        callback: Callable[[Any], object] | None = None,
        *,
        inputs: Callable[[Any], Any] | None = None,
    ) -> Any:
        """The model's outputs for the batches of a loader, in eval mode and on the host.

        >>> import torch
        >>> from pulsetrain import Trainer, SupervisedStrategy, TrainingConfig
        >>> trainer = Trainer(
        ...     torch.nn.Linear(2, 1), strategy=SupervisedStrategy("mse"), config=TrainingConfig(progress=False)
        ... )
        >>> trainer.predict([torch.ones(4, 2), torch.ones(3, 2)]).shape
        torch.Size([7, 1])

        If the optimizer averages weights, the averaged ones predict, as in validation. If several processes train,
        each predicts all batches that it is given; if the model is sharded, all processes have to call this.

        Args:
            loader: gives batches, as in training or without targets. The second item of a pair is taken for targets.
            callback: is called with the outputs of each batch, which are then not kept.
            inputs: batch -> what the model is called with; by default, what the strategy takes from the batch. A batch
                that is a tensor is passed unchanged.

        Returns:
            The outputs of all batches, joined along the first dimension: a tensor, or a dict, list or tuple of tensors
            if the model returns one; None with a callback. For a `ModelOutput` of transformers, the logits.

        Raises:
            ConfigurationError: there is no batch, outputs have different shapes and cannot be joined, or the model is a
                pipeline.
        """
        return predict(self.evaluation, loader, callback, inputs)

    def log(self, name: str, value: Any) -> None:
        """Log a value from a step, a handler or any other code; it is also in `state.metrics` from then on.

        Loggers and the recorder get the mean of all values since the last report at the next log point, and the history
        gets that of the epoch at its end. If the name begins with that of a validation set ("val/bleu"), all get it
        with the next validation, where early stopping and checkpointers see it. If several processes train, it is the
        mean over all of them. Names that the trainer itself reports keep the trainer's values. Checkpoints hold values
        that were not reported yet.

        >>> import torch
        >>> from pulsetrain import Events, Trainer, SupervisedStrategy, TrainingConfig
        >>> data = [(torch.ones(4, 2), torch.ones(4, 1))] * 4
        >>> config = TrainingConfig(progress=False)
        >>> trainer = Trainer(torch.nn.Linear(2, 1), data, strategy=SupervisedStrategy("mse"), config=config)
        >>> @trainer.on(Events.ITERATION_COMPLETED)
        ... def count(trainer):
        ...     trainer.log("counted", trainer.state.iteration)
        >>> trainer.train()["counted"]
        [2.5]

        Args:
            name: the name under which it is reported.
            value: one number: a float, or a tensor of one element, which stays on its device until it is reported.

        Raises:
            ArgumentTypeError, ConfigurationError: it is not one number.
        """
        self.reporter.log_value(name, value)

    def _evaluate(self, loader: Iterable[Any], name: str) -> dict[str, float]:
        check_type(
            f"Trainer.{'test' if name == 'test' else 'validate'}",
            "loader",
            loader,
            Iterable,
            "an iterable of batches, such as a DataLoader",
        )
        (checked,) = named_loaders({name: loader}).values()
        return self.evaluation.run(name, checked)


for _method in (EvaluatedRun.validate, EvaluatedRun.test, EvaluatedRun.predict, EvaluatedRun.log):
    unwrap(_method).__qualname__ = f"Trainer.{_method.__name__}"  # which Python's errors about their arguments name
