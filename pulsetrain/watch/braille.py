"""Curves drawn with braille characters, of which each is a grid of 2 times 4 dots."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pulsetrain.report.curve import Floats
from pulsetrain.watch.texts import number

__all__ = ["Cell", "Points", "draw"]

Points = tuple[Floats, Floats]  # iterations and values

_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # by column and row
_BLANK = 0x2800
_MARGIN = 10  # characters for the values at the left


class Cell(NamedTuple):
    """A character, and which curve it belongs to; None for the axes."""

    character: str
    curve: int | None = None


class _Canvas:
    """Dots in a grid of characters; where curves cross, a character belongs to the last one."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self._bits = [[0] * width for _ in range(height)]
        self._owner: list[list[int | None]] = [[None] * width for _ in range(height)]

    def line(self, x0: int, y0: int, x1: int, y1: int, curve: int) -> None:
        """Draw a line from one dot to another."""
        steps = max(abs(x1 - x0), abs(y1 - y0), 1)
        for step in range(steps + 1):
            x, y = x0 + round((x1 - x0) * step / steps), y0 + round((y1 - y0) * step / steps)
            self._bits[y // 4][x // 2] |= _DOTS[x % 2][y % 4]
            self._owner[y // 4][x // 2] = curve

    def rows(self) -> list[list[Cell]]:
        return [
            [
                Cell(chr(_BLANK + bits) if bits else " ", owner)
                for bits, owner in zip(self._bits[row], self._owner[row], strict=True)
            ]
            for row in range(self.height)
        ]


def draw(curves: Sequence[Points], width: int, height: int, *, logarithmic: bool = False) -> list[list[Cell]]:
    """Rows of characters: curves in one picture, with the values of its ends at the left, and iterations below.

    >>> import numpy as np
    >>> rows = draw([(np.array([1.0, 2.0, 3.0]), np.array([0.0, 4.0, 2.0]))], 20, 4)
    >>> print(*("".join(cell.character for cell in row).rstrip() for row in rows), sep=chr(10))
             4│   ⡰⠑⠢⣀
              │ ⢀⠎    ⠑⠢
             0│⡰⠁
               1       3

    Args:
        curves: the points of each, in order; NaN leaves a gap.
        width: in characters.
        height: in characters, the line of the iterations included.
        logarithmic: the scale of the values, if all are positive.
    """
    columns, lines = max(width - _MARGIN - 1, 2), max(height - 1, 1)
    finite = [
        (at, value)
        for points in curves
        for at, value in zip(*(each.tolist() for each in points), strict=True)
        if math.isfinite(value)
    ]
    if not finite:
        text = "not finite" if any(len(at) for at, _ in curves) else "no values yet"
        return [[Cell(each) for each in (text if row == lines // 2 else "")] for row in range(height)]
    first, last = min(at for at, _ in finite), max(at for at, _ in finite)
    low, high = min(value for _, value in finite), max(value for _, value in finite)
    canvas = _Canvas(columns, lines)
    scale: Callable[[float], float] = math.log if logarithmic and low > 0 else lambda value: value / 2
    bottom, top = scale(low), scale(high)  # halves, for the whole difference may be infinite

    def dot(at: float, value: float) -> tuple[int, int]:
        x = (at - first) / (last - first) if last > first else 0.0
        y = (scale(value) - bottom) / (top - bottom) if top > bottom else 0.5
        return round(x * (2 * columns - 1)), round((1 - y) * (4 * lines - 1))

    for index, points in enumerate(curves):
        before: tuple[int, int] | None = None
        for at, value in zip(*(each.tolist() for each in points), strict=True):
            here = dot(at, value) if math.isfinite(value) else None
            if here is not None:
                canvas.line(*(before or here), *here, index)
            before = here
    rows = canvas.rows()
    labels = {0: high, lines - 1: low} if high > low else {lines // 2: high}
    drawn = [
        [Cell(each) for each in f"{number(labels[row]) if row in labels else '':>{_MARGIN}}│"] + cells
        for row, cells in enumerate(rows)
    ]
    left, right = f"{first:,.0f}", f"{last:,.0f}" if last > first else ""
    axis = " " * (_MARGIN + 1) + left + right.rjust(columns - len(left))
    return [*drawn, [Cell(each) for each in axis[:width]]]
