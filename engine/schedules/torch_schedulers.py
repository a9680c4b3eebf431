"""Torch schedulers: one that follows a schedule of ours, and a warm-up for any other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.schedules.formula import Schedule, is_whole, require_same
from pulsetrain.engine.schedules.groups import default_rate, write_rates
from pulsetrain.engine.schedules.named import keywords_of, named_schedule
from pulsetrain.engine.schedules.warmup import Warmup

__all__ = ["ScheduleLR", "WarmupLR", "add_warmup", "create_scheduler"]

_TORCH_NAMES = {"T_0": "first_cycle", "T_mult": "multiplier", "eta_min": "min_lr"}


def create_scheduler(
    optimizer: Optimizer, name: str, max_epochs: int, steps_per_epoch: int, warmup_steps: int = 0, **kwargs: Any
) -> ScheduleLR:
    """A torch scheduler that follows the schedule of that name over `max_epochs * steps_per_epoch` updates.

    Step it after each update. A group that has the optimizer's default rate follows the schedule itself, the others
    keep their ratio to it.

    Args:
        steps_per_epoch: updates in an epoch: batches divided by the batches that an update accumulates.
        kwargs: those of `build_schedule`, by their own names or by torch's: `T_0` (in updates), `T_mult`, `eta_min`.

    Raises:
        TypeError: the optimizer is none of torch's.
        ConfigurationError: as `build_schedule`; or max_epochs or steps_per_epoch is no whole number from 1 on.
    """
    place = "create_scheduler"
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"{place}(optimizer={optimizer!r}): needs a torch.optim.Optimizer")
    for argument, value in (("max_epochs", max_epochs), ("steps_per_epoch", steps_per_epoch)):
        if not is_whole(value) or value < 1:
            raise ConfigurationError(f"{place}({argument}={value!r}): needs a whole number, at least 1")
    learning_rate = default_rate(optimizer)
    if learning_rate == 0:
        raise ConfigurationError(
            "its default learning rate is 0, which no schedule can "
            "scale; give the optimizer the rate of an ordinary group",
            place,
            optimizer=type(optimizer),
        )
    choices = keywords_of(place, name)
    for theirs, ours in _TORCH_NAMES.items():
        if theirs in kwargs:
            value = kwargs.pop(theirs)
            if ours not in choices:
                raise ConfigurationError(f"{place}({theirs}={value!r}): unknown to the schedule {name!r}; leave it out")
            if ours in kwargs:
                raise ConfigurationError(f"{place}({theirs}={value!r}): {ours} says the same; give one of them")
            kwargs[ours] = value
    strategy, ratio = kwargs.pop("warmup_strategy", "linear"), kwargs.pop("min_lr_ratio", None)
    total_steps = max_epochs * steps_per_epoch
    schedule = named_schedule(place, name, learning_rate, total_steps, warmup_steps, strategy, ratio, kwargs)
    return ScheduleLR(optimizer, schedule, learning_rate)


class ScheduleLR(LambdaLR):
    """A LambdaLR over a schedule: each group runs at its first rate times `schedule.get_lr(n) / learning_rate`.

    Args:
        learning_rate: the rate at which a group follows the schedule itself.
    """

    def __init__(self, optimizer: Optimizer, schedule: Schedule, learning_rate: float) -> None:
        self.schedule = schedule
        super().__init__(optimizer, _Share(schedule, learning_rate))

    def state_dict(self) -> dict[str, Any]:
        """Plain values, so that torch loads them without pickle; the schedule by its own state."""
        state = {**super().state_dict(), "schedule": self.schedule.state_dict()}
        del state["lr_lambdas"]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where another left off; the rates that were in force are written to the optimizer.

        Raises:
            CheckpointError: the state is of another schedule.
        """
        require_same("ScheduleLR", {"schedule": state_dict.get("schedule")}, {"schedule": self.schedule.state_dict()})
        state = {key: value for key, value in state_dict.items() if key != "schedule"}
        super().load_state_dict({**state, "lr_lambdas": [None] * len(self.lr_lambdas)})
        write_rates(self.optimizer, self._last_lr)


