"""What a recorded log holds, as plain values."""

import msgspec

from pulsetrain.engine.recording import EventLog


def recorded(folder):
    """The log's events as plain values, those fields left out that they have not."""
    events = msgspec.to_builtins(list(EventLog(folder).read()))
    return [{"epoch": 0, "iteration": 0, **event} for event in events]


def types(folder):
    return [event["event"] for event in recorded(folder)]
