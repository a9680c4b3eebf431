"""A trainer's state: made from its arguments, handed out as a value, and trained for an epoch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.step.backend import Backend, ModelStore, OptimizerRequest
from pulsetrain.engine.step.protocols import BackendSettings, ModelState, Strategy, bind_strategy
from pulsetrain.training.arguments import optimizer_options, resolve_model, resolve_optimizers
from pulsetrain.training.run_start import begin_anew, go_on

if TYPE_CHECKING:
    from pulsetrain.config import TrainingConfig
    from pulsetrain.trainer import Trainer

__all__ = ["current_state", "make_store", "train_epoch"]


def make_store(
    backend: Backend, model: object, optimizer: object, strategy: Strategy, config: TrainingConfig, seed: int
) -> ModelStore:
    """The state that a trainer begins with.

    Raises:
        ConfigurationError: the backend cannot do what a setting or the strategy asks for, or does not know the
            optimizer.
    """
    backend.configure(
        BackendSettings(
            device=config.device,
            precision=config.precision,
            compile=config.compile,
            activation_checkpointing=config.activation_checkpointing,
            clip_grad_norm=config.clip_grad_norm,
            clip_grad_value=config.clip_grad_value,
            seed=seed,
        )
    )
    request = OptimizerRequest(
        build=lambda module: resolve_optimizers(optimizer, module, strategy, config),
        chosen=config.optimizer if optimizer is None else optimizer,
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        options=optimizer_options(config),
    )
    try:
        store = backend.make_store(resolve_model(model), request, strategy)
        scheduled = config.schedule not in (None, "constant") or config.warmup_steps
        if scheduled and any(_is_nan(group.get("lr")) for group in store.optimizer.param_groups):
            raise ConfigurationError(
                f"TrainingConfig(schedule={config.schedule!r}, warmup_steps={config.warmup_steps}): the state of the "
                "given optimizer holds no learning rate that could be set; leave both out, or name the optimizer, as "
                "'adamw', or make it by optax.inject_hyperparams(optax.adam)(learning_rate=...)"
            )
        bind_strategy(strategy, store.module, backend)
    except BaseException:
        backend.release()  # the argument can be corrected, and the same backend passed again
        raise
    return store


def current_state(trainer: Trainer) -> ModelState:
    """The trainer's state as values, which further training does not change."""
    state = trainer.model_store.snapshot()
    counted = {"step": trainer.state.update, "learning_rate": float(trainer.learning_rates[0])}
    return replace(state, metadata={**counted, **state.metadata})


def train_epoch(trainer: Trainer, loader: Iterable[Any], model_state: ModelState | None) -> ModelState:
    """One epoch with all its events from this state on; returns the state after it."""
    state = trainer.state
    if state.max_epochs is None and not trainer.position.resuming:
        begin_anew(trainer)
    if model_state is not None:
        trainer.model_store.restore(model_state)
        trainer.stepper.discard()  # what waited was of another state
    try:
        if trainer.position.resuming:  # after a checkpoint, perhaps inside an epoch
            go_on(trainer, loader, state.epoch + 1)
        else:
            trainer.run(loader, max_epochs=state.epoch + 1)
    finally:
        trainer.model_store.publish()
    return current_state(trainer)


def _is_nan(rate: object) -> bool:
    return isinstance(rate, float) and math.isnan(rate)
