"""Callbacks of PyTorch Lightning, on our runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self, cast

from pulsetrain.engine import Engine, Event, Events, Phase, TrainingRun, is_training_run
from pulsetrain.engine.errors import ArgumentTypeError, ConfigurationError
from pulsetrain.handlers.adapters.callback_states import load_states, states_of
from pulsetrain.handlers.adapters.lightning_trainer import TrainerView
from pulsetrain.handlers.attachment.attachment import Handler
from pulsetrain.handlers.attachment.engine_queries import batch_number

__all__ = ["LightningCallbacks"]

_INSTEAD = {
    "ModelCheckpoint": "Checkpointer(folder, metric=...)",
    "StochasticWeightAveraging": "SWA(after_epoch=...)",
    "WeightAveraging": "EMA()",
    "EMAWeightAveraging": "EMA()",
    "GradientAccumulationScheduler": "TrainingConfig(accumulate=...)",
    "BatchSizeFinder": "`pulsetrain memory`",
    "LearningRateFinder": "LRFinder()",
}
"""Callbacks that change how Lightning's own Trainer works, and what does the same here."""


class LightningCallbacks(Handler):
    """Calls callbacks written for Lightning: objects with its hooks, such as `on_train_epoch_end`.

    As `trainer` they get an object with what a callback usually reads: `current_epoch`, `global_step`, `max_epochs`,
    `callback_metrics`, `logged_metrics`, `optimizers`, `train_dataloader`, `val_dataloaders`, `loggers`,
    `is_global_zero`, `world_size`, and `should_stop`, which ends the run when it is set. Metrics have our names,
    "val/loss", and also Lightning's usual ones, "val_loss" and "train_loss". `pl_module` is the model. Any other
    attribute of the trainer raises an AttributeError that names it.

    Hooks that are called: on_fit_start, on_train_start, on_train_epoch_start, on_train_batch_start,
    on_before_optimizer_step, on_train_batch_end, on_validation_start, on_validation_epoch_start,
    on_validation_epoch_end, on_validation_end, on_train_epoch_end, on_train_end, on_fit_end, on_exception. state_dict
    and load_state_dict save and restore states.

    >>> class Stopper:
    ...     def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
    ...         trainer.should_stop = trainer.global_step >= 2
    >>> from pulsetrain import SupervisedStrategy, Trainer, TrainingConfig
    >>> from pulsetrain.testing import tiny_loader, tiny_model
    >>> trainer = Trainer(
    ...     tiny_model(), tiny_loader(), strategy=SupervisedStrategy("mse"), config=TrainingConfig(progress=False),
    ...     handlers=[LightningCallbacks([Stopper()])],
    ... )
    >>> _ = trainer.train()
    >>> trainer.state.iteration
    2

    Args:
        callbacks: in the order in which they are called.

    Raises:
        ArgumentTypeError: an object has no hook.
        ConfigurationError: a callback would change Lightning's own Trainer; the message says what to use here.
    """

    def __init__(self, callbacks: Sequence[Any]) -> None:
        for each in callbacks:
            instead = next((_INSTEAD[kind.__name__] for kind in type(each).__mro__ if kind.__name__ in _INSTEAD), None)
            if instead is not None:
                rule = f"{type(each).__name__} works on Lightning's own Trainer; use {instead}"
                raise ConfigurationError(rule, "LightningCallbacks", callbacks=[type(each)])
            if isinstance(each, type) or not any(name.startswith("on_") for name in dir(each)):
                rule = "needs objects with Lightning's hooks, such as on_train_epoch_end(trainer, pl_module)"
                raise ArgumentTypeError(rule, "LightningCallbacks", callbacks=[each])
        self.callbacks: list[Any] = list(callbacks)
        self._trainer: TrainerView | None = None  # as they see it

    def attach(self, engine: Engine) -> Self:
        """Call the callbacks at the events of the trainer, in phase ACT; loggers see what they decide.

        Raises:
            TypeError: it is not a trainer.
        """
        if not is_training_run(engine):
            raise TypeError(f"LightningCallbacks.attach({type(engine).__name__}): needs a Trainer")
        self._trainer = TrainerView(engine, self.callbacks)
        hooks: list[tuple[Any, tuple[str, ...]]] = [
            (Events.STARTED, ("on_fit_start", "on_train_start")),
            (Events.EPOCH_STARTED, ("on_train_epoch_start",)),
            (Events.VALIDATION_STARTED, ("on_validation_start", "on_validation_epoch_start")),
            (Events.VALIDATION_COMPLETED, ("on_validation_epoch_end", "on_validation_end")),
            (Events.EPOCH_COMPLETED, ("on_train_epoch_end",)),
            (Events.COMPLETED, ("on_train_end", "on_fit_end")),
        ]
        with self._attachment.to(cast(Engine, engine), whole_bus=False) as subscribe:
            for event, names in hooks:
                if wanted := self._wanted(*names):
                    subscribe(event, self._caller(wanted), phase=Phase.ACT)
            if self._wanted("on_train_batch_start"):
                subscribe(Events.ITERATION_STARTED, self._on_batch_start, phase=Phase.ACT)
            if self._wanted("on_before_optimizer_step"):
                subscribe(Events.GRADIENTS_READY, self._on_gradients, phase=Phase.ACT)
            if self._wanted("on_train_batch_end"):
                subscribe(Events.ITERATION_COMPLETED, self._on_batch_end, phase=Phase.ACT)
            if self._wanted("on_exception"):
                subscribe(Events.EXCEPTION_RAISED, self._on_exception, phase=Phase.ACT)
        return self

    def state_dict(self) -> dict[str, object]:
        """The callbacks' own states."""
        return states_of(self.callbacks)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the callbacks' own states."""
        load_states(self.callbacks, state)

    def _wanted(self, *hooks: str) -> list[str]:
        """The hooks that a callback has overridden."""
        return [hook for hook in hooks if any(_overrides(each, hook) for each in self.callbacks)]

    def _call(self, hook: str, engine: Engine, *arguments: Any) -> None:
        module = cast(TrainingRun, engine).model
        for each in self.callbacks:
            method = getattr(each, hook, None)
            if callable(method):
                method(self._trainer, module, *arguments)

    def _caller(self, hooks: Sequence[str]) -> Any:
        def receive(engine: Engine) -> None:
            for hook in hooks:
                self._call(hook, engine)

        return receive

    def _on_batch_start(self, engine: Engine) -> None:
        self._call("on_train_batch_start", engine, engine.state.batch, batch_number(engine))

    def _on_gradients(self, engine: Engine) -> None:
        self._call("on_before_optimizer_step", engine, cast(TrainingRun, engine).optimizer)

    def _on_batch_end(self, engine: Engine) -> None:
        output = engine.state.output
        outputs = dict(output) if isinstance(output, Mapping) else output
        self._call("on_train_batch_end", engine, outputs, engine.state.batch, batch_number(engine))

    def _on_exception(self, engine: Engine, event: Event) -> None:
        self._call("on_exception", engine, event.payload.error)


def _overrides(callback: Any, hook: str) -> bool:
    """Whether the hook is more than the empty one of Lightning's base class."""
    method = getattr(type(callback), hook, None)
    base = next((kind for kind in type(callback).__mro__ if kind.__module__.endswith("callbacks.callback")), None)
    return callable(getattr(callback, hook, None)) and (base is None or method is not getattr(base, hook, None))
