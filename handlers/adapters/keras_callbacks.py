"""Callbacks of Keras, on our runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from pulsetrain.engine import Engine, Event, Events, Phase, is_training_run
from pulsetrain.engine.errors import ArgumentTypeError
from pulsetrain.handlers.adapters.callback_states import load_states, states_of
from pulsetrain.handlers.attachment.attachment import Handler
from pulsetrain.handlers.attachment.engine_queries import batch_number
from pulsetrain.handlers.metric_values.step_values import on_host, scalars

__all__ = ["KerasCallbacks"]

_HOOKS = (
    "on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end", "on_train_batch_begin", "on_train_batch_end",
    "on_batch_begin", "on_batch_end", "on_test_begin", "on_test_end",
)  # fmt: skip


class KerasCallbacks(Handler):
    """Calls callbacks written for Keras: classes with methods such as `on_epoch_end(epoch, logs)`.

    Epochs and batches count from 0, as in Keras. `logs` holds the run's newest metrics under Keras's names: "loss" is
    the loss of the step, or the mean over the epoch, and "val_loss" that of the validation set "val", which
    `on_test_end` gets as "loss". `self.model` is the module, with `stop_training`, which ends the run when it is set,
    and `optimizer`. Checkpoints hold the states of callbacks that have `state_dict` and `load_state_dict`.

    >>> class Printer:
    ...     def on_epoch_end(self, epoch, logs=None):
    ...         print(epoch, sorted(logs))
    >>> from pulsetrain import SupervisedStrategy, Trainer, TrainingConfig
    >>> from pulsetrain.testing import tiny_loader, tiny_model
    >>> trainer = Trainer(
    ...     tiny_model(), tiny_loader(), tiny_loader(), strategy=SupervisedStrategy("mse"),
    ...     config=TrainingConfig(progress=False), handlers=[KerasCallbacks([Printer()])],
    ... )
    >>> _ = trainer.train()
    0 ['learning_rate', 'loss', 'val_loss']

    Args:
        callbacks: in the order in which they are called.

    Raises:
        ArgumentTypeError: an object has none of the hooks.
    """

    def __init__(self, callbacks: Sequence[Any]) -> None:
        for each in callbacks:
            if isinstance(each, type) or not any(callable(getattr(each, hook, None)) for hook in _HOOKS):
                rule = f"needs objects with methods such as on_epoch_end(epoch, logs), of {', '.join(_HOOKS)}"
                raise ArgumentTypeError(rule, "KerasCallbacks", callbacks=[each])
        self.callbacks: list[Any] = list(callbacks)

    def attach(self, engine: Engine) -> Self:
        """Call the callbacks at the events of the engine, in phase OBSERVE.

        Raises:
            TypeError: it is not an engine.
        """
        with self._attachment.to(engine, whole_bus=False) as subscribe:
            if is_training_run(engine):
                self._set_model(_Model(engine))
            for event, hooks, deliver in (
                (Events.STARTED, ("on_train_begin",), self._on_run),
                (Events.EPOCH_STARTED, ("on_epoch_begin",), self._on_epoch_started),
                (Events.ITERATION_STARTED, ("on_train_batch_begin", "on_batch_begin"), self._on_batch_started),
                (Events.ITERATION_COMPLETED, ("on_train_batch_end", "on_batch_end"), self._on_batch_completed),
                (Events.VALIDATION_STARTED, ("on_test_begin",), self._on_run),
                (Events.VALIDATION_COMPLETED, ("on_test_end",), self._on_validated),
                (Events.EPOCH_COMPLETED, ("on_epoch_end",), self._on_epoch_completed),
                (Events.COMPLETED, ("on_train_end",), self._on_run),
            ):
                wanted = [name for name in hooks if any(callable(getattr(each, name, None)) for each in self.callbacks)]
                if wanted:
                    subscribe(event, _bound(deliver, wanted), phase=Phase.OBSERVE)
        return self

    def state_dict(self) -> dict[str, object]:
        """The callbacks' own states."""
        return states_of(self.callbacks)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the callbacks' own states."""
        load_states(self.callbacks, state)

    def _set_model(self, model: _Model) -> None:
        for each in self.callbacks:
            if callable(getattr(each, "set_model", None)):
                each.set_model(model)
            else:
                each.model = model

    def _call(self, hooks: Sequence[str], *arguments: Any) -> None:
        for hook in hooks:
            for each in self.callbacks:
                method = getattr(each, hook, None)
                if callable(method):
                    method(*arguments)

    def _on_run(self, hooks: Sequence[str], engine: Engine, event: Event) -> None:
        self._call(hooks, _logs(engine))

    def _on_epoch_started(self, hooks: Sequence[str], engine: Engine, event: Event) -> None:
        self._call(hooks, engine.state.epoch - 1, _logs(engine))

    def _on_batch_started(self, hooks: Sequence[str], engine: Engine, event: Event) -> None:
        self._call(hooks, batch_number(engine), {})

    def _on_batch_completed(self, hooks: Sequence[str], engine: Engine, event: Event) -> None:
        found = on_host(scalars(engine.state.output))
        self._call(hooks, batch_number(engine), {name: float(value) for name, value in found.items()})

    def _on_validated(self, hooks: Sequence[str], engine: Engine, event: Event) -> None:
        found = {name.removeprefix("val/"): value for name, value in event.payload.metrics.items()}
        self._call(hooks, _keras_names(found))

    def _on_epoch_completed(self, hooks: Sequence[str], engine: Engine, event: Event) -> None:
        self._call(hooks, engine.state.epoch - 1, _logs(engine))


class _Model:
    """What callbacks see as `self.model`: the module's attributes, the optimizer, and `stop_training`."""

    def __init__(self, engine: Any) -> None:
        self.__dict__["_engine"] = engine
        self.__dict__["stop_training"] = False

    @property
    def optimizer(self) -> Any:
        return self._engine.optimizer

    def __setattr__(self, name: str, value: object) -> None:
        if name != "stop_training":
            setattr(self._engine.model, name, value)
            return
        self.__dict__[name] = bool(value)
        if value:
            self._engine.terminate(reason="a callback has set model.stop_training")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine.model, name)


def _bound(deliver: Callable[..., None], hooks: Sequence[str]) -> Callable[[Engine, Event], None]:
    def receive(engine: Engine, event: Event) -> None:
        deliver(hooks, engine, event)

    return receive


def _logs(engine: Engine) -> dict[str, float]:
    """The newest metrics of the run: those of the last epoch, and of validations."""
    history = getattr(engine, "history", None)
    newest = {} if history is None else {name: values[-1] for name, values in history.get_history().items() if values}
    return _keras_names({**newest, **{k: v for k, v in engine.state.metrics.items() if isinstance(v, float)}})


def _keras_names(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics by the names that Keras would give them.

    >>> _keras_names({"train/loss": 1.0, "val/accuracy": 0.5, "learning_rate": 0.1})
    {'loss': 1.0, 'val_accuracy': 0.5, 'learning_rate': 0.1}
    """
    return {name.removeprefix("train/").replace("/", "_"): float(value) for name, value in metrics.items()}
