"""The state that a trainer begins with: its model and optimizers, as its arguments and settings describe them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from pulsetrain.config import TrainingConfig
from pulsetrain.engine.argument_checks import check_choice, check_type
from pulsetrain.engine.checkpoint.frozen import leave_out_adapted
from pulsetrain.engine.errors import ArgumentTypeError, ConfigurationError, refused
from pulsetrain.engine.optimizers import LEARNING_RATE, NamedOptimizers, parts_of, resolve_optimizer
from pulsetrain.engine.step.backend import Backend, ModelStore, OptimizerRequest, ValueBackend
from pulsetrain.engine.step.protocols import AlternatingStrategy, BackendSettings, BindsModel, Strategy
from pulsetrain.training.as_written import as_written

__all__ = ["make_store"]


def make_store(
    backend: Backend, model: object, optimizer: object, strategy: Strategy, config: TrainingConfig, seed: int
) -> ModelStore:
    """The state that a trainer begins with.

    Raises:
        ConfigurationError: the backend cannot do what a setting or the strategy asks for, or does not know the
            optimizer.
    """
    with as_written():
        backend.configure(_settings_of(config, seed))
    options = dict(config.optimizer_options)
    if config.no_decay is not None:
        options["no_decay"] = config.no_decay
    request = OptimizerRequest(
        build=lambda module: _resolve_optimizers(optimizer, module, strategy, config, options),
        chosen=config.optimizer if optimizer is None else optimizer,
        learning_rate=LEARNING_RATE if config.learning_rate is None else config.learning_rate,
        weight_decay=config.weight_decay or 0.0,
        options=options,
    )
    try:
        if isinstance(model, Mapping) and all(isinstance(each, nn.Module) for each in model.values()):
            model = nn.ModuleDict(model)
        if isinstance(model, nn.Module):
            leave_out_adapted(model)
        with as_written(optimizer):
            store = backend.make_store(model, request, strategy)
        _refuse_idle_settings(config, optimizer, store.optimizer, by_value=isinstance(backend, ValueBackend))
        rates = [group.get("lr") for group in store.optimizer.param_groups]
        scheduled = config.schedule not in (None, "constant") or config.warmup_steps
        if scheduled and any(isinstance(rate, float) and math.isnan(rate) for rate in rates):
            rule = (
                "the state of the given optimizer holds no learning rate that could be set; leave both out, or name "
                "the optimizer, as 'adamw', or make it by optax.inject_hyperparams(optax.adam)(learning_rate=...)"
            )
            raise refused(config, rule, "schedule", "warmup_steps")
        if isinstance(strategy, BindsModel):
            strategy.bind(store.module, backend)
    except BaseException:
        backend.release()  # the argument can be corrected, and the same backend passed again
        raise
    return store


def _settings_of(config: TrainingConfig, seed: int) -> BackendSettings:
    """The backend's settings; an optimizer's state goes into the run folder where no other is chosen."""
    shared = {each.name: getattr(config, each.name) for each in fields(BackendSettings) if each.name != "seed"}
    offload, folder = shared["optimizer_offload"], config.run_dir
    if offload is not None and offload.to == "disk" and offload.folder is None and folder and "://" not in folder:
        shared["optimizer_offload"] = replace(offload, folder=folder)
    return BackendSettings(**shared, seed=seed)


def _refuse_idle_settings(
    config: TrainingConfig, given: object, made: torch.optim.Optimizer, *, by_value: bool
) -> None:
    """Refuse a learning rate or weight decay that no optimizer has: each was given with another one."""
    chosen = [given.get(name) for name in parts_of(made)] if isinstance(given, Mapping) else [given]
    if any(each is None or isinstance(each, str) for each in chosen):
        return  # made with them
    no_decay = math.nan if by_value else 0.0  # an optimizer that computes with values does not show its decay
    for setting, key, missing in (("learning_rate", "lr", math.nan), ("weight_decay", "weight_decay", no_decay)):
        wanted = getattr(config, setting)
        values = (group.get(key, missing) for group in made.param_groups)
        found = {float(value) for value in values if isinstance(value, float | int | Tensor) and value == value}
        if wanted is None or not found or any(math.isclose(wanted, value, rel_tol=1e-6) for value in found):
            continue
        has = " and ".join(f"{key}={value:g}" for value in sorted(found))
        rule = f"the optimizer that the Trainer was given has {has}; leave the setting out, or make the two equal"
        raise refused(config, rule, setting)


def _resolve_optimizers(
    given: Any, model: nn.Module, strategy: Any, config: TrainingConfig, options: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """The optimizer; a strategy that trains several modules in turns gets one for each trainable module, by name."""

    def resolve(one: Any, module: nn.Module) -> torch.optim.Optimizer:
        one = config.optimizer if one is None else one
        return resolve_optimizer(one, module, config.learning_rate, config.weight_decay, **options)

    if not isinstance(strategy, AlternatingStrategy):
        if isinstance(given, Mapping) and any(isinstance(each, int | float) for each in given.values()):
            rule = (
                "is not an optimizer; pass one, or its name, as optimizer='sgd' with TrainingConfig(learning_rate=0.1)"
            )
            raise ArgumentTypeError(rule, "Trainer", optimizer=dict.fromkeys(given, ...))
        if isinstance(given, (Mapping, NamedOptimizers)):
            raise ConfigurationError(
                "several optimizers need a strategy that says which loss each of them minimizes, by compute_losses; "
                f"{type(strategy).__name__} has one loss",
                "Trainer",
                optimizer=dict.fromkeys(given, ...),
            )
        return resolve(given, model)
    if not isinstance(model, nn.ModuleDict):
        raise ArgumentTypeError(
            f"{type(strategy).__name__} trains several modules in turns; pass them by name, as "
            "{'generator': ..., 'discriminator': ...}",
            "Trainer",
            model=type(model),
        )
    if config.precision == "fp16" and config.accumulation.batches != 1:
        rule = (
            "the gradient scale changes with each optimizer's update, and the gradients that wait for the others have "
            "the old scale; set accumulate=1, or use bf16"
        )
        raise refused(config, rule, "precision", "accumulate")
    if config.accumulation.schedule is not None:
        rule = (
            "a schedule counts updates, and several optimizers make several updates a batch; accumulate a fixed number "
            "of batches"
        )
        raise refused(config, rule, "accumulate")
    if isinstance(given, NamedOptimizers):
        return resolve(given, model)
    check_type("Trainer", "optimizer", given, str | Mapping | None, "one for each module, as {'actor': 'adam'}")
    learning = {name: each for name, each in model.items() if any(p.requires_grad for p in each.parameters())}
    chosen = given if isinstance(given, Mapping) else dict.fromkeys(learning, given)
    for name in chosen:
        check_choice("Trainer", "optimizer", name, learning)
    return NamedOptimizers({name: resolve(chosen.get(name), each) for name, each in learning.items()})
