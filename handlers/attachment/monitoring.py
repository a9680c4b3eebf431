"""What monitors share: how they publish, and what they say to a replay."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from pulsetrain.engine.errors import ConfigurationError, RecordingError
from pulsetrain.engine.events.bus import EventBus
from pulsetrain.engine.events.cadence import Every
from pulsetrain.engine.events.engine import Engine
from pulsetrain.engine.events.names import Events
from pulsetrain.engine.events.payloads import MediaLogged, MetricsLogged
from pulsetrain.engine.recording.replay.engine import ReplayBus

__all__ = [
    "check_every",
    "check_flag",
    "check_number",
    "check_whole",
    "publish",
    "publish_media",
    "refuse_replay",
]


def publish(engine: Engine, metrics: Mapping[str, float], *, measured: bool = False) -> None:
    """Fire METRICS_LOGGED for somebody who listens.

    Args:
        engine: in whose name.
        metrics: by their full names; nothing is fired for none.
        measured: they hang on the clock or on the machine: a recording does not expect them again.
    """
    if not metrics or not engine.hears(Events.METRICS_LOGGED):
        return
    engine.fire(Events.METRICS_LOGGED, MetricsLogged(metrics=metrics), observed=measured)


def publish_media(
    engine: Engine, name: str, kind: Literal["text", "image", "figure", "histogram", "matrix"], value: Any
) -> None:
    """Fire MEDIA_LOGGED for somebody who listens."""
    if engine.hears(Events.MEDIA_LOGGED):
        engine.fire(Events.MEDIA_LOGGED, MediaLogged(name=name, kind=kind, value=value))


def refuse_replay(place: str, target: Engine | EventBus, needed: str) -> None:
    """Refuse an engine, or a bus, that fires what a log holds.

    Args:
        place: the handler's class name.
        target: what it is to be attached to.
        needed: that no log holds, such as "a process that trains".

    Raises:
        RecordingError: it is a replay's.
    """
    if isinstance(target, ReplayBus) or isinstance(getattr(target, "bus", None), ReplayBus):
        name = getattr(target, "name", "bus")
        raise RecordingError(
            f"{place}.attach(): Replay {name!r} has no {needed}: an event log does not hold it; "
            "a handler that needs it can run in training alone"
        )


def check_every(place: str, every: Any, example: str = "Every(iterations=50)") -> None:
    """Refuse what is no cadence.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(every, Every):
        raise TypeError(f"{place}(every={every!r}): needs an Every, such as {example}")


def check_whole(place: str, argument: str, value: Any, least: int = 1) -> None:
    """Refuse what is no whole number of at least so much.

    Raises:
        ConfigurationError: it is none.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigurationError(f"{place}({argument}={value!r}): needs a whole number of at least {least}")


def check_number(place: str, argument: str, value: Any, least: float = 0.0, below: float = math.inf) -> None:
    """Refuse what is no number of at least so much and below the bound.

    Raises:
        ConfigurationError: it is none.
    """
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not least <= value < below:
        wanted = f"finite number of at least {least:g}"
        if below < math.inf:
            wanted = f"number of at least {least:g} and below {below:g}"
        raise ConfigurationError(f"{place}({argument}={value!r}): needs a {wanted}")


def check_flag(place: str, argument: str, value: Any) -> None:
    """Refuse what is neither True nor False.

    Raises:
        ConfigurationError: it is neither.
    """
    if not isinstance(value, bool):
        raise ConfigurationError(f"{place}({argument}={value!r}): needs True or False")
