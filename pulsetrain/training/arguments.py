"""What the Trainer's arguments may be, checked when it is made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from pulsetrain.config import TrainingConfig
from pulsetrain.engine import Every
from pulsetrain.engine.data.keyed_loader import can_be_read_once
from pulsetrain.engine.errors import ConfigurationError, unknown_name
from pulsetrain.engine.optimizers import NamedOptimizers, parts_of, resolve_optimizer
from pulsetrain.engine.schedules import build_schedule
from pulsetrain.engine.step.protocols import AlternatingStrategy, TrainingStrategy
from pulsetrain.engine.strategies import STRATEGIES
from pulsetrain.handlers import Checkpointer, EarlyStopping, LRScheduler
from pulsetrain.training.run_length import Bound

__all__ = [
    "check_kinds",
    "check_metric_names",
    "configured_handlers",
    "named_loaders",
    "optimizer_options",
    "resolve_model",
    "resolve_optimizers",
    "resolve_strategy",
]


def check_kinds(config: Any, metrics: Any, handlers: Any, callbacks: Any) -> None:
    """Refuse what is not of the kind that the Trainer takes, by name."""
    if config is not None and not isinstance(config, TrainingConfig):
        raise TypeError(
            f"Trainer(config={type(config).__name__}): needs a TrainingConfig, as TrainingConfig(max_epochs=3)"
        )
    if metrics is not None and not isinstance(metrics, Mapping):
        raise TypeError(f"Trainer(metrics={type(metrics).__name__}): needs a mapping, as {{'accuracy': Accuracy()}}")
    for name, metric in (metrics or {}).items():
        if isinstance(metric, type):
            raise TypeError(
                f"Trainer(metrics={{{name!r}: {metric.__name__}}}): needs an object, as {metric.__name__}()"
            )
        if name == "loss":  # whatever the strategy; see check_metric_names for its own
            raise ConfigurationError("Trainer(metrics={'loss': ...}): the name of the strategy's loss; choose another")
    for argument, given in (("handlers", handlers), ("callbacks", callbacks)):
        if not isinstance(given, (list, tuple)):
            raise TypeError(f"Trainer({argument}={type(given).__name__}): needs a list, as {argument}=[...]")
    for handler in handlers:
        if isinstance(handler, type):
            raise TypeError(f"Trainer(handlers=[{handler.__name__}]): needs an object, as {handler.__name__}(...)")
        if not callable(getattr(handler, "attach", None)):
            raise TypeError(f"Trainer(handlers=[{handler!r}]): a handler needs attach(engine); functions go to on()")


def check_metric_names(metrics: Mapping[str, Any] | None, strategy: TrainingStrategy) -> None:
    """Refuse a metric under a name that the strategy itself derives from the loss, such as perplexity."""
    derive = getattr(strategy, "derive_metrics", None)
    if not metrics or derive is None:
        return
    for name in derive(1.0):
        if name in metrics:
            raise ConfigurationError(
                f"Trainer(metrics={{{name!r}: ...}}): {type(strategy).__name__} reports one of that name itself; "
                "choose another"
            )


def resolve_strategy(strategy: Any) -> Any:
    """The strategy that a name or an object stands for."""
    if isinstance(strategy, str):
        if strategy not in STRATEGIES:
            raise unknown_name("Trainer", "strategy", strategy, STRATEGIES)
        return STRATEGIES[strategy]()
    if isinstance(strategy, type) or not isinstance(strategy, (TrainingStrategy, AlternatingStrategy)):
        raise TypeError(
            f"Trainer(strategy={strategy!r}): needs a name ({', '.join(sorted(STRATEGIES))}) or an object with "
            "prepare_batch, compute_loss and compute_metrics, or with prepare_batch and compute_losses"
        )
    return strategy


def resolve_model(model: object) -> object:
    """The model; a mapping of several modules as a ModuleDict."""
    if isinstance(model, Mapping) and all(isinstance(each, nn.Module) for each in model.values()):
        model = nn.ModuleDict(model)
    return model


def resolve_optimizers(given: Any, model: nn.Module, strategy: Any, config: TrainingConfig) -> torch.optim.Optimizer:
    """The optimizer; for a strategy that trains several modules in turns, one for each that can learn, by its name."""
    options = optimizer_options(config)

    def resolve(one: Any, module: nn.Module) -> torch.optim.Optimizer:
        one = config.optimizer if one is None else one
        return resolve_optimizer(one, module, config.learning_rate, config.weight_decay, **options)

    if not isinstance(strategy, AlternatingStrategy):
        if isinstance(given, (Mapping, NamedOptimizers)):
            raise ConfigurationError(
                f"Trainer(optimizer={{{', '.join(map(repr, given))}}}): several optimizers need a strategy that says "
                f"which loss is whose, by compute_losses; {type(strategy).__name__} has one loss"
            )
        return resolve(given, model)
    if not isinstance(model, nn.ModuleDict):
        raise TypeError(
            f"Trainer(model={type(model).__name__}): {type(strategy).__name__} trains several modules in turns; give "
            "them by name, as {'generator': ..., 'discriminator': ...}"
        )
    if config.precision == "fp16" and config.accumulation.batches != 1:
        raise ConfigurationError(
            f"TrainingConfig(precision='fp16', accumulate={config.accumulate!r}): the gradient scale changes with each "
            "optimizer's update, and the others' waiting gradients have the old one; set accumulate=1, or use bf16"
        )
    if config.accumulation.schedule is not None:
        raise ConfigurationError(
            "TrainingConfig(accumulate=Accumulate(schedule=...)): counts updates, and several optimizers make several "
            "a batch; accumulate a fixed number of batches"
        )
    if isinstance(given, NamedOptimizers):
        return resolve(given, model)
    if given is not None and not isinstance(given, (str, Mapping)):
        raise TypeError(f"Trainer(optimizer={type(given).__name__}): needs one for each module, as {{'actor': 'adam'}}")
    chosen = dict(given) if isinstance(given, Mapping) else {}
    everyone = given if isinstance(given, str) else None
    learning = {name: each for name, each in model.items() if any(p.requires_grad for p in each.parameters())}
    for name in chosen:
        if name not in learning:
            raise unknown_name("Trainer", "optimizer", name, list(learning))
    return NamedOptimizers({name: resolve(chosen.get(name, everyone), each) for name, each in learning.items()})


def named_loaders(val_loader: Any) -> dict[str, Iterable[Any]]:
    """Validation sets by name; a single one is called "val"."""
    if val_loader is None:
        return {}
    loaders = dict(val_loader) if isinstance(val_loader, Mapping) else {"val": val_loader}
    for name, loader in loaders.items():
        if not isinstance(name, str) or not name or name == "train":
            raise ConfigurationError(
                f"Trainer(val_loader={{{name!r}: ...}}): needs a name for the set, other than 'train'"
            )
        if getattr(loader, "fires_rollouts", False):
            raise ConfigurationError(
                f"Trainer(val_loader): {name!r} is {type(loader).__name__}, whose batches the policy makes for "
                "learning; judge it by 'rollout/return' or 'rollout/reward', or by evaluate() of EnvironmentRollouts"
            )
        if not isinstance(loader, Iterable):
            raise TypeError(f"Trainer(val_loader): {name!r} is {type(loader).__name__}; needs an iterable of batches")
        if can_be_read_once(loader):
            raise ConfigurationError(
                f"Trainer(val_loader): {name!r} is an iterator, which can be read once; give a DataLoader or a list"
            )
    return loaders


def optimizer_options(config: TrainingConfig) -> dict[str, Any]:
    """The optimizer's keywords that the configuration asks for."""
    options = dict(config.optimizer_options)
    if config.no_decay is not None:
        options["no_decay"] = config.no_decay
    return options


