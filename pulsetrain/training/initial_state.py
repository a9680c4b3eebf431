"""A trainer's state: made from its arguments, handed out as a value, and trained on by the epoch."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pulsetrain.engine.backends.model_store import Held, LiveState, shown_rate
from pulsetrain.engine.checkpoint.weights import compare_weights
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.step.protocols import AlternatingStrategy, BackendSettings, ModelState, Optimizer, bind_strategy
from pulsetrain.state.run_state import check_optimizer_state
from pulsetrain.training.arguments import optimizer_options, resolve_model, resolve_optimizers

if TYPE_CHECKING:
    from pulsetrain.config import TrainingConfig
    from pulsetrain.trainer import Trainer

__all__ = ["current_state", "hold", "load_model_state"]


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
    try:
        held = _held(backend, model, optimizer, strategy, config)
        bind_strategy(strategy, held.module, backend)
    except BaseException:
        if hasattr(backend, "release"):
            backend.release()  # whoever mends the argument passes the same one again
        raise
    return held


def _held(backend: Any, model: Any, optimizer: Any, strategy: Any, config: TrainingConfig) -> LiveState | Held:
    if backend.in_place:
        module = backend.place(resolve_model(model, strategy))
        return LiveState(backend, module, resolve_optimizers(optimizer, module, strategy, config))
    name = type(backend).__name__
    if isinstance(strategy, AlternatingStrategy):
        raise ConfigurationError(
            f"{type(strategy).__name__} trains several modules in turns, which works in place; use TorchBackend()",
            "Trainer",
            backend=type(backend),
        )
    chosen, rate = config.optimizer if optimizer is None else optimizer, None
    if isinstance(chosen, str):
        rate = config.learning_rate
        chosen = backend.create_optimizer(
            model, chosen, config.learning_rate, config.weight_decay, **optimizer_options(config)
        )
    elif not isinstance(chosen, Optimizer):
        raise ConfigurationError(
            f"{name} computes with values, and needs a name or an object "
            "with init(params) and update(grads, opt_state, params)",
            "Trainer",
            optimizer=type(chosen),
        )
    state = backend.init(model, chosen, rate)
    if state.metadata["learning_rate"] is None and (config.schedule not in (None, "constant") or config.warmup_steps):
        raise ConfigurationError(
            "the state of the given optimizer holds no learning rate that could be set; leave both out, or name the "
            "optimizer, as 'adamw', or make it by optax.inject_hyperparams(optax.adam)(learning_rate=...)",
            "TrainingConfig",
            schedule=config.schedule,
            warmup_steps=config.warmup_steps,
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


def load_model_state(trainer: Trainer, model_state: ModelState) -> None:
    """Continue from this state.

    Raises:
        ConfigurationError, TypeError: it does not fit; nothing has changed then.
    """
    held = trainer.held
    if isinstance(held, Held):
        trainer.backend.check(model_state)
        metadata = {"step": 0, "learning_rate": None, "schedule": None, **model_state.metadata}
        held.optimizer.param_groups[0]["lr"] = shown_rate(metadata["learning_rate"])
        held.take(replace(trainer.backend.copied(model_state), metadata=metadata))
        return
    weights, optimizer = getattr(model_state, "weights", model_state), getattr(model_state, "optimizer", None)
    if not isinstance(weights, Mapping) or not isinstance(optimizer, Mapping) or "param_groups" not in optimizer:
        raise TypeError(
            f"Trainer.train_epoch(model_state of {type(weights).__name__}): needs what train_epoch or model_state of a "
            "trainer in place gave"
        )
    problems = compare_weights(trainer.model.state_dict(), weights)
    if problems:
        raise ConfigurationError(f"Trainer.train_epoch(model_state): its weights do not fit the model: {problems}")
    mine, theirs = (list(each["param_groups"][0]) for each in (trainer.optimizer.state_dict(), optimizer))
    if mine != theirs:
        raise ConfigurationError(
            f"Trainer.train_epoch(model_state): its optimizer has {', '.join(theirs)}, the trainer's "
            f"{type(trainer.optimizer).__name__} {', '.join(mine)}; pass a state of the same optimizer"
        )
    check_optimizer_state(trainer.optimizer, optimizer)
    trainer.model.load_state_dict(dict(weights))
    trainer.optimizer.load_state_dict(copy.deepcopy(dict(optimizer)))
