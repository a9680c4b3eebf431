"""A trainer's state: made from its arguments, handed out as a value, and trained on by the epoch."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from engine.backends.held import Held, LiveState, shown_rate
from engine.errors import ConfigurationError
from engine.protocols import AlternatingStrategy, BackendSettings, ModelState, Optimizer
from pulsetrain.arguments import optimizer_options, resolve_model, resolve_optimizers
from pulsetrain.beginning import begin_anew

if TYPE_CHECKING:
    from pulsetrain.config import TrainingConfig
    from pulsetrain.trainer import Trainer

__all__ = ["current_state", "hold", "train_epoch"]


def hold(
    backend: Any, model: Any, optimizer: Any, strategy: Any, config: TrainingConfig, seed: int
) -> LiveState | Held:
    """The state that a trainer begins with.

    Raises:
        ConfigurationError: the backend cannot do what a setting or the strategy asks for, or an optimizer that it
            does not know.
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
    if backend.in_place:
        module = backend.place(resolve_model(model, strategy))
        return LiveState(backend, module, resolve_optimizers(optimizer, module, strategy, config))
    name = type(backend).__name__
    if isinstance(strategy, AlternatingStrategy):
        raise ConfigurationError(
            f"Trainer(backend={name}): {type(strategy).__name__} trains several modules in turns, which works in "
            "place; use TorchBackend()"
        )
    chosen, rate = config.optimizer if optimizer is None else optimizer, None
    if isinstance(chosen, str):
        rate = config.learning_rate
        chosen = backend.create_optimizer(
            model, chosen, config.learning_rate, config.weight_decay, **optimizer_options(config)
        )
    elif not isinstance(chosen, Optimizer):
        raise ConfigurationError(
            f"Trainer(optimizer={type(chosen).__name__}): {name} computes with values, and needs a name or an object "
            "with init(params) and update(grads, opt_state, params)"
        )
    state = backend.init(model, chosen, rate)
    if state.metadata["learning_rate"] is None and (config.schedule not in (None, "constant") or config.warmup_steps):
        raise ConfigurationError(
            f"TrainingConfig(schedule={config.schedule!r}, warmup_steps={config.warmup_steps}): the state of the given "
            "optimizer holds no learning rate that could be set; leave both out, or name the optimizer, as 'adamw', or "
            "make it by optax.inject_hyperparams(optax.adam)(learning_rate=...)"
        )
    return Held(backend, model, state)


def current_state(trainer: Trainer) -> ModelState:
    """The trainer's state as values, which training on does not change."""
    held = trainer.held
    if isinstance(held, Held):
        return held.copy()
    weights = copy.deepcopy(trainer.model.state_dict())
    metadata = {"step": trainer.state.update, "learning_rate": float(trainer.learning_rates[0])}
    return ModelState(weights, copy.deepcopy(trainer.optimizer.state_dict()), metadata)


def train_epoch(trainer: Trainer, loader: Iterable[Any], model_state: ModelState | None) -> ModelState:
    """One epoch with all its events from this state on; the state behind it."""
    state = trainer.state
    if state.max_epochs is None:
        begin_anew(trainer)
    if model_state is not None:
        _go_on_from(trainer, model_state)
    try:
        trainer.run(loader, max_epochs=state.epoch + 1)
    finally:
        trainer.held.publish()
    return current_state(trainer)


def _go_on_from(trainer: Trainer, model_state: ModelState) -> None:
    held = trainer.held
    if isinstance(held, Held):
        trainer.backend.check(model_state)
        held.optimizer.param_groups[0]["lr"] = shown_rate(model_state.metadata["learning_rate"])
        held.take(trainer.backend.copied(model_state))
        return
    if not isinstance(model_state.weights, Mapping) or isinstance(model_state.weights, nn.Module):
        raise TypeError("Trainer.train_epoch(model_state): needs what train_epoch or model_state gave")
    trainer.model.load_state_dict(dict(model_state.weights))
    trainer.optimizer.load_state_dict(copy.deepcopy(model_state.optimizer))
