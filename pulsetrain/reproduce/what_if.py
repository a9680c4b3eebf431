"""What a handler would have done in a recorded run: it is made from a configuration, and the run replayed to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from pulsetrain.configuration.claim import holds_run
from pulsetrain.configuration.class_paths import Factory
from pulsetrain.configuration.instantiate import instantiate
from pulsetrain.configuration.shipped_handlers import HANDLERS
from pulsetrain.engine.errors import ConfigurationError, MetricNotFoundError
from pulsetrain.engine.events.names import Events
from pulsetrain.engine.metrics import canonical
from pulsetrain.engine.recording.replay.playback import Replay, Stop
from pulsetrain.handlers import LossSpikeGuard
from pulsetrain.handlers.metric_values.step_values import METRIC_EVENTS

__all__ = ["ReplayedHandler", "check_apart", "make_handler", "replay_to"]


class ReplayedHandler(Protocol):
    """What can be attached to a replayed run."""

    def attach(self, engine: Replay) -> object: ...


def make_handler(
    spec: Mapping[str, Any],
    location: str,
    shipped: Mapping[str, Factory] = HANDLERS,
    *,
    settings: str | None = None,
) -> ReplayedHandler:
    """Make a handler for replays.

    Args:
        spec: its class_path and init_args.
        location: of the spec, for messages.
        shipped: names that need no path.
        settings: location of the arguments, for messages.

    Raises:
        PulsetrainError: it cannot be made, or is not a handler.
    """
    handler: ReplayedHandler = instantiate(spec, location, shipped, settings=settings)
    if not callable(getattr(handler, "attach", None)):
        raise ConfigurationError(f"{location}: {type(handler).__name__} is not a handler: it has no attach()")
    return handler


def check_apart(spec: Mapping[str, Any], location: str, make: Callable[[], ReplayedHandler]) -> None:
    """Reject a handler that would write into a run: recorded runs are only read.

    Args:
        spec: its class_path and init_args.
        location: of the spec, for messages.
        make: makes the handler, which may make its folder.

    Raises:
        PulsetrainError: it would, or it cannot be made.
    """
    given = _paths(spec["init_args"].get)
    _refuse_runs(location, given)
    handler = make()
    own = _paths(lambda name: getattr(handler, name, None))
    _refuse_runs(location, [path for path in own if not any(path.is_relative_to(folder) for folder in given)])


def replay_to(replay: Replay, handlers: Sequence[ReplayedHandler]) -> Stop | None:
    """Play the run until one of the handlers ends it; returns where, or None if none does.

    Raises:
        MetricNotFoundError: the run has no such metric as a handler judges by.
    """
    try:
        for handler in handlers:
            _check_metric(replay, handler)
            handler.attach(replay)
        replay.run()
    finally:
        for handler in handlers:
            getattr(handler, "detach", lambda: None)()
    return replay.stops[0] if replay.stops else None


def _check_metric(replay: Replay, handler: object) -> None:
    metric = getattr(handler, "metric", None)
    if not isinstance(metric, str) or isinstance(handler, LossSpikeGuard):  # whose metric is a loss of the step
        return
    name, known, has_rollouts = type(handler).__name__, dict[str, object](), False
    for event in replay.log.read(engine=replay.name, event={event.value for event in METRIC_EVENTS}):
        metrics = event.payload.get("metrics") if type(event.payload) is dict else None
        known |= metrics if type(metrics) is dict else {}
        has_rollouts = has_rollouts or event.event != Events.VALIDATION_COMPLETED.value
        if not has_rollouts or _flat(metric) in map(_flat, known):
            return  # the handler itself reports a metric that a validation lacks
    if known:  # one rollout may lack a metric, but not all of them
        canonical(metric, known, place=name)
    raise MetricNotFoundError(
        f"this metric does not exist: no validation of {replay.name!r} is in the log", name, metric=metric
    )


def _flat(name: str) -> str:
    return name.replace("/", "_")


def _paths(value_of: Callable[[str], object]) -> list[Path]:
    found = [value_of(name) for name in ("folder", "path")]
    return [Path(each).resolve() for each in found if isinstance(each, Path | str) and "://" not in str(each)]


def _refuse_runs(location: str, paths: Sequence[Path]) -> None:
    for folder in (folder for path in paths for folder in (path, *path.parents)):
        if holds_run(folder):
            raise ConfigurationError(f"{location}: would write into the run {folder}; choose another folder")
