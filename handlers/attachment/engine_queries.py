"""What handlers ask about the engine that they are attached to."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import TypeVar

import torch

from pulsetrain.engine import Engine, Event, EventBus, Events, RecordingError, is_training_run
from pulsetrain.engine.events.names import EventType
from pulsetrain.engine.recording.replay.engine import ReplayBus

__all__ = [
    "attribute",
    "batch_number",
    "device_of",
    "handlers_of",
    "is_run_end",
    "outermost",
    "reject_replay",
    "settings_of",
]

Kind = TypeVar("Kind")


def attribute(engine: object, name: str, kind: type[Kind]) -> Kind | None:
    """An attribute that a Trainer has, and that users may set on an engine of their own, such as `optimizer`.

    Returns:
        None if the engine has no such attribute, or one of another type.

    Raises:
        RecordingError: the engine is a replay and its log lacks the attribute.
    """
    value = getattr(engine, name, None)
    return value if isinstance(value, kind) else None


def device_of(engine: object) -> torch.device | None:
    """The device of the engine's backend, None if it has none."""
    return attribute(attribute(engine, "backend", object), "device", torch.device)


def settings_of(engine: object) -> dict[str, object] | None:
    """The fields of `engine.config` by name, None unless that is a dataclass."""
    config = attribute(engine, "config", object)
    if not is_dataclass(config) or isinstance(config, type):
        return None
    return {field.name: getattr(config, field.name) for field in fields(config)}


def handlers_of(engine: Engine, event: EventType, kind: type[Kind]) -> list[Kind]:
    """The handlers of this class with a method subscribed to the event, in order of subscription, each once."""
    found: dict[int, Kind] = {}
    for subscription in engine.bus.signal(event).subscriptions(id(engine)):
        owner = getattr(subscription.handler, "__self__", None)
        if isinstance(owner, kind):
            found[id(owner)] = owner
    return list(found.values())


def batch_number(engine: Engine) -> int:
    """The batch's number in its epoch, from 0; in the run, while the length of an epoch is not known."""
    length = engine.state.epoch_length
    done: int = engine.state.iteration - 1
    return done % length if length else done


def is_run_end(engine: Engine, event: Event) -> bool:
    """Whether this end event (COMPLETED, TERMINATE, INTERRUPT, EXCEPTION_RAISED) really is the run's last.

    COMPLETED follows TERMINATE, perhaps after a last validation, unless it is skipped. A trainer that returns to an
    earlier checkpoint continues from there.
    """
    if is_training_run(engine) and engine.is_rewinding:
        return False
    return event.type != Events.TERMINATE.value or engine.should_terminate == "skip_completed"


def outermost(engine: Engine) -> Engine:
    """The engine of the bus whose run contains this engine's run: a trainer, and not its evaluator."""
    return next((each for each in engine.bus.engines if each is not engine and each.is_running), engine)


def reject_replay(place: str, target: Engine | EventBus, needed: str) -> None:
    """Reject a replay's engine or bus.

    Args:
        place: the handler's class name, for the message.
        target: what the handler is being attached to.
        needed: what the handler needs and no log has, such as "process that trains".

    Raises:
        RecordingError: the target is a replay's.
    """
    if isinstance(target, ReplayBus) or isinstance(getattr(target, "bus", None), ReplayBus):
        name = getattr(target, "name", "bus")
        raise RecordingError(
            f"{place}.attach(): Replay {name!r} has no {needed}: event logs do not store it; "
            "attach this handler to a run that trains"
        )
