"""Checks the Trainer's arguments, and makes what names and settings describe."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib.util import find_spec
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from pulsetrain.config import TrainingConfig
from pulsetrain.engine import Every
from pulsetrain.engine.argument_checks import check_choice, check_type
from pulsetrain.engine.data.loaders import can_be_read_once
from pulsetrain.engine.distributed.ranks import is_pipelined, is_sharded, ranks
from pulsetrain.engine.errors import ArgumentTypeError, ConfigurationError
from pulsetrain.engine.logs import get_logger
from pulsetrain.engine.notebook import notebook_shell
from pulsetrain.engine.optimizers import parts_of
from pulsetrain.engine.schedules import Schedule, build_schedule
from pulsetrain.engine.step.protocols import AlternatingStrategy, DerivesMetrics, TrainingStrategy
from pulsetrain.engine.strategies import STRATEGIES
from pulsetrain.familiar_names import no_strategy
from pulsetrain.handlers import (
    Alert,
    BestModel,
    Checkpointer,
    ConsoleLogger,
    CrashBundle,
    EarlyStopping,
    GradientMonitor,
    HuggingFaceExporter,
    LossSpikeGuard,
    LRFinder,
    LRScheduler,
    MetricLogger,
    Plots,
    Profiler,
    ProgressBar,
    RunSummary,
    SampleText,
)
from pulsetrain.handlers.callback import Callback
from pulsetrain.handlers.plots.notebook_curve import NotebookCurve
from pulsetrain.training.as_written import as_written
from pulsetrain.training.no_data import NoTrainingData
from pulsetrain.training.run_length import RunLength

__all__ = [
    "check_kinds",
    "check_metric_names",
    "check_ranks",
    "configured_handlers",
    "configured_schedules",
    "named_loaders",
    "resolve_strategy",
    "warn_of_unused_metrics",
    "writes_for_all",
]

_OUTPUT = (
    Alert, Checkpointer, CrashBundle, HuggingFaceExporter, MetricLogger, NotebookCurve, Plots, Profiler, ProgressBar,
    RunSummary, SampleText,
)  # fmt: skip

_READS_WEIGHTS = (BestModel, CrashBundle)
_TOGETHER = (HuggingFaceExporter, SampleText)  # which act at the same events in all processes of a sharded model
_OF_ALL = (Checkpointer, *_TOGETHER)  # what all processes do together if the model is sharded


def check_kinds(config: object, metrics: Any, handlers: Any, callbacks: Any, backend: object) -> None:
    """Reject arguments of the wrong kind, by name.

    Raises:
        ArgumentTypeError: an argument has the wrong type.
        ConfigurationError: a metric has the name of the loss.
    """
    check_type("Trainer", "config", config, TrainingConfig | None, "a TrainingConfig, as TrainingConfig(max_epochs=3)")
    check_type("Trainer", "metrics", metrics, Mapping | None, "a mapping, as {'accuracy': Accuracy()}")
    check_type("Trainer", "handlers", handlers, list | tuple, "a list, as handlers=[...]")
    check_type("Trainer", "callbacks", callbacks, list | tuple, "a list, as callbacks=[...]")
    if backend is not None and (isinstance(backend, type) or not hasattr(backend, "builds_model")):
        raise ArgumentTypeError("needs a backend, such as TorchBackend() or JaxBackend()", "Trainer", backend=backend)
    for callback in callbacks:
        if not isinstance(callback, Callback) and callable(getattr(callback, "attach", None)):
            raise ArgumentTypeError("is a handler; pass it in handlers=[...]", "Trainer", callbacks=[callback])
    for name, metric in (metrics or {}).items():
        if isinstance(metric, type):
            raise ArgumentTypeError(f"needs an object, such as {metric.__name__}()", "Trainer", metrics={name: metric})
        if name == "loss":  # of every strategy; check_metric_names knows further names
            raise ConfigurationError(
                "the name of the strategy's loss; choose another", "Trainer", metrics={"loss": ...}
            )
    for handler in handlers:
        if isinstance(handler, type):
            raise ArgumentTypeError(f"needs an object, such as {handler.__name__}(...)", "Trainer", handlers=[handler])
        if isinstance(handler, Callback):
            rule = (
                f"is a callback; pass it in callbacks=[...], or here as CallbackList([{type(handler).__name__}(...)])"
            )
            raise ArgumentTypeError(rule, "Trainer", handlers=[handler])
        if not callable(getattr(handler, "attach", None)):
            raise ArgumentTypeError(
                "a handler needs attach(engine); functions go to on()", "Trainer", handlers=[handler]
            )


def writes_for_all(handler: object, model: nn.Module) -> bool:
    """Whether one of the processes that train together saves, logs or draws by it for all, without the others."""
    return isinstance(handler, _OUTPUT) and not (isinstance(handler, _OF_ALL) and is_sharded(model))


def check_ranks(model: nn.Module, handlers: Iterable[object], shares: int) -> None:
    """Refuse handlers that act by what one process sees, where several train; warn of BatchNorm.

    Args:
        model: of this process.
        handlers: of its trainer.
        shares: into how many parts the processes divide each batch.

    Raises:
        ConfigurationError: a handler does.
    """
    for handler in handlers:
        acts = isinstance(handler, LossSpikeGuard) and (handler.policy != "warn" or handler.every.seconds is not None)
        if acts or isinstance(handler, LRFinder) or getattr(handler, "policy", None) == "rewind":
            raise ConfigurationError(
                f"{type(handler).__name__} cannot act like this where several processes train: they would not act "
                "alike; leave it out, start one process, or let a guard warn (policy='warn') or stop the run",
                "Trainer",
                handlers=[type(handler)],
            )
    handlers = list(handlers) if is_sharded(model) else []
    observed = [each for each in handlers if isinstance(each, _TOGETHER) and each.every and each.every.seconds]
    if observed:
        raise ConfigurationError(
            "all processes of a sharded model take part, and their clocks differ; choose iterations, updates or epochs",
            type(observed[0]).__name__,
            every=observed[0].every,
        )
    unfit = [each for each in handlers if _reads_wholes(each) or (isinstance(each, _TOGETHER) and is_pipelined(model))]
    if unfit:
        names = ", ".join(type(each).__name__ for each in unfit)
        raise ConfigurationError(
            f"{names}: not for models that are sharded, whose weights no process has as a whole; leave them out, or "
            "give each process the whole model",
            "Trainer",
            handlers=[type(each) for each in unfit],
        )
    own = [name for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
    own = [name for name in own if not isinstance(model.get_submodule(name), nn.SyncBatchNorm)]
    if own and shares > 1 and ranks().is_main:
        get_logger("pulsetrain").warning(
            "BatchNorm normalises by each process's share of a batch, not by the global batch; for that, use "
            "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) on GPUs, or another normalisation",
            first=own[0],
            modules=len(own),
        )


def _reads_wholes(handler: object) -> bool:
    """Whether a handler needs whole tensors."""
    return isinstance(handler, _READS_WEIGHTS) or (isinstance(handler, GradientMonitor) and handler.histograms)


def check_metric_names(metrics: Mapping[str, object] | None, strategy: TrainingStrategy) -> None:
    """Reject a metric under a name that the strategy derives from the loss itself, such as perplexity."""
    if not metrics or not isinstance(strategy, DerivesMetrics):
        return
    for name in strategy.derive_metrics(1.0):
        if name in metrics:
            raise ConfigurationError(
                f"{type(strategy).__name__} reports a metric of that name itself; choose another name",
                "Trainer",
                metrics={name: ...},
            )


def warn_of_unused_metrics(metrics: Iterable[str] | None, train_loader: object, sets: Collection[str]) -> None:
    """Warn of metrics of a trainer that trains and has no validation set: training computes none of them."""
    if metrics and not sets and not isinstance(train_loader, NoTrainingData) and ranks().is_main:
        get_logger("pulsetrain").warning(
            "metrics are computed over validation sets, and there is none: train() reports the loss without them; pass "
            "val_loader=..., for which the training data will do, or call validate(loader) or test(loader)",
            metrics=list(metrics),
        )


def resolve_strategy(strategy: object) -> Any:  # callers ask it for optional methods
    """The strategy of this name, or the strategy itself."""
    if isinstance(strategy, str):
        if strategy not in STRATEGIES and (remedy := no_strategy(strategy)):
            raise ConfigurationError(remedy, "Trainer", strategy=strategy)
        check_choice("Trainer", "strategy", strategy, STRATEGIES)
        return STRATEGIES[strategy]()
    if isinstance(strategy, type) or not isinstance(strategy, (TrainingStrategy, AlternatingStrategy)):
        if isinstance(strategy, (FunctionType, nn.Module)):
            rule = "is not a strategy; if it is a loss, pass strategy=SupervisedStrategy(loss)"
            raise ArgumentTypeError(rule, "Trainer", strategy=strategy)
        raise ArgumentTypeError(
            f"needs a name ({', '.join(sorted(STRATEGIES))}) or an object with prepare_batch, compute_loss and "
            "compute_metrics, or with prepare_batch and compute_losses",
            "Trainer",
            strategy=strategy,
        )
    return strategy


def named_loaders(val_loader: object) -> dict[str, Iterable[Any]]:  # batches of any kind
    """The validation sets by name; a single one is called "val"."""
    if val_loader is None:
        return {}
    loaders: dict[str, Any] = dict(val_loader) if isinstance(val_loader, Mapping) else {"val": val_loader}
    for name, loader in loaders.items():
        if not isinstance(name, str) or not name or name == "train":
            raise ConfigurationError("needs a name for the set, other than 'train'", "Trainer", val_loader={name: ...})
        if getattr(loader, "fires_rollouts", False) and not getattr(loader, "judges_policy", False):
            raise ConfigurationError(
                f"{name!r} is {type(loader).__name__}, whose batches the policy makes for learning; judge it by "
                "'rollout/return' or 'rollout/reward', or by evaluate() of EnvironmentRollouts",
                "Trainer",
                val_loader=...,
            )
        if not isinstance(loader, Iterable):
            raise ArgumentTypeError(
                f"{name!r} is {type(loader).__name__}; needs an iterable of batches", "Trainer", val_loader=...
            )
        if can_be_read_once(loader):
            raise ConfigurationError(
                f"{name!r} is an iterator, which can be read only once; pass a DataLoader or a list",
                "Trainer",
                val_loader=...,
            )
    return loaders


def configured_handlers(
    config: TrainingConfig,
    optimizer: torch.optim.Optimizer,
    length: RunLength,
    given: Sequence[object],
    sets: Sequence[str],
) -> list[Any]:
    """The handlers that settings ask for.

    Args:
        config: the settings.
        optimizer: the one whose rate a schedule sets.
        length: of the run.
        given: the handlers that the user passes.
        sets: the names of the validation sets.

    Raises:
        ConfigurationError: a handler of the same kind is given as well, two of them set the rate of one optimizer, or
            early stopping is asked for where no validation set is called "val".
    """
    followed = [each.optimizer or id(each.given or optimizer) for each in given if isinstance(each, LRScheduler)]
    if len(set(followed)) < len(followed):
        raise ConfigurationError(
            "both would set the rates of one optimizer; make one of them, over schedules composed by >> "
            "(torch's by its SequentialLR or ChainedScheduler)",
            "Trainer",
            handlers=[LRScheduler, LRScheduler],
        )
    added: list[object] = []
    if _has_schedule(config) and length.has_data:
        _refuse_second("schedule", config.schedule, LRScheduler, given)
        schedules = configured_schedules(config, optimizer, length.total_updates)
        added.extend(LRScheduler(schedule, name or None) for name, schedule in schedules.items())
    if config.early_stopping_patience is not None:
        _refuse_second("early_stopping_patience", config.early_stopping_patience, EarlyStopping, given)
        _check_judged(config.early_stopping_patience, sets)
        added.append(EarlyStopping(patience=config.early_stopping_patience))
    if config.save_every_n_epochs is not None and config.run_dir is not None:
        _refuse_second("save_every_n_epochs", config.save_every_n_epochs, Checkpointer, given)
        added.append(Checkpointer(config.run_dir, every=Every(epochs=config.save_every_n_epochs)))
    if config.progress and not any(isinstance(each, RunSummary) for each in given):
        added.append(RunSummary(on_error="warn"))
    if config.progress and not any(isinstance(each, (ProgressBar, ConsoleLogger)) for each in given):
        has_bar = find_spec("tqdm") is not None  # a small installation lacks it
        added.append(ProgressBar(on_error="warn") if has_bar else ConsoleLogger(on_error="warn"))
        added += [NotebookCurve()] if notebook_shell() is not None else []
    return added


def configured_schedules(
    config: TrainingConfig, optimizer: torch.optim.Optimizer, total_updates: int | None
) -> dict[str, Schedule]:
    """The schedule that settings ask for, for each optimizer by its name; empty if they ask for none.

    Raises:
        ConfigurationError: a setting does not fit the schedule, or the schedule needs the number of updates.
    """
    if not _has_schedule(config):
        return {}
    with as_written():
        return {
            name: build_schedule(
                str(config.schedule),
                float(part.defaults.get("lr", part.param_groups[0]["lr"])),  # possibly a tensor
                total_steps=total_updates,
                warmup_steps=config.warmup_steps,
                min_lr_ratio=config.min_lr_ratio,
                **config.schedule_options,
            )
            for name, part in parts_of(optimizer).items()
        }


def _has_schedule(config: TrainingConfig) -> bool:
    asked_for = config.warmup_steps or config.schedule_options or config.min_lr_ratio is not None
    return config.schedule is not None and (config.schedule != "constant" or bool(asked_for))


def _check_judged(patience: int, sets: Sequence[str]) -> None:
    if sets and "val" not in sets:
        raise ConfigurationError(
            f"judges val/loss, and no validation set is called 'val'; there are: {', '.join(sets)}; leave it out, and "
            f"add the handler EarlyStopping(metric='{sets[0]}/loss', patience={patience})",
            "TrainingConfig",
            early_stopping_patience=patience,
        )


def _refuse_second(setting: str, value: object, kind: type, given: Sequence[object]) -> None:
    if any(isinstance(handler, kind) for handler in given):
        raise ConfigurationError(
            f"a handler {kind.__name__} is given as well; pass one of the two: None (null in YAML) leaves it to the "
            "handler",
            "TrainingConfig",
            **{setting: value},
        )
