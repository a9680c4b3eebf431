"""Sets the optimizer's learning rate during training."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from itertools import zip_longest
from typing import Any, Literal, Self

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler as TorchLRScheduler
from torch.optim.lr_scheduler import ReduceLROnPlateau

from pulsetrain.engine import ArgumentTypeError, CheckpointError, ConfigurationError, Engine, Event, Events, Phase
from pulsetrain.engine.argument_checks import check_choice
from pulsetrain.engine.errors import refused, unknown_name
from pulsetrain.engine.events.names import EventType
from pulsetrain.engine.logs import get_logger
from pulsetrain.engine.optimizers import NamedOptimizers
from pulsetrain.engine.schedules import Schedule
from pulsetrain.engine.schedules.groups import GroupRates
from pulsetrain.engine.training_run import optimizer_of
from pulsetrain.handlers.attachment.attachment import Handler

__all__ = ["LRScheduler"]

_COUNTED: dict[str, EventType] = {
    "update": Events.OPTIMIZER_STEP_COMPLETED,
    "epoch": Events.EPOCH_COMPLETED,
    "iteration": Events.ITERATION_COMPLETED,
}


class LRScheduler(Handler):
    """Follows a schedule: the first update uses `get_lr(0)`, the one after n others `get_lr(n)`.

    A schedule of this package gives the rate of the groups that have the optimizer's default rate; other groups keep
    their ratio to it. A torch scheduler is stepped. An fp16 update that the device skipped after an overflow counts
    like any other.

    Args:
        schedule: one of `pulsetrain.engine.schedules`, or a torch LRScheduler.
        optimizer: by default the engine's, or the torch scheduler's; if the engine has several, the name of one.
        by: what counts as a step of the schedule: an update, an epoch or an iteration.

    Raises:
        TypeError: the schedule is neither; or it is a ReduceLROnPlateau, which follows a metric.
        ConfigurationError: `by` is unknown, or the optimizer is not the torch scheduler's.

    >>> import torch
    >>> from pulsetrain.engine.schedules import Linear
    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    >>> scheduler = LRScheduler(Linear(initial_lr=1.0, total_steps=4), optimizer)
    >>> [scheduler.get_last_lr(), scheduler.step(), scheduler.step()]
    [1.0, 0.75, 0.5]
    """

    factor: float
    optimizer: str | None

    def __init__(
        self,
        schedule: Schedule | TorchLRScheduler,
        optimizer: Optimizer | str | None = None,
        by: Literal["update", "epoch", "iteration"] = "update",
    ) -> None:
        if isinstance(getattr(schedule, "scheduler", schedule), ReduceLROnPlateau):  # perhaps inside a warm-up
            rule = "it follows a metric; use pulsetrain.handlers.ReduceLROnPlateau"
            raise ArgumentTypeError(rule, "LRScheduler", schedule=ReduceLROnPlateau)
        if not isinstance(schedule, (TorchLRScheduler, Schedule)):
            rule = "needs a schedule of pulsetrain.engine.schedules or a torch LRScheduler"
            raise ArgumentTypeError(rule, "LRScheduler", schedule=schedule)
        check_choice("LRScheduler", "by", by, _COUNTED)
        self.schedule = schedule
        self.by = by
        self.factor = 1.0  # of the schedule's rates, which ReduceLROnPlateau lowers
        self._count = 0
        self._rates: GroupRates | None = None  # of a schedule of this package, once there is an optimizer
        self.optimizer = optimizer if isinstance(optimizer, str) else None  # its name
        self.given = None if isinstance(optimizer, str) else optimizer
        if isinstance(schedule, TorchLRScheduler):
            if self.given is not None:
                self._require_same(self.given, schedule.optimizer)
            self.given = schedule.optimizer
        if self.given is not None:
            self._adopt(self.given)
        self._follows: str | None = None  # of several optimizers, the name of this one

    def attach(self, engine: Engine) -> Self:
        """Follow the engine's updates (or epochs, or iterations).

        Raises:
            ConfigurationError: no optimizer was given and the engine has none.
        """
        with self._attachment.to(engine, whole_bus=False) as subscribe:
            theirs, self._follows = self._part(engine, optimizer_of(engine))
            if self.given is None:
                if theirs is None:
                    raise refused(self, f"{engine.name!r} has no torch optimizer; pass optimizer=", "optimizer")
                self._adopt(theirs)
            elif isinstance(self.schedule, TorchLRScheduler) and theirs is not None:
                self._require_same(theirs, self.given)
            subscribe(Events.STARTED, self._write, phase=Phase.ACT)
            counted = self._advance if self._follows is None or self.by != "update" else self._advance_mine
            subscribe(_COUNTED[self.by], counted, phase=Phase.ACT)
            subscribe(Events.COMPLETED, self._check_was_stepped, phase=Phase.ACT)
        return self

    def step(self) -> float:
        """Advance the schedule by one step; returns the new rate of the groups with the optimizer's default rate."""
        self._advance()
        return self.get_last_lr()

    def get_last_lr(self) -> float:
        """The current rate (of a torch scheduler, that of its first group)."""
        if isinstance(self.schedule, TorchLRScheduler):
            return float(self.schedule.get_last_lr()[0])
        return self.schedule.get_lr(self._count) * self.factor

    def multiply(self, factor: float) -> None:
        """Multiply the rates of a schedule of this package from now on; the factor is not part of the state."""
        changed, self.factor = factor != self.factor, factor
        if changed:
            self._write()

    def scheduled(self) -> Optimizer | None:
        """The optimizer whose rates it sets; None before there is one."""
        if isinstance(self.schedule, TorchLRScheduler):
            followed: Optimizer = self.schedule.optimizer
            return followed
        return None if self._rates is None else self._rates.optimizer

    def state_dict(self) -> dict[str, object]:
        """In plain containers, as checkpoints need them: a MultiStepLR keeps its milestones in a Counter."""
        return {"step": self._count, "schedule": _plain(self.schedule.state_dict())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state.

        Raises:
            CheckpointError: the state belongs to a different schedule.
        """
        saved = dict(state["schedule"])
        if isinstance(self.schedule, TorchLRScheduler):
            mine = self.schedule.state_dict()
            if saved.keys() != mine.keys():
                rule = (
                    f"the saved state is that of another scheduler: it holds {sorted(saved)}, "
                    f"this one {sorted(mine)}; use the schedule it was saved from"
                )
                raise CheckpointError(rule, "LRScheduler", schedule=type(self.schedule))
            saved = _like(saved, mine)
        self.schedule.load_state_dict(saved)
        self._count = int(state["step"])
        if self._rates is not None:
            self._write()

    def _adopt(self, optimizer: Optimizer) -> None:
        if not isinstance(self.schedule, TorchLRScheduler):
            self._rates = GroupRates(optimizer, "LRScheduler")  # notes the first rates before anything changes them

    def _write(self) -> None:
        if isinstance(self.schedule, TorchLRScheduler):
            return  # it sets the rates itself
        if self._rates is None:
            raise RuntimeError("LRScheduler.step(): no optimizer yet; pass optimizer= or attach to an engine first")
        self._rates.write(self.schedule.get_lr(self._count) * self.factor)

    def _advance(self) -> None:
        if isinstance(self.schedule, TorchLRScheduler):
            self.schedule.step()
        self._count += 1
        self._write()

    def _advance_mine(self, engine: Engine, event: Event) -> None:
        if event.payload.optimizer == self._follows:
            self._advance()

    def _part(self, engine: Engine, optimizer: Optimizer | None) -> tuple[Optimizer | None, str | None]:
        """The engine's optimizer; of several, the one to schedule, with its name."""
        if not isinstance(optimizer, NamedOptimizers):
            if self.optimizer is not None:
                raise refused(self, f"{engine.name!r} has no optimizers by name", "optimizer")
            return optimizer, None
        name = self.optimizer if self.given is None else optimizer.name_of(self.given)
        if name is not None and name not in optimizer.parts:
            raise unknown_name("LRScheduler", "optimizer", name, list(optimizer))
        if name is None and self.given is None:
            raise refused(self, f"{engine.name!r} has several, {', '.join(optimizer)}; name one", "optimizer")
        return (optimizer[name], name) if name is not None else (self.given, None)

    def _check_was_stepped(self, engine: Engine) -> None:
        if self._count == 0 and self.by == "update" and engine.state.iteration > 0:
            get_logger("handlers").warning(
                "LRScheduler(by='update') saw no update: the learning rate has not changed. A custom step fires "
                "Events.OPTIMIZER_STEP_COMPLETED itself, or uses by='iteration'",
                engine=engine.name,
            )

    @staticmethod
    def _require_same(optimizer: Optimizer, scheduled: Optimizer) -> None:
        if optimizer is not scheduled:
            rule = "the torch scheduler was made for another optimizer and would set its rates; make it for this one"
            raise ConfigurationError(rule, "LRScheduler", optimizer=type(optimizer))


def _plain(value: object) -> object:
    """A copy whose containers are plain dicts, lists and tuples, not subclasses."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value] if isinstance(value, list) else tuple(map(_plain, value))
    return value


def _like(saved: Any, own: object) -> Any:
    """A copy of plain containers in which each dict has the class of its counterpart in `own`."""
    if isinstance(saved, dict) and isinstance(own, dict):
        made = copy(own)  # not type(own)(), which loses the factory of a defaultdict
        made.clear()
        made.update({key: _like(item, own.get(key)) for key, item in saved.items()})
        return made
    if isinstance(saved, list) and isinstance(own, list):
        return [_like(item, mine) for item, mine in zip_longest(saved, own[: len(saved)])]
    return saved
