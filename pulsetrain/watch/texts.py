"""Numbers, times and events as text for a terminal."""

from __future__ import annotations

import time

from pulsetrain.engine.plain_text import plain
from pulsetrain.engine.recording.log.records import LoggedEvent
from pulsetrain.export.event_formats import values_of
from pulsetrain.runs.live import LiveEvent

__all__ = ["bar", "clock", "event_line", "number", "size", "timespan"]


def number(value: float) -> str:
    """A value of a curve.

    >>> number(0.000123456), number(12345678.0)
    ('0.0001235', '1.235e+07')
    """
    return f"{value:.4g}"


def timespan(seconds: float) -> str:
    """A time that something takes.

    >>> timespan(59.6), timespan(3661), timespan(2 * 86400 + 60)
    ('1:00', '1:01:01', '2 d 0:01')
    """
    whole = round(seconds)
    minutes, left = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}:{left:02}"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours < 24 else f"{hours // 24} d {hours % 24}:{minutes:02}"


def size(bytes_: float) -> str:
    """Memory.

    >>> size(3 * 2**30), size(5 * 2**20)
    ('3.0 GiB', '5 MiB')
    """
    return f"{bytes_ / 2**30:.1f} GiB" if bytes_ >= 2**30 else f"{bytes_ / 2**20:.0f} MiB"


def bar(share: float, width: int) -> str:
    """A bar that is filled to a share from 0 to 1.

    >>> bar(0.5, 4)
    '━━──'
    """
    filled = int(share * width)
    return "━" * filled + "─" * (width - filled)


def clock(nanoseconds: int) -> str:
    """The time of the day."""
    return time.strftime("%H:%M:%S", time.localtime(nanoseconds / 1e9))


def event_line(found: LiveEvent, *, with_rank: bool) -> str:
    """An event in one line."""
    event: LoggedEvent = found.event
    rank = f"rank {found.rank}  " if with_rank else ""
    place = f"{event.epoch:>3} {event.iteration:>8,}"
    return plain(f"{clock(event.t)}  {rank}{event.engine:<9} {event.event:<25} {place}  {values_of(event)}").rstrip()
