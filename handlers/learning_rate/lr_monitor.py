"""Publishes the learning rate of each parameter group."""

from __future__ import annotations

from typing import Any, Self

from torch import Tensor

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.events.cadence import Every
from pulsetrain.engine.events.engine import Engine
from pulsetrain.engine.events.names import Events
from pulsetrain.engine.events.subscription import FIRST, Phase
from pulsetrain.handlers.attachment.attachment import Attachment
from pulsetrain.handlers.attachment.cadence import check_every, reading_events
from pulsetrain.handlers.attachment.engine_queries import reject_replay
from pulsetrain.handlers.attachment.publishing import publish
from pulsetrain.handlers.metric_values.step_values import learning_rates, to_host

__all__ = ["LRMonitor"]


class LRMonitor:
    """Fires METRICS_LOGGED with the rates of the last update: "learning_rate", or one for each group.

    Several groups are "learning_rate/NAME" by what they keep as "name", where no two names are one; else
    "learning_rate/0" and so on. In a replay it is always the number, since a log holds no names.

    Args:
        every: when to look.
        momentum: tell each group's momentum as well, "momentum" or "momentum/..."; of Adam's kind the first beta.
        weight_decay: tell each group's weight decay as well.

    Raises:
        TypeError: the cadence is no Every.
    """

    def __init__(self, every: Every | None = None, *, momentum: bool = False, weight_decay: bool = False) -> None:
        self.every = Every(iterations=50) if every is None else every
        check_every("LRMonitor", self.every)
        self.momentum, self.weight_decay = momentum, weight_decay
        self._last_read = -1  # iteration
        self._attachment = Attachment("LRMonitor")

    def attach(self, engine: Engine) -> Self:
        """Look at the beginning of phase OBSERVE, behind what has changed the rates.

        Raises:
            ConfigurationError: the engine has no optimizer.
            RecordingError: the engine is a replay, and momentum or weight decay are asked for.
        """
        with self._attachment.to(engine, whole_bus=False) as subscribe:
            if not hasattr(getattr(engine, "optimizer", None), "param_groups"):
                raise ConfigurationError(f"LRMonitor: {engine.name!r} has no optimizer; set engine.optimizer")
            if self.momentum or self.weight_decay:
                reject_replay("LRMonitor", engine, "momentum and weight decay")
            self._last_read = -1
            subscribe(Events.STARTED, self._on_started, on_error="warn")
            # before loggers look at the same event, as a replay has it
            subscribe(reading_events(self.every), self._publish, phase=Phase.OBSERVE, order=FIRST, on_error="warn")
        return self

    def detach(self) -> None:
        self._attachment.cancel()

    def _on_started(self) -> None:
        self._last_read = -1

    def _publish(self, engine: Any) -> None:
        iteration = engine.state.iteration
        if iteration == self._last_read or not engine.hears(Events.METRICS_LOGGED):
            return  # two parts of the cadence met, or nobody wants to know
        self._last_read = iteration
        found: dict[str, Any] = {}
        groups: list[dict[str, Any]] = engine.optimizer.param_groups
        labels = _labels(groups)
        for index, rate in enumerate(learning_rates(engine)):
            found[_named("learning_rate", labels, index)] = rate
        for index, group in enumerate(groups):
            if self.momentum:
                found[_named("momentum", labels, index)] = group.get("momentum", group.get("betas", (None,))[0])
            if self.weight_decay:
                found[_named("weight_decay", labels, index)] = group.get("weight_decay")
        publish(engine, _brought_to_host({name: value for name, value in found.items() if value is not None}))


def _labels(groups: list[dict[str, Any]]) -> list[str]:
    """Of several optimizers their names; else the groups' own names, or their numbers."""
    owners = [group.get("optimizer") for group in groups]
    if None not in owners and len(set(owners)) == len(owners):
        return [str(owner) for owner in owners]
    labels = [str(group.get("name", index)) for index, group in enumerate(groups)]
    return labels if len(set(labels)) == len(labels) else [str(index) for index in range(len(groups))]


def _named(metric: str, labels: list[str], index: int) -> str:
    # a group added since the last update has no rate in it yet: the others keep their names
    return metric if len(labels) == 1 else f"{metric}/{labels[index]}"


def _brought_to_host(values: dict[str, Any]) -> dict[str, float]:
    """Numbers; tensors in one copy for a device and dtype."""
    tensors = {name: value.reshape(()) for name, value in values.items() if isinstance(value, Tensor)}
    host = dict(zip(tensors, to_host(list(tensors.values())), strict=True))
    return {name: host[name] if name in host else float(value) for name, value in values.items()}
