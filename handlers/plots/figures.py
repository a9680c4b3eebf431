"""Figures of a run's curves and matrices: pure functions from data to a matplotlib Figure, and to the bytes of a file.

Equal data gives equal bytes. matplotlib takes 0.5 s to import and is imported when the first figure is made. Its object
API does not touch pyplot's global state.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from numpy.typing import NDArray

__all__ = ["FORMATS", "Panel", "confusion_matrix", "counts_of", "curves", "matrix", "range_test", "render"]

FORMATS = ("png", "svg")
# Okabe and Ito 2008, without yellow: distinguishable with any kind of colour vision
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
LINES = ("-", "--", "-.", ":")  # 4 and 7 have no common factor: 28 different pairs
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
COUNTED_CLASSES = 20  # of a confusion matrix: with more the numbers would be unreadable
_MARKED = 30  # points of a curve, at most, that get a marker each
_NAME = 60  # characters
_WIDTH = 8.0  # inches
_CHARACTERS = 96  # of a legend's line, at that width
_NON_FINITE = "not finite: NaN a cross, infinity an arrow"

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Args:
        title: above the axes.
        unit: of the vertical axis, in words.
        curves: label -> points (iteration, value); a label has one style in all panels of a figure.
        marked: labels of curves with few points, such as validations, which get markers.
    """

    title: str
    unit: str
    curves: Mapping[str, Points]
    marked: frozenset[str] = field(default_factory=frozenset)


