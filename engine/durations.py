"""Durations as people write them."""

from __future__ import annotations

__all__ = ["duration"]

_UNITS = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))


def duration(seconds: float) -> str:
    """The two largest units of a duration.

    >>> duration(4.2), duration(130), duration(7300), duration(200_000)
    ('4.2 s', '2 min 10 s', '2 h 1 min', '2 d 7 h')
    """
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    rest, parts = round(seconds), list[str]()
    for unit, size in _UNITS:
        number, rest = divmod(rest, size)
        if number or parts:
            parts.append(f"{number} {unit}")
    return " ".join(parts[:2])
