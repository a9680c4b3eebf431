"""What `configure_optimizers` of a LightningModule returns, in each form that Lightning accepts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from pulsetrain.engine.argument_checks import is_whole
from pulsetrain.engine.errors import ArgumentTypeError, ConfigurationError

__all__ = ["ModuleScheduler", "configured"]

_PLACE = "configure_optimizers"
_KEYS = ("scheduler", "interval", "frequency", "monitor", "strict", "name", "reduce_on_plateau")


@dataclass(frozen=True)
class ModuleScheduler:
    """A scheduler of a module, and when it steps: every `frequency` batches that update, or epochs."""

    scheduler: Any  # with step() and a state
    interval: str = "epoch"
    frequency: int = 1
    monitor: str | None = None  # the metric that it follows
    strict: bool = True  # whether a metric that nobody has logged is an error


def configured(found: Any, *, manual: bool) -> tuple[list[Optimizer], list[ModuleScheduler]]:
    """The optimizers and schedulers in what `configure_optimizers` returned.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    >>> schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    >>> forms = optimizer, [optimizer], ([optimizer], [schedule]), {"optimizer": optimizer, "lr_scheduler": schedule}
    >>> [tuple(map(len, configured(form, manual=False))) for form in forms]
    [(1, 0), (1, 0), (1, 1), (1, 1)]

    Args:
        found: what was returned.
        manual: whether the module steps them itself; else there is one optimizer.

    Raises:
        ConfigurationError: several optimizers without manual optimization, or a wrong setting of a scheduler.
        ArgumentTypeError: the value has none of the forms.
    """
    optimizers, schedulers, monitor = _parts(found)
    if len(optimizers) > 1 and not manual:
        rule = (
            "returned {optimizers} optimizers; with automatic optimization there is one: set "
            "self.automatic_optimization = False and step them in training_step, as in Lightning"
        )
        raise ConfigurationError(rule, _PLACE, optimizers=len(optimizers))
    return optimizers, [_scheduler(each, monitor, manual=manual) for each in schedulers]


def _parts(found: Any) -> tuple[list[Optimizer], list[Any], str | None]:
    if isinstance(found, Optimizer):
        return [found], [], None
    if isinstance(found, Mapping) and isinstance(found.get("optimizer"), Optimizer):
        scheduler = found.get("lr_scheduler")
        return [found["optimizer"]], [] if scheduler is None else [scheduler], found.get("monitor")
    if isinstance(found, Sequence) and found:
        if all(isinstance(each, Optimizer) for each in found):
            return list(found), [], None
        if all(isinstance(each, Mapping) and isinstance(each.get("optimizer"), Optimizer) for each in found):
            schedulers = [each["lr_scheduler"] for each in found if each.get("lr_scheduler") is not None]
            return [each["optimizer"] for each in found], schedulers, None
        if len(found) == 2 and isinstance(found[0], list) and all(isinstance(each, Optimizer) for each in found[0]):
            return list(found[0]), list(found[1]) if isinstance(found[1], list) else [found[1]], None
    rule = (
        "needs an optimizer, a list of optimizers, two lists (optimizers and schedulers), or a mapping or several with "
        "'optimizer' and perhaps 'lr_scheduler'"
    )
    raise ArgumentTypeError(rule, _PLACE, returned=type(found))


def _scheduler(given: Any, monitor: str | None, *, manual: bool) -> ModuleScheduler:
    settings = dict(given) if isinstance(given, Mapping) else {"scheduler": given, "monitor": monitor}
    for key in settings:
        if key not in _KEYS:
            raise ConfigurationError(f"has the key {key!r}; there are {', '.join(_KEYS)}", _PLACE, lr_scheduler=...)
    scheduler = settings.get("scheduler")
    if not callable(getattr(scheduler, "step", None)) or not callable(getattr(scheduler, "state_dict", None)):
        rule = "needs an object with step() and state_dict(), such as a torch scheduler"
        raise ArgumentTypeError(rule, _PLACE, lr_scheduler=type(scheduler))
    interval, frequency = settings.get("interval", "epoch"), settings.get("frequency", 1)
    if interval not in ("step", "epoch"):
        raise ConfigurationError("choose 'step' or 'epoch'", _PLACE, interval=interval)
    if not is_whole(frequency) or frequency < 1:
        raise ConfigurationError("needs to be a whole number of at least 1", _PLACE, frequency=frequency)
    follows = settings.get("reduce_on_plateau", isinstance(scheduler, ReduceLROnPlateau))
    wanted = settings.get("monitor") if follows and not manual else None
    if follows and not manual and not isinstance(wanted, str):
        rule = "follows a metric; name it: {'scheduler': ..., 'monitor': 'val_loss'}"
        raise ConfigurationError(rule, _PLACE, lr_scheduler=type(scheduler))
    if wanted is not None and interval == "step":
        rule = "a scheduler that follows a metric steps at the end of an epoch; leave it out"
        raise ConfigurationError(rule, _PLACE, interval=interval)
    return ModuleScheduler(scheduler, interval, frequency, wanted, bool(settings.get("strict", True)))