class _Share:
    """What a group's first rate is multiplied by; a class and no lambda, so that a scheduler can be pickled."""

    def __init__(self, schedule: Schedule, learning_rate: float) -> None:
        self.schedule = schedule
        self.learning_rate = learning_rate

    def __call__(self, step: int) -> float:
        return self.schedule.get_lr(step) / self.learning_rate


def add_warmup(
    scheduler: LRScheduler, warmup_steps: int, strategy: Literal["linear", "exponential"] = "linear"
) -> WarmupLR:
    """The torch scheduler after a warm-up: step what this returns, and no longer the scheduler itself.

    The update behind s others runs at `s / warmup_steps` (exponential: its square) of the scheduler's first rate; from
    `s = warmup_steps` on the scheduler is in charge and begins at its own step 0. The optimizer is at rate 0 at once.

    Args:
        warmup_steps: calls of `step()` before the scheduler is in charge.

    Raises:
        TypeError: the scheduler is none of torch's.
        ConfigurationError: it has been stepped already, or begins at rate 0; a value out of range.
    """
    if not isinstance(scheduler, LRScheduler):
        raise TypeError(f"add_warmup(scheduler={scheduler!r}): needs a torch LRScheduler; ours compose by Warmup() >>")
    return WarmupLR(scheduler, Warmup(1.0, warmup_steps, strategy))


class WarmupLR(LRScheduler):
    """See `add_warmup`. Torch's SequentialLR warns when it hands over, and refuses a ReduceLROnPlateau.

    Args:
        warmup: the part of the scheduler's first rate, from 0 to 1.
    """

    def __init__(self, scheduler: LRScheduler, warmup: Warmup) -> None:
        place = f"add_warmup(scheduler={type(scheduler).__name__})"
        if _was_stepped(scheduler):
            raise ConfigurationError(f"{place}: has been stepped already; add the warm-up when it is made")
        # the scheduler has written its first rates when it was made
        self.base_lrs = [float(group["lr"]) for group in scheduler.optimizer.param_groups]
        if not any(self.base_lrs):
            raise ConfigurationError(
                f"{place}: begins at rate 0, which leaves nothing to warm up to; does it warm up by itself?"
            )
        # not super().__init__(): it takes each group's `initial_lr` for its first rate; a scheduler may begin elsewhere
        self.optimizer = scheduler.optimizer
        self.scheduler = scheduler
        self.warmup = warmup
        self.last_epoch = 0
        self._write(self.get_lr())

    def get_lr(self) -> list[float | Tensor]:
        if self.last_epoch > self.warmup.warmup_steps:
            return self._last_lr
        return [rate * self.warmup.get_lr(self.last_epoch) for rate in self.base_lrs]

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Go on by one step; once the scheduler is in charge it gets the arguments, as ReduceLROnPlateau its metric."""
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
        """Go on where another left off; the rates that were in force are written to the optimizer.

        Raises:
            CheckpointError: the state is of another warm-up, or of one before another kind of scheduler.
        """
        mine = self._identity()
        require_same("WarmupLR", {key: state_dict.get(key) for key in mine}, mine)
        self.last_epoch = state_dict["last_epoch"]
        self.base_lrs = list(state_dict["base_lrs"])
        self.scheduler.load_state_dict(dict(state_dict["scheduler"]))
        self._write(state_dict["_last_lr"])

    def _identity(self) -> dict[str, Any]:
        return {"before": type(self.scheduler).__name__, "warmup": self.warmup.state_dict()}

    def _write(self, rates: list[float | Tensor]) -> None:
        write_rates(self.optimizer, rates)
        self._note()

    def _note(self) -> None:
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self._last_lr = [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]


def _was_stepped(scheduler: LRScheduler) -> bool:
    # a ChainedScheduler counts nothing itself, and a SequentialLR sets those that wait to -1
    inner = getattr(scheduler, "_schedulers", ())
    return getattr(scheduler, "last_epoch", 0) > 0 or any(_was_stepped(one) for one in inner)
