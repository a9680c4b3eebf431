"""What the Trainer's arguments may be, checked when it is made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from engine.errors import ConfigurationError, unknown_name
from engine.protocols import TrainingStrategy
from engine.strategies import STRATEGIES

__all__ = ["named_loaders", "resolve_strategy"]


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