def curves(panels: Sequence[Panel]) -> Figure:
    r"""Panels of curves over iterations, with one legend below them.

    An axis is logarithmic if its values are all positive and span more than two decades. Non-finite values are marked
    at the edge: NaN by a cross at the bottom, infinities by an arrow on their side.

    >>> figure = curves([Panel("loss", "loss", {"train/loss": [(1, 0.9), (2, 0.7)]})])
    >>> render(figure, "png")[:4]
    b'\x89PNG'
    """
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    labels = list(dict.fromkeys(label for panel in panels for label in panel.curves))
    everything = [y for panel in panels for points in panel.curves.values() for _, y in points]
    has_non_finite = not all(map(math.isfinite, everything))
    named = [*(labels if len(labels) > 1 else ()), *([_NON_FINITE] if has_non_finite else ())]
    columns = 1 if len(panels) == 1 else 2
    rows = math.ceil(len(panels) / columns)
    width = _WIDTH * (1.0 if columns == 1 else 1.4)
    longest = max((len(_short(each)) for each in named), default=0)
    legend_columns = max(1, min(len(named), int(_CHARACTERS * width / _WIDTH) // (9 + longest)))
    legend_rows = math.ceil(len(named) / legend_columns)
    figure = _figure(width, (4.5 if rows == 1 else 3.2 * rows) + 0.22 * legend_rows)
    handles: dict[str, Line2D] = {}
    for index, panel in enumerate(panels):
        axes = figure.add_subplot(rows, columns, index + 1)
        values = [y for points in panel.curves.values() for _, y in points if math.isfinite(y)]
        if values and min(values) > 0 and max(values) / min(values) > 100:
            axes.set_yscale("log")
        else:
            axes.ticklabel_format(axis="y", useOffset=False, scilimits=(-4, 8))
        if not values:
            axes.set_yticks([])
        for label, points in panel.curves.items():
            handles[label] = _draw(axes, points, labels.index(label), label in panel.marked)
        iterations = {x for points in panel.curves.values() for x, _ in points}
        if len(iterations) == 1:
            axes.set_xlim(min(iterations) - 1, min(iterations) + 1)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        alone = f": {_short(labels[0])}" if len(labels) == 1 and labels[0] not in (panel.title, panel.unit) else ""
        _dress(axes, panel.title + alone, "iteration", panel.unit)
    handles[_NON_FINITE] = Line2D([], [], color="0.3", marker="x", linestyle="none", markersize=6)
    if named:
        figure.legend(
            [handles[label] for label in named],
            [_short(label) for label in named],
            loc="outside lower center",
            ncols=legend_columns,
            fontsize=10,
            frameon=False,
            handlelength=3.2,
        )
    return _laid_out(figure)


def confusion_matrix(counts: Sequence[Sequence[float]], title: str) -> Figure:
    """A confusion matrix, rows the true classes: colours show each row's shares; up to 20 classes show counts.

    Args:
        counts: as many rows as columns, none negative.
        title: above the axes.
    """
    from matplotlib.ticker import MaxNLocator

    size = len(counts)
    sums = [sum(row) for row in counts]
    shares = [[count / total if total else 0.0 for count in row] for row, total in zip(counts, sums, strict=True)]
    side = min(max(4.0, 0.42 * size), 9.0)
    figure = _figure(side + 1.6, side + 0.6)
    axes = figure.add_subplot()
    image = axes.imshow(shares, cmap="Blues", vmin=0.0, vmax=1.0)  # differs in lightness, for any kind of colour vision
    bar = figure.colorbar(image, ax=axes, shrink=0.85)
    bar.set_label("share of the true class", fontsize=11)
    if size <= COUNTED_CLASSES:
        longest = max(len(_count(count)) for row in counts for count in row)
        fontsize = max(4.0, min(11.0, 72 * side / size / (0.75 * max(longest, 2))))
        for row in range(size):
            for column in range(size):
                colour = "white" if shares[row][column] > 0.55 else "black"
                text = _count(counts[row][column])
                axes.text(column, row, text, ha="center", va="center", color=colour, fontsize=fontsize)
    for axis in (axes.xaxis, axes.yaxis):
        if size <= COUNTED_CLASSES:
            axis.set_ticks(range(size))
        else:
            axis.set_major_locator(MaxNLocator(nbins=12, integer=True))
    _dress(axes, title, "predicted class", "true class")
    axes.grid(visible=False)
    return _laid_out(figure)


def counts_of(value: object) -> list[list[float]] | None:
    """A square matrix of counts, such as a tensor, as lists; None for anything else.

    >>> counts_of([[3, 1], [0, 4]]), counts_of([[3, 1]])
    ([[3.0, 1.0], [0.0, 4.0]], None)
    """
    rows = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(rows, list) or not rows:
        return None
    if not all(isinstance(row, list) and len(row) == len(rows) for row in rows):
        return None
    try:
        counts = [[float(count) for count in row] for row in rows]
    except (TypeError, ValueError):
        return None
    return counts if all(0 <= count < float("inf") for row in counts for count in row) else None


def matrix(values: NDArray[np.generic], title: str) -> Figure:
    """Any matrix: colours show the values; up to 20 rows and columns show numbers.

    Args:
        values: numbers, shape (rows, columns), neither 0.
        title: above the axes.
    """
    shown = values.astype(float)
    side = 2.5 + 0.35 * min(max(shown.shape), COUNTED_CLASSES)
    figure = _figure(side + 1, side)
    axes = figure.add_subplot()
    figure.colorbar(axes.imshow(shown, cmap="Blues", aspect="auto"))
    if max(shown.shape) <= COUNTED_CLASSES:
        middle = (shown.min() + shown.max()) / 2
        for row, line in enumerate(shown.tolist()):
            for column, value in enumerate(line):
                colour = "white" if value > middle else "black"
                axes.text(column, row, f"{value:.4g}", ha="center", va="center", color=colour, fontsize=8)
    _dress(axes, title, "column", "row")
    axes.grid(visible=False)
    return _laid_out(figure)


def range_test(
    rates: Sequence[float], losses: Sequence[float], smoothed: Sequence[float], suggestion: float | None
) -> Figure:
    """The losses of a learning-rate range test over its rates, with the suggestion marked.

    Args:
        rates: ascending, positive.
        losses: one for each rate; non-finite ones are not drawn.
        smoothed: one for each rate.
        suggestion: a rate, or None.
    """
    figure = _figure(_WIDTH, 4.5)
    axes = figure.add_subplot()
    axes.set_xscale("log")
    axes.plot(
        rates, _finite(losses), color="0.65", linewidth=1.0, marker="." if len(rates) == 1 else None, label="loss"
    )
    axes.plot(rates, _finite(smoothed), color=COLOURS[0], linewidth=2.0, label="running mean")
    ends = [_until_least(values) for values in (losses, smoothed)]
    if any(ends):  # a loss that diverges at the end would flatten the rest
        low, high = min(map(min, filter(None, ends))), max(map(max, filter(None, ends)))
        room = 0.1 * ((high - low) or abs(high) or 1.0)
        axes.set_ylim(low - room, high + room)
    if len(rates) > 1:
        axes.set_xlim(rates[0], rates[-1])
    if suggestion is not None:
        axes.axvline(suggestion, color=COLOURS[1], linestyle="--", linewidth=1.5, label=f"suggestion {suggestion:.2e}")
    _dress(axes, "learning-rate range test", "learning rate", "training loss")
    axes.legend(fontsize=10, frameon=False)
    return _laid_out(figure)


def render(figure: Figure, kind: str) -> bytes:
    """The content of the figure's file.

    Args:
        figure: what to save.
        kind: one of FORMATS.
    """
    import matplotlib as mpl

    buffer = io.BytesIO()
    if kind == "svg":
        # the names of its parts and the date would differ each time
        with mpl.rc_context({"svg.hashsalt": "pulsetrain"}):
            figure.savefig(buffer, format="svg", metadata={"Date": None})
    else:
        figure.savefig(buffer, format=kind, dpi=150)
    return buffer.getvalue()


def _figure(width: float, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _laid_out(figure: Figure) -> Figure:
    """Compute the layout once for all formats, since it takes as long as drawing."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    return figure


def _draw(axes: Axes, points: Points, style: int, marked: bool) -> Line2D:
    """Draw one curve; returns its handle for the legend."""
    colour = COLOURS[style % len(COLOURS)]
    shown = marked or len(points) <= _MARKED or _has_isolated(points)
    (line,) = axes.plot(
        [x for x, _ in points],
        _finite([y for _, y in points]),
        color=colour,
        linestyle=LINES[style % len(LINES)],
        linewidth=1.8 if marked else 1.3,
        marker=MARKERS[style % len(MARKERS)] if shown else None,
        markersize=5,
        markevery=max(1, len(points) // _MARKED) if marked else None,
    )
    for sign, marker, height in ((math.nan, "x", 0.02), (math.inf, "^", 0.98), (-math.inf, "v", 0.02)):
        at = [x for x, y in points if y == sign or (math.isnan(y) and math.isnan(sign))]
        if at:  # at the edge of the axes, whatever their scale
            edge = axes.get_xaxis_transform()
            axes.plot(at, [height] * len(at), marker, color=colour, transform=edge, markersize=6, clip_on=False)
    return line


def _has_isolated(points: Points) -> bool:
    """Whether a point has no neighbour to draw a line to."""
    finite = [False, *(math.isfinite(y) for _, y in points), False]
    return any(finite[i] and not finite[i - 1] and not finite[i + 1] for i in range(1, len(finite) - 1))


def _dress(axes: Axes, title: str, horizontal: str, vertical: str) -> None:
    axes.set_title(_short(title), loc="left", fontsize=12)
    axes.set_xlabel(horizontal, fontsize=11)
    axes.set_ylabel(_short(vertical), fontsize=11)
    axes.tick_params(labelsize=10)
    axes.grid(color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _finite(values: Sequence[float]) -> list[float]:
    return [value if math.isfinite(value) else math.nan for value in values]


def _until_least(values: Sequence[float]) -> list[float]:
    """The finite values up to the smallest."""
    finite = [value for value in values if math.isfinite(value)]
    return finite[: finite.index(min(finite)) + 1] if finite else []


def _count(value: float) -> str:
    return f"{value:.0f}" if float(value).is_integer() else f"{value:.2f}"


def _short(name: str) -> str:
    """The name, without its middle if it is long; a dollar sign, which would start a formula, is escaped."""
    text = name if len(name) <= _NAME else f"{name[: _NAME // 2 - 1]}...{name[-(_NAME // 2) + 2 :]}"
    return text.replace("$", r"\$")
