"""Mechanism: events, the bus, the run loop and the parts of a training step."""

from engine.bus import EventBus, Phase, Subscription
from engine.cadence import Every
from engine.emitter import EngineState as State
from engine.events import Event, EventEnum, Events
from engine.loop import Engine

__all__ = ["Engine", "Event", "EventBus", "EventEnum", "Events", "Every", "Phase", "State", "Subscription"]
