"""Torch schedulers: one that follows a schedule of this package, and a warm-up for any torch scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from pulsetrain.engine.argument_checks import check_type, check_whole_number
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.schedules.formula import Schedule, require_same
from pulsetrain.engine.schedules.groups import default_rate, write_rates
from pulsetrain.engine.schedules.named import build_schedule, keywords_of
from pulsetrain.engine.schedules.warmup import Warmup

__all__ = ["ScheduleLR", "WarmupLR", "add_warmup", "create_scheduler"]

_TORCH_NAMES = {"T_0": "first_cycle", "T_mult": "multiplier", "eta_min": "min_lr"}
_TAKEN = {"total_steps": "", "learning_rate": "", "place": ""}  # no keywords of a schedule: they follow from the others


def create_scheduler(
    optimizer: Optimizer, name: str, max_epochs: int, steps_per_epoch: int, warmup_steps: int = 0, **kwargs: Any
) -> ScheduleLR:
    """A torch scheduler that follows a named schedule over `max_epochs * steps_per_epoch` updates.

    Call `step()` after each update. Groups with the optimizer's default rate follow the schedule, and the others keep
    their ratio to it.

    >>> import torch
    >>> optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    >>> scheduler = create_scheduler(optimizer, "linear", max_epochs=2, steps_per_epoch=5)
    >>> scheduler.get_last_lr()
    [0.1]

    Args:
        steps_per_epoch: updates in an epoch: batches divided by the batches that an update accumulates.
        kwargs: those of `build_schedule`, by their own names or by torch's: `T_0` (in updates), `T_mult`, `eta_min`.

    Raises:
        TypeError: the optimizer is not a torch optimizer.
        ConfigurationError: as `build_schedule`; or max_epochs or steps_per_epoch is not a whole number of at least 1.
    """
    place = "create_scheduler"
    learning_rate = default_rate(optimizer, place)
    for argument, value in (("max_epochs", max_epochs), ("steps_per_epoch", steps_per_epoch)):
        check_whole_number(place, argument, value)
    if learning_rate == 0:
        raise ConfigurationError(
            "its default learning rate is 0, which no schedule can "
            "scale; give the optimizer the rate of an ordinary group",
            place,
            optimizer=type(optimizer),
        )
    choices = keywords_of(place, name)
    for theirs, ours in {**_TORCH_NAMES, **_TAKEN}.items():
        if theirs in kwargs:
            value = kwargs.pop(theirs)
            if ours not in choices:
                raise ConfigurationError(f"unknown to the schedule {name!r}; leave it out", place, **{theirs: value})
            if ours in kwargs:
                raise ConfigurationError(f"{ours} means the same; pass one of them", place, **{theirs: value})
            kwargs[ours] = value
    updates = max_epochs * steps_per_epoch
    schedule = build_schedule(
        name, learning_rate, total_steps=updates, warmup_steps=warmup_steps, place=place, **kwargs
    )
    return ScheduleLR(optimizer, schedule, learning_rate)


class ScheduleLR(LambdaLR):
    """A LambdaLR over a schedule: each group has its first rate times `schedule.get_lr(n) / learning_rate`.

    >>> import torch
    >>> from pulsetrain.engine.schedules import Linear
    >>> optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=1.0)
    >>> scheduler = ScheduleLR(optimizer, Linear(1.0, total_steps=4), learning_rate=1.0)
    >>> optimizer.step()
    >>> scheduler.step()
    >>> scheduler.get_last_lr()
    [0.75]

    Args:
        learning_rate: the rate of the groups that follow the schedule itself.
    """

    def __init__(self, optimizer: Optimizer, schedule: Schedule, learning_rate: float) -> None:
        self.schedule = schedule
        super().__init__(optimizer, partial(_share, schedule, learning_rate))  # not a lambda: it can be pickled

    def state_dict(self) -> dict[str, Any]:
        """Plain values, which torch loads without pickle; the schedule saves its own state."""
        state = {**super().state_dict(), "schedule": self.schedule.state_dict()}
        del state["lr_lambdas"]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the step count and writes the saved rates to the optimizer.

        Raises:
            CheckpointError: the state belongs to a different schedule.
        """
        require_same("ScheduleLR", {"schedule": state_dict.get("schedule")}, {"schedule": self.schedule.state_dict()})
        state = {key: value for key, value in state_dict.items() if key != "schedule"}
        super().load_state_dict({**state, "lr_lambdas": [None] * len(self.lr_lambdas)})
        write_rates(self.optimizer, self._last_lr)


