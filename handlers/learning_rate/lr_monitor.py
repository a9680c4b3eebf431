"""Publishes the learning rate of each parameter group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from torch import Tensor

from pulsetrain.engine import FIRST, ConfigurationError, Engine, Events, Every, Phase
from pulsetrain.handlers.attachment.attachment import Handler
from pulsetrain.handlers.attachment.cadence import check_every, reading_events
from pulsetrain.handlers.attachment.engine_queries import reject_replay
from pulsetrain.handlers.attachment.publishing import publish
from pulsetrain.handlers.metric_values.step_values import learning_rates, on_host

__all__ = ["LRMonitor"]


class LRMonitor(Handler):
    """Fires METRICS_LOGGED with the rates of the last update: "learning_rate", or one for each group.

    With several groups, it is "learning_rate/NAME" if each has a different "name", otherwise "learning_rate/0" and so
    on. In a replay it is always the number, since a log holds no names.

    Args:
        every: when to publish.
        momentum: publish each group's momentum as well, "momentum" or "momentum/..."; for Adam and the like, beta1.
        weight_decay: publish each group's weight decay as well.

    Raises:
        TypeError: the cadence is not an Every.

    >>> import torch
    >>> engine, published = Engine(lambda engine, batch: None), []
    >>> engine.optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    >>> _ = LRMonitor(Every(iterations=2)).attach(engine)
    >>> @engine.on(Events.METRICS_LOGGED)
    ... def note(engine, event):
    ...     published.append((event.iteration, event.payload.metrics))
    >>> _ = engine.run([1, 2, 3, 4])
    >>> published
    [(2, {'learning_rate': 0.5}), (4, {'learning_rate': 0.5})]
    """

    momentum: bool
    weight_decay: bool

    def __init__(self, every: Every | None = None, *, momentum: bool = False, weight_decay: bool = False) -> None:
        self.every: Every = Every(iterations=50) if every is None else every
        check_every("LRMonitor", self.every)
        self.momentum, self.weight_decay = momentum, weight_decay
        self._last_read = -1  # iteration at which it published last

    def attach(self, engine: Engine) -> Self:
        """Publish at the start of phase OBSERVE, after the handlers that set the rates.

        Raises:
            ConfigurationError: the engine has no optimizer.
            RecordingError: the engine is a replay, and momentum or weight decay is to be published.
        """
        with self._attachment.to(engine, whole_bus=False) as subscribe:
            if _groups_of(engine) is None:
                raise ConfigurationError(f"LRMonitor: {engine.name!r} has no optimizer; set engine.optimizer")
            if self.momentum or self.weight_decay:
                reject_replay("LRMonitor", engine, "momentum and weight decay")
            self._last_read = -1
            subscribe(Events.STARTED, self._on_started, on_error="warn")
            # FIRST: before loggers that read at the same event, also in a replay
            subscribe(reading_events(self.every), self._publish, phase=Phase.OBSERVE, order=FIRST, on_error="warn")
        return self

    def _on_started(self) -> None:
        self._last_read = -1

    def _publish(self, engine: Engine) -> None:
        iteration = engine.state.iteration
        if iteration == self._last_read or not engine.hears(Events.METRICS_LOGGED):
            return  # two parts of the cadence met, or nothing subscribes
        self._last_read = iteration
        groups = _groups_of(engine) or []
        labels = _labels(groups)
        series: dict[str, Sequence[Tensor | float | None]] = {"learning_rate": learning_rates(engine)}
        if self.momentum:
            series["momentum"] = [group.get("momentum", group.get("betas", (None,))[0]) for group in groups]
        if self.weight_decay:
            series["weight_decay"] = [group.get("weight_decay") for group in groups]
        # labelled by all groups: one that was added since the last update, and has no rate yet, does not rename others
        found = {
            metric if len(labels) == 1 else f"{metric}/{labels[index]}": value
            for metric, values in series.items()
            for index, value in enumerate(values)
            if value is not None
        }
        publish(engine, {name: float(value) for name, value in on_host(found).items()})


def _groups_of(engine: Engine) -> list[dict[str, Any]] | None:
    """The parameter groups of the engine's optimizer, or of the recorded one of a replay; None without one."""
    groups: list[dict[str, object]] | None = getattr(getattr(engine, "optimizer", None), "param_groups", None)
    return groups


def _labels(groups: list[dict[str, object]]) -> list[str]:
    """The names of several optimizers; else the groups' own names, or their numbers."""
    owners = [group.get("optimizer") for group in groups]
    if None not in owners and len(set(owners)) == len(owners):
        return [str(owner) for owner in owners]
    labels = [str(group.get("name", index)) for index, group in enumerate(groups)]
    return labels if len(set(labels)) == len(labels) else [str(index) for index in range(len(groups))]
