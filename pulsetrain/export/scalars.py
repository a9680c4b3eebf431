"""The numbers of an event by their full names: train/loss, val/accuracy, learning_rate, grad_norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from pulsetrain.engine.events.names import Events
from pulsetrain.engine.recording import LoggedEvent
from pulsetrain.engine.recording.replay.payloads import plain
from pulsetrain.handlers.metric_values.step_values import METRIC_EVENTS
from pulsetrain.handlers.recorder.fingerprints import FingerprintEvents

__all__ = ["RETOLD", "FirstHand", "scalars_of"]

# means over iterations, and metrics that may be of an earlier validation: what others tell first hand is theirs to tell
RETOLD = frozenset({Events.METRICS_LOGGED.value, Events.EPOCH_COMPLETED.value})

# their numbers are bounds, places and digests: nothing to draw
_NOT_MEASURED = frozenset(
    {Events.STARTED.value, Events.EPOCH_STARTED.value, Events.CHECKPOINT_LOADED.value, "log_resumed"}
    | {event.value for event in FingerprintEvents}
)
_FULL = frozenset({Events.GRADIENTS_READY.value})  # whose fields are full names by themselves
_UPDATED = Events.OPTIMIZER_STEP_COMPLETED.value
_ROUNDS = frozenset(event.value for event in METRIC_EVENTS)
_RATE = "learning_rate"


def scalars_of(event: LoggedEvent, main: str) -> dict[str, float]:
    """An event's numbers; empty where it carries none, or none that measure anything.

    A step's output is train/NAME; metrics go by their names; the rates are learning_rate, learning_rate/1 and so on by
    parameter group; a field of another payload is EVENT/FIELD. Those of another engine than the main one begin with its
    name: evaluator/loss.

    Args:
        event: the event, measured fields in its payload, as `EventLog.read` gives it.
        main: the engine whose run it is.
    """
    found: dict[str, float] = {}
    own = event.engine == main
    prefix = "" if own else f"{event.engine}/"
    if event.output is not None:
        _add(found, "train/" if own else prefix, event.output)
    if event.metrics is not None:
        _add(found, prefix, event.metrics)
    payload, kind = event.payload, event.event
    if type(payload) is dict and kind not in _NOT_MEASURED:
        if kind == _UPDATED:
            _add_rates(found, prefix, payload.get("learning_rates"))
        elif kind in _FULL:
            _add(found, prefix, payload)
        else:
            for name, value in payload.items():
                if name == "metrics":
                    _add(found, prefix, value)
                elif name != "iteration":  # a place
                    _put(found, f"{prefix}{kind}/{name}", value)
    _add_rates(found, prefix, event.lr)
    return found


class FirstHand:
    """Picks from the events of a log, one by one, the numbers that no event before has told first hand.

    RETOLD events give what nobody else tells. Behind a validation or a rollout `state.metrics` holds what earlier ones
    have told as well: only what no payload tells is first hand there.
    """

    def __init__(self) -> None:
        self._told: set[str] = set()
        self._beside: set[str] = set()  # told by `state.metrics` alone

    def of(self, event: LoggedEvent, main: str) -> dict[str, float]:
        """Those of `scalars_of` that this event is to tell."""
        scalars, told, beside = scalars_of(event, main), self._told, self._beside
        if event.event in RETOLD:
            return {name: value for name, value in scalars.items() if name not in told and name not in beside}
        if event.event in _ROUNDS and event.metrics is not None:
            own = scalars_of(msgspec.structs.replace(event, metrics=None), main)
            scalars = {name: value for name, value in scalars.items() if name in own or name not in told}
            told.update(own)
            beside.update(scalars)
        else:
            told.update(scalars)
        return scalars


def _add(found: dict[str, float], prefix: str, values: Any) -> None:
    if type(values) is not dict:
        return _put(found, f"{prefix}loss", values)
    for name, value in values.items():
        _put(found, name if prefix and name.startswith(prefix) else prefix + name, value)
    return None


def _add_rates(found: dict[str, float], prefix: str, rates: Any) -> None:
    if isinstance(rates, Sequence):
        for group, rate in enumerate(rates):
            _put(found, f"{prefix}{_RATE}/{group}" if group else f"{prefix}{_RATE}", rate)


def _put(found: dict[str, float], name: str, value: Any) -> None:
    kind = type(value)
    if kind is float or kind is int:
        found[name] = value
    elif kind is str:
        number = plain(value)  # "NaN" and the infinities
        if number is not value:
            found[name] = number
    elif kind is dict:
        for key, item in value.items():
            _put(found, f"{name}/{key}", item)