def _share(schedule: Schedule, learning_rate: float, step: int) -> float:
    """The factor of a group's first rate."""
    return schedule.get_lr(step) / learning_rate


def add_warmup(
    scheduler: LRScheduler, warmup_steps: int, strategy: Literal["linear", "exponential"] = "linear"
) -> WarmupLR:
    """Puts a warm-up before a torch scheduler; call `step()` on the result instead of on the scheduler.

    After s updates the rate is `s / warmup_steps` (exponential: its square) of the scheduler's first rate. From
    `s = warmup_steps` on the scheduler decides, starting at its own step 0. The optimizer's rate becomes 0 immediately.

    >>> import torch
    >>> optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    >>> scheduler = add_warmup(torch.optim.lr_scheduler.StepLR(optimizer, 10), warmup_steps=4)
    >>> optimizer.step()
    >>> scheduler.step()
    >>> scheduler.get_last_lr()
    [0.025]

    Args:
        warmup_steps: calls of `step()` before the scheduler decides.

    Raises:
        TypeError: the scheduler is not a torch scheduler.
        ConfigurationError: the scheduler has already been stepped or starts at rate 0, or a value is out of range.
    """
    needs = "a torch LRScheduler; before a Schedule use Warmup(...) >> it"
    check_type("add_warmup", "scheduler", scheduler, LRScheduler, needs)
    return WarmupLR(scheduler, Warmup(1.0, warmup_steps, strategy))


class WarmupLR(LRScheduler):
    """The scheduler that `add_warmup` returns. Torch's SequentialLR warns at the switch and rejects ReduceLROnPlateau.

    Args:
        warmup: the fraction of the scheduler's first rate, from 0 to 1.
    """

    last_epoch: int

    def __init__(self, scheduler: LRScheduler, warmup: Warmup) -> None:
        place = f"add_warmup(scheduler={type(scheduler).__name__})"
        if _was_stepped(scheduler):
            raise ConfigurationError(f"{place}: has been stepped already; add the warm-up right after creating it")
        # the scheduler wrote its first rates when it was created
        self.base_lrs: list[float | Tensor] = [float(group["lr"]) for group in scheduler.optimizer.param_groups]
        if not any(self.base_lrs):
            raise ConfigurationError(
                f"{place}: starts at rate 0, which leaves nothing to warm up to; does it include a warm-up?"
            )
        # not super().__init__(): it assumes that the first rate is `initial_lr`, and a scheduler may start elsewhere
        self.optimizer: Optimizer = scheduler.optimizer
        self.scheduler = scheduler
        self.warmup = warmup
        self.last_epoch = 0
        self._write(self.get_lr())

    def get_lr(self) -> list[float | Tensor]:
        if self.last_epoch > self.warmup.warmup_steps:
            return self._last_lr
        return [rate * self.warmup.get_lr(self.last_epoch) for rate in self.base_lrs]

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advances one step; after the warm-up the scheduler gets the arguments, such as ReduceLROnPlateau's metric."""
        self.last_epoch += 1
        if self.last_epoch <= self.warmup.warmup_steps:
            self._write(self.get_lr())  # the last one restores the scheduler's first rate, exactly
        else:
            self.scheduler.step(*args, **kwargs)
            self._note()

    def state_dict(self) -> dict[str, Any]:
        return {
            **self._identity(),
            "last_epoch": self.last_epoch,
            "base_lrs": list(self.base_lrs),
            "_last_lr": list(self._last_lr),
            "scheduler": self.scheduler.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores the step count and writes the saved rates to the optimizer.

        Raises:
            CheckpointError: the state belongs to a different warm-up or a different kind of scheduler.
        """
        mine = self._identity()
        require_same("WarmupLR", {key: state_dict.get(key) for key in mine}, mine)
        self.last_epoch = state_dict["last_epoch"]
        self.base_lrs = list(state_dict["base_lrs"])
        self.scheduler.load_state_dict(dict(state_dict["scheduler"]))
        self._write(state_dict["_last_lr"])

    def _identity(self) -> dict[str, object]:
        return {"before": type(self.scheduler).__name__, "warmup": self.warmup.state_dict()}

    def _write(self, rates: list[float | Tensor]) -> None:
        write_rates(self.optimizer, rates)
        self._note()

    def _note(self) -> None:
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self._last_lr = [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]


def _was_stepped(scheduler: LRScheduler) -> bool:
    # a ChainedScheduler has no count, and a SequentialLR sets the schedulers that wait to -1
    inner = getattr(scheduler, "_schedulers", ())
    return getattr(scheduler, "last_epoch", 0) > 0 or any(_was_stepped(one) for one in inner)
