"""What the Trainer's arguments may be, checked when it is made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from engine.errors import ConfigurationError, unknown_name
from engine.protocols import TrainingStrategy
from engine.strategies import STRATEGIES
from pulsetrain.config import TrainingConfig

__all__ = ["check_kinds", "named_loaders", "resolve_strategy"]


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
        if name in ("loss", "perplexity", "bits_per_byte"):
            raise ConfigurationError(f"Trainer(metrics={{{name!r}: ...}}): the strategy's own name; choose another")
    for argument, given in (("handlers", handlers), ("callbacks", callbacks)):
        if not isinstance(given, (list, tuple)):
            raise TypeError(f"Trainer({argument}={type(given).__name__}): needs a list, as {argument}=[...]")
    for handler in handlers:
        if isinstance(handler, type):
            raise TypeError(f"Trainer(handlers=[{handler.__name__}]): needs an object, as {handler.__name__}(...)")
        if not callable(getattr(handler, "attach", None)):
            raise TypeError(f"Trainer(handlers=[{handler!r}]): a handler needs attach(engine); functions go to on()")


def resolve_strategy(strategy: Any) -> TrainingStrategy:
    """The strategy that a name or an object stands for."""
    if isinstance(strategy, str):
        if strategy not in STRATEGIES:
            raise unknown_name("Trainer", "strategy", strategy, STRATEGIES)
        return STRATEGIES[strategy]()
    if isinstance(strategy, type) or not isinstance(strategy, TrainingStrategy):
        raise TypeError(
            f"Trainer(strategy={strategy!r}): needs a name ({', '.join(sorted(STRATEGIES))}) or an object with "
            "prepare_batch, compute_loss and compute_metrics"
        )
    return strategy


def named_loaders(val_loader: Any) -> dict[str, Iterable[Any]]:
    """Validation sets by name; a single one is called "val"."""
    if val_loader is None:
        return {}
    loaders = dict(val_loader) if isinstance(val_loader, Mapping) else {"val": val_loader}
    for name, loader in loaders.items():
        if not isinstance(loader, Iterable):
            raise TypeError(f"Trainer(val_loader): {name!r} is {type(loader).__name__}; needs an iterable of batches")
        if iter(loader) is loader:
            raise ConfigurationError(
                f"Trainer(val_loader): {name!r} is an iterator, which can be read once; give a DataLoader or a list"
            )
    return loaders
