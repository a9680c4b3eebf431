"""How handlers publish what they measure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pulsetrain.engine import Engine, Events, MediaLogged, MetricsLogged

__all__ = ["publish", "publish_media"]


def publish(engine: Engine, metrics: Mapping[str, float], *, measured: bool = False) -> None:
    """Fire METRICS_LOGGED if anything subscribes to it.

    Args:
        engine: fires the event.
        metrics: values by full name; nothing is fired if there are none.
        measured: they depend on the clock or the machine, so that a recorded run does not expect them again.
    """
    if not metrics or not engine.hears(Events.METRICS_LOGGED):
        return
    engine.fire(Events.METRICS_LOGGED, MetricsLogged(metrics=metrics), observed=measured)


def publish_media(
    engine: Engine, name: str, kind: Literal["text", "image", "figure", "histogram", "matrix"], value: object
) -> None:
    """Fire MEDIA_LOGGED if anything subscribes to it."""
    if engine.hears(Events.MEDIA_LOGGED):
        engine.fire(Events.MEDIA_LOGGED, MediaLogged(name=name, kind=kind, value=value))
