"""How a run ended, as the events of its log say."""

from __future__ import annotations

import re
from typing import NamedTuple

from pulsetrain.engine.recording.log.records import Json, LoggedEvent

__all__ = ["ENDS", "Ending", "ending_of", "format_error"]

_AT_A_LIMIT = re.compile(r"max_\w+=.* was reached")  # a planned reason to terminate

ENDS = frozenset({"completed", "terminate", "interrupt", "exception_raised"})
"""The events that end a run of the engine that fires them."""


class Ending(NamedTuple):
    """How, and why."""

    kind: str  # "completed", "stopped" or "failed"
    reason: str


def ending_of(event: LoggedEvent) -> Ending | None:
    """The ending that an event of the training engine is; None for any other event.

    >>> ending_of(LoggedEvent(event="terminate", payload={"reason": "max_tokens=100 was reached"}))
    Ending(kind='completed', reason='max_tokens=100 was reached')
    >>> ending_of(LoggedEvent(event="completed", epoch=2))
    Ending(kind='completed', reason='completed after 2 epochs')
    """
    payload = event.payload if isinstance(event.payload, dict) else {}
    match event.event:
        case "completed":
            return Ending("completed", f"completed after {event.epoch:,} epoch{'' if event.epoch == 1 else 's'}")
        case "terminate":
            text = str(payload.get("reason") or "no reason was given")
            return Ending("completed" if _AT_A_LIMIT.fullmatch(text) else "stopped", text)
        case "interrupt":
            return Ending("stopped", "interrupted")
        case "exception_raised":
            return Ending("failed", format_error(payload.get("error")))
    return None


def format_error(error: Json) -> str:
    """A logged exception as one line.

    >>> format_error({"__type__": "builtins.ValueError", "message": "bad batch"})
    'ValueError: bad batch'
    """
    if type(error) is not dict:
        return str(error)
    kind, message = str(error.get("__type__") or "an exception").rpartition(".")[2], str(error.get("message") or "")
    return f"{kind}: {message}" if message else kind
