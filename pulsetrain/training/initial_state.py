"""A trainer's state: made from its arguments, handed out as a value, and trained for an epoch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.step.backend import Backend, ModelStore, OptimizerRequest
from pulsetrain.engine.step.protocols import BackendSettings, BindsModel, Strategy
from pulsetrain.training.arguments import optimizer_options, resolve_model, resolve_optimizers

if TYPE_CHECKING:
    from pulsetrain.config import TrainingConfig

__all__ = ["make_store"]


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
                "the state of the given optimizer holds no learning rate that could be set; leave both out, or name "
                "the optimizer, as 'adamw', or make it by optax.inject_hyperparams(optax.adam)(learning_rate=...)",
                "TrainingConfig",
                schedule=config.schedule,
                warmup_steps=config.warmup_steps,
            )
        if isinstance(strategy, BindsModel):
            strategy.bind(store.module, backend)
    except BaseException:
        backend.release()  # the argument can be corrected, and the same backend passed again
        raise
    return store


def _is_nan(rate: object) -> bool:
    return isinstance(rate, float) and math.isnan(rate)