def configured_handlers(
    config: TrainingConfig, optimizer: torch.optim.Optimizer, bound: Bound, given: Sequence[Any]
) -> list[Any]:
    """The handlers that settings stand for; one of a kind that is given as well is an error.

    So are two of the given ones that set the rate of one optimizer.
    """
    _refuse_two_schedulers(optimizer, given)
    added: list[Any] = []
    asked_for = config.warmup_steps or config.schedule_options or config.min_lr_ratio is not None
    if config.schedule is not None and (config.schedule != "constant" or asked_for):
        _refuse_second("schedule", LRScheduler, given)
        for name, part in parts_of(optimizer).items():
            schedule = build_schedule(
                config.schedule,
                float(part.defaults.get("lr", config.learning_rate)),  # an instance brings its own, even as a tensor
                total_steps=bound.total_updates,
                warmup_steps=config.warmup_steps,
                min_lr_ratio=config.min_lr_ratio,
                **config.schedule_options,
            )
            added.append(LRScheduler(schedule, name or None))
    if config.early_stopping_patience is not None:
        _refuse_second("early_stopping_patience", EarlyStopping, given)
        added.append(EarlyStopping(patience=config.early_stopping_patience))
    if config.save_every_n_epochs is not None and config.run_dir is not None:
        _refuse_second("save_every_n_epochs", Checkpointer, given)
        added.append(Checkpointer(config.run_dir, every=Every(epochs=config.save_every_n_epochs)))
    return added


def _refuse_two_schedulers(optimizer: torch.optim.Optimizer, given: Sequence[Any]) -> None:
    scheduled: set[Any] = set()
    for handler in given:
        if isinstance(handler, LRScheduler):
            followed = handler.optimizer or id(handler.given or optimizer)
            if followed in scheduled:
                raise ConfigurationError(
                    "Trainer(handlers=[LRScheduler, LRScheduler]): both would set the rates of one optimizer; make one "
                    "of them, over schedules composed by >> (torch's by its SequentialLR or ChainedScheduler)"
                )
            scheduled.add(followed)


def _refuse_second(setting: str, kind: type, given: Sequence[Any]) -> None:
    if any(isinstance(handler, kind) for handler in given):
        raise ConfigurationError(
            f"TrainingConfig({setting}=...) and a handler {kind.__name__}: give one; "
            f"{setting}=None leaves it to the handler"
        )
