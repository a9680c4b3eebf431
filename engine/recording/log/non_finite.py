"""NaN and the infinities as strings, since JSON has no such numbers."""

from __future__ import annotations

import math

__all__ = ["NON_FINITE", "finite_or_text"]

NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def finite_or_text(value: float) -> float | str:
    """The number itself if it is finite, else its string.

    >>> finite_or_text(0.5), finite_or_text(-math.inf)
    (0.5, '-Infinity')
    """
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
