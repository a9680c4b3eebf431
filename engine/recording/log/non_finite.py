"""The strings "NaN", "Infinity" and "-Infinity", which represent non-finite floats: JSON has no such numbers."""

from __future__ import annotations

import math

from pulsetrain.engine.recording.log.records import Json

__all__ = ["NON_FINITE", "finite_or_text", "parse_non_finite"]

NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def parse_non_finite(value: Json) -> Json:
    """The float that the string names; any other value unchanged.

    >>> parse_non_finite("Infinity"), parse_non_finite("a"), parse_non_finite(2)
    (inf, 'a', 2)
    """
    return NON_FINITE.get(value, value) if type(value) is str else value


def finite_or_text(value: float) -> float | str:
    """The number itself if it is finite, else its string.

    >>> finite_or_text(0.5), finite_or_text(-math.inf)
    (0.5, '-Infinity')
    """
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
