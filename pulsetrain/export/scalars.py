"""The numbers of an event by their full names: train/loss, val/accuracy, learning_rate, grad_norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.events import Events
from engine.recording import LoggedEvent
from engine.recording.replay_payloads import plain
from handlers.fingerprints import FingerprintEvents

__all__ = ["RETOLD", "scalars_of"]

# means over iterations, and metrics that may be of an earlier validation: what others tell first hand is theirs to tell
RETOLD = frozenset({Events.METRICS_LOGGED.value, Events.EPOCH_COMPLETED.value})

# their numbers are bounds, places and digests: nothing to draw
_NOT_MEASURED = frozenset(
    {Events.STARTED.value, Events.EPOCH_STARTED.value, Events.CHECKPOINT_LOADED.value, "log_resumed"}
    | {event.value for event in FingerprintEvents}
)
_FULL = frozenset({Events.GRADIENTS_READY.value})  # whose fields are full names by themselves
_UPDATED = Events.OPTIMIZER_STEP_COMPLETED.value
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
