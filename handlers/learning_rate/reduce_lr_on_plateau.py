"""Lowers the learning rate when a metric stops improving."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler as TorchLRScheduler
from torch.optim.lr_scheduler import ReduceLROnPlateau as TorchReduceLROnPlateau

from pulsetrain.engine import ConfigurationError, Engine, Event, Events, Phase, RecordingError
from pulsetrain.engine.argument_checks import check_choice, check_number, check_type, check_whole_number
from pulsetrain.engine.errors import refused
from pulsetrain.engine.metrics import Mode
from pulsetrain.engine.recording.replay.engine import ReplayedEngine
from pulsetrain.engine.training_run import optimizer_of
from pulsetrain.handlers.attachment.attachment import Handler
from pulsetrain.handlers.attachment.engine_queries import handlers_of
from pulsetrain.handlers.learning_rate.lr_scheduler import LRScheduler
from pulsetrain.handlers.metric_values.best_value import (
    check_judged,
    decide_mode,
    judged_name,
    subscribe_judge,
    warn_if_never_reported,
)

__all__ = ["ReduceLROnPlateau"]

_PROGRESS = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")  # attributes of torch's


class ReduceLROnPlateau(Handler):
    """Multiplies the learning rates by a factor whenever `patience` rounds have passed without an improvement.

    It gives the numbers of torch.optim.lr_scheduler.ReduceLROnPlateau, bit for bit, with rounds in place of epochs:
    validations or rollouts. NaN is never an improvement.

    Together with an LRScheduler over a schedule of this package, each update uses the schedule's rate times the rate
    to which torch's would have reduced 1.0: with `Warmup(...)`, the rate warms up and then falls by the metric. A
    torch scheduler itself sets the rates and may undo the factor, so it is rejected.

    Args:
        metric: its name in VALIDATION_COMPLETED, such as "val/loss" (or "val_loss"), or in ROLLOUT_COMPLETED or
            POLICY_UPDATED, such as "rollout/return": rollouts without it are ignored.
        factor: at least 0, below 1.
        patience: rounds in a row that may pass without an improvement; the next one lowers the rates.
        mode: whether smaller ("min") or larger ("max") is better; by default as the metric or its name says.
        threshold: an improvement is larger than this; `threshold_mode` says whether it is a share of the best value.
        threshold_mode: "rel" (a share) or "abs" (absolute).
        cooldown: rounds after a reduction that do not count.
        min_lr: a lower bound of the rates; 0 with an LRScheduler, whose schedule has its own lowest rate.
        optimizer: by default the engine's.

    Raises:
        ConfigurationError: a value out of range.
        TypeError: the optimizer is not a torch optimizer.

    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    >>> plateau = ReduceLROnPlateau(factor=0.5, patience=1, optimizer=optimizer)
    >>> [plateau.step(loss) for loss in (0.9, 0.9, 0.9)], optimizer.param_groups[0]["lr"]
    ([False, False, True], 0.5)
    """

    metric: str
    factor: float
    patience: int
    threshold: float
    cooldown: int
    min_lr: float

    def __init__(
        self,
        metric: str = "val/loss",
        factor: float = 0.1,
        patience: int = 10,
        mode: Mode | None = None,
        threshold: float = 1e-4,
        threshold_mode: Literal["rel", "abs"] = "rel",
        cooldown: int = 0,
        min_lr: float = 0.0,
        *,
        optimizer: Optimizer | None = None,
    ) -> None:
        place = "ReduceLROnPlateau"
        check_judged(place, metric, mode)
        check_number(place, "factor", factor, below=1.0)
        check_whole_number(place, "patience", patience, at_least=0)
        check_whole_number(place, "cooldown", cooldown, at_least=0)
        check_number(place, "threshold", threshold)
        check_number(place, "min_lr", min_lr)
        check_choice(place, "threshold_mode", threshold_mode, ("rel", "abs"))
        check_type(place, "optimizer", optimizer, Optimizer | None, "a torch.optim.Optimizer")
        self.metric, self.factor, self.patience, self.threshold = metric, factor, patience, threshold
        self.mode: Mode | None = mode
        self.threshold_mode: Literal["rel", "abs"] = threshold_mode
        self.cooldown, self.min_lr = cooldown, min_lr
        self.optimizer = optimizer
        # its rate is the factor by which the rates of a schedule are multiplied
        self._scale = torch.optim.SGD([torch.zeros(0)], lr=1.0)
        self._torch = self._as_torch(mode or "min")
        self.schedulers: list[LRScheduler] = []  # whose rates are multiplied
        self._has_optimizer = optimizer is not None

    def attach(self, engine: Engine) -> Self:
        """Judge each validation or rollout of the engine, in phase ACT.

        It is checked here against the LRSchedulers of the engine, and again when the run starts: there may be new ones.

        Raises:
            ConfigurationError: no optimizer was given and the engine has none; the trainer never validates; or there is
                an LRScheduler that it cannot work with.
            MetricNotFoundError: the trainer has validation sets, and the metric is named after none of them.
            RecordingError: the engine is a replay, and no optimizer was given.
        """
        with self._attachment.to(engine, whole_bus=False) as subscribe:
            subscribe(Events.STARTED, self._join, phase=Phase.COMPUTE)
            subscribe_judge(subscribe, self._judge, "ReduceLROnPlateau", self.metric, engine, Phase.ACT)
            subscribe(Events.COMPLETED, self._on_completed, phase=Phase.ACT)
            self._decide(engine)
            self._join(engine)
        return self

    def step(self, value: float) -> bool:
        """Judge one more value; returns whether the rates were lowered.

        Raises:
            RuntimeError: there is no optimizer yet.
        """
        if not self._has_optimizer:
            raise RuntimeError(
                "ReduceLROnPlateau.step(): no optimizer yet; pass optimizer= or attach to an engine first"
            )
        self._decide()
        before = self._rates()
        self._torch.step(float(value))
        for scheduler in self.schedulers:
            scheduler.multiply(self._scale.param_groups[0]["lr"])
        return self._rates() != before

    def state_dict(self) -> dict[str, object]:
        """The values seen; the lowered rates are in the optimizer's own state."""
        progress = {name: getattr(self._torch, name) for name in _PROGRESS}
        return {**progress, "scale": self._scale.param_groups[0]["lr"]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the values seen, and the factor that multiplies the schedules."""
        self._decide()
        for name in _PROGRESS:
            setattr(self._torch, name, state[name])
        self._scale.param_groups[0]["lr"] = float(state["scale"])
        for scheduler in self.schedulers:
            scheduler.multiply(self._scale.param_groups[0]["lr"])

    def _decide(self, engine: Engine | None = None) -> None:
        mode = decide_mode("ReduceLROnPlateau", self, engine)
        if mode != self._torch.mode:  # decided just now, before the first value
            self._torch = self._as_torch(mode)

    def _as_torch(self, mode: Mode) -> TorchReduceLROnPlateau:
        return TorchReduceLROnPlateau(
            self._scale if self.optimizer is None else self.optimizer,
            mode=mode,
            factor=self.factor,
            patience=self.patience,
            threshold=self.threshold,
            threshold_mode=self.threshold_mode,
            cooldown=self.cooldown,
            min_lr=self.min_lr,
        )

    def _join(self, engine: Engine) -> None:
        """Find what to lower: the optimizer's rates, or those of the schedules that set them."""
        optimizer = self.optimizer if self.optimizer is not None else optimizer_of(engine)
        if optimizer is None:
            if isinstance(engine, ReplayedEngine):
                rule = (
                    f"Replay {engine.name!r} has no optimizer whose rates could be lowered: an event log "
                    "holds only the rates; pass optimizer=, or attach it in training"
                )
                raise RecordingError(rule, "ReduceLROnPlateau", optimizer=None)
            raise refused(self, f"{engine.name!r} has no torch optimizer; pass optimizer=", "optimizer")
        mine = {id(group) for group in optimizer.param_groups}
        found, scheduled = [], set()
        for scheduler in handlers_of(engine, Events.STARTED, LRScheduler):
            followed = scheduler.scheduled()
            groups = mine.intersection(map(id, followed.param_groups if followed is not None else ()))
            if groups:
                found.append(scheduler)
                scheduled |= groups
        if found:
            self._check_schedulers(engine, found, scheduled == mine)
        self.schedulers = found
        self._torch.optimizer = self._scale if found else optimizer
        self._has_optimizer = True
        for scheduler in found:
            scheduler.multiply(self._scale.param_groups[0]["lr"])

    def _check_schedulers(self, engine: Engine, found: list[LRScheduler], all_scheduled: bool) -> None:
        for scheduler in found:
            if isinstance(scheduler.schedule, TorchLRScheduler):
                kind = type(scheduler.schedule).__name__
                rule = (
                    f"LRScheduler(schedule={kind}) sets the rates itself, as torch schedulers do; use a schedule of "
                    "pulsetrain.engine.schedules, or only one of the two"
                )
                raise refused(self, rule, "metric")
        if self.min_lr > 0.0:
            rule = (
                "the schedule of an LRScheduler may set a rate below this; pass min_lr=0.0, or leave the schedule out"
            )
            raise refused(self, rule, "min_lr")
        if not all_scheduled:
            rule = "an LRScheduler sets the rates of some parameter groups; pass optimizer= with those or the others"
            raise ConfigurationError(rule, "ReduceLROnPlateau", optimizer=self.optimizer and type(self.optimizer))
        for other in handlers_of(engine, Events.VALIDATION_COMPLETED, ReduceLROnPlateau):
            if other is not self and not {*map(id, other.schedulers)}.isdisjoint(map(id, found)):
                rule = (
                    f"ReduceLROnPlateau(metric={other.metric!r}) multiplies the schedule of the same LRScheduler; "
                    "use one of the two"
                )
                raise refused(self, rule, "metric")

    def _rates(self) -> list[float]:
        return [float(group["lr"]) for group in self._torch.optimizer.param_groups]

    def _on_completed(self, engine: Engine) -> None:
        if self._torch.last_epoch == 0:  # the number of values that it has judged
            warn_if_never_reported("ReduceLROnPlateau", self.metric, engine)

    def _judge(self, engine: Engine, event: Event) -> None:
        name = judged_name("ReduceLROnPlateau", self.metric, engine, event)
        if name is not None:
            self.step(event.payload.metrics[name])
