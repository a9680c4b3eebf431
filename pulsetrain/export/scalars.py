"""The numbers of an event by their full names: train/loss, val/accuracy, learning_rate, grad_norm."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pulsetrain.engine.recording import LoggedEvent
from pulsetrain.engine.recording.log.blocks import SEAM
from pulsetrain.engine.recording.log.non_finite import NON_FINITE
from pulsetrain.engine.recording.log.records import Json

__all__ = ["SUMMARIES", "FirstSources", "scalars_of"]

# Events by their values, as in a log: `Events` would need torch.
# They repeat what other events hold: means over iterations, and metrics that may be of an earlier validation.
SUMMARIES = frozenset({"metrics_logged", "epoch_completed"})

# their numbers are limits, positions and digests, not measurements
_NOT_MEASURED = frozenset(
    {"started", "epoch_started", "checkpoint_loaded", SEAM, "state_fingerprinted", "batch_fingerprinted"}
)
_FULL = frozenset({"gradients_ready"})  # the fields of its payload are full names
_UPDATED = "optimizer_step_completed"
_ROUNDS = frozenset({"validation_completed", "rollout_completed", "policy_updated"})
_RATE = "learning_rate"


def scalars_of(event: LoggedEvent, main: str) -> dict[str, float]:
    """The numbers that an event measured; empty if there are none.

    A step's output is named train/NAME; metrics keep their names; rates are learning_rate, learning_rate/1 and so on by
    parameter group; a field of another payload is EVENT/FIELD. Names of other engines than the main one begin with the
    engine's name: evaluator/loss.

    >>> event = LoggedEvent(engine="trainer", event="iteration_completed", output={"loss": 0.5}, lr=[0.1])
    >>> scalars_of(event, "trainer")
    {'train/loss': 0.5, 'learning_rate': 0.1}

    Args:
        event: from `EventLog.read`, so that measured fields are in its payload.
        main: the engine of the training run.
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
                elif name != "iteration":  # a position
                    _put(found, f"{prefix}{kind}/{name}", value)
    _add_rates(found, prefix, event.lr)
    return found


class FirstSources:
    """Selects the numbers of each event that the event itself measured, so that none is exported twice.

    SUMMARIES count only for names that no other event has. After a validation or a rollout, `state.metrics` still holds
    values of earlier ones: it counts only for names that no payload has.
    """

    def __init__(self) -> None:
        self._measured: set[str] = set()
        self._metrics: set[str] = set()  # names that only `state.metrics` has

    def scalars(self, event: LoggedEvent, main: str) -> dict[str, float]:
        """The part of `scalars_of` that this event measured."""
        scalars, measured, metrics = scalars_of(event, main), self._measured, self._metrics
        if event.event in SUMMARIES:
            return {name: value for name, value in scalars.items() if name not in measured and name not in metrics}
        if event.event in _ROUNDS and event.metrics is not None:
            own = scalars_of(msgspec.structs.replace(event, metrics=None), main)
            scalars = {name: value for name, value in scalars.items() if name in own or name not in measured}
            measured.update(own)
            metrics.update(scalars)
        else:
            measured.update(scalars)
        return scalars


def _add(found: dict[str, float], prefix: str, values: Json) -> None:
    for name, value in values.items() if type(values) is dict else [("loss", values)]:
        _put(found, name if prefix and name.startswith(prefix) else prefix + name, value)


def _add_rates(found: dict[str, float], prefix: str, rates: Json) -> None:
    if isinstance(rates, Sequence):
        for group, rate in enumerate(rates):
            _put(found, f"{prefix}{_RATE}/{group}" if group else f"{prefix}{_RATE}", rate)


def _put(found: dict[str, float], name: str, value: Json) -> None:
    kind = type(value)
    if kind is float or kind is int:
        found[name] = value
    elif kind is str and value in NON_FINITE:
        found[name] = NON_FINITE[value]
    elif kind is dict:
        for key, item in value.items():
            _put(found, f"{name}/{key}", item)
