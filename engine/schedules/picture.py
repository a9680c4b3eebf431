"""Draws schedules with matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pulsetrain.engine.argument_checks import is_whole
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.optional import check_installed
from pulsetrain.engine.schedules.formula import Schedule

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot"]

# Okabe and Ito 2008: distinguishable with any kind of colour vision
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINES = ("-", "--", ":", "-.")  # each further round of colours uses the next line style
MAX_POINTS = 4096  # per curve: more than the picture has pixels


def plot(
    schedules: Schedule | Mapping[str, Schedule], steps: int | None = None, path: str | Path | None = None
) -> Figure:
    """Plots one schedule, or several by name, as a matplotlib figure that opens no window.

    >>> from pulsetrain.engine.schedules import Cosine, Linear
    >>> figure = plot({"cosine": Cosine(0.1, 100), "linear": Linear(0.1, 100)})
    >>> [line.get_label() for line in figure.axes[0].lines]
    ['cosine', 'linear']

    Args:
        steps: the number of updates to draw; by default the length of the longest schedule, or 1000 if none ends.
        path: also writes the figure to this file, .png or .svg.

    Raises:
        ConfigurationError: there is nothing to draw, an object is not a schedule, or steps or the suffix is invalid, or
            matplotlib is not installed.
    """
    curves = dict(schedules) if isinstance(schedules, Mapping) else {type(schedules).__name__: schedules}
    if not curves:
        raise ConfigurationError("needs at least 1 schedule", "plot", schedules={})
    for name, schedule in curves.items():
        if not isinstance(schedule, Schedule):
            raise ConfigurationError("needs a schedule, such as Cosine(0.1, 1000)", "plot", schedules={name: schedule})
    if steps is None:
        steps = max(getattr(schedule, "length", None) or 0 for schedule in curves.values()) or 1000
    if not is_whole(steps) or steps < 1:
        raise ConfigurationError("needs a whole number of updates, at least 1", "plot", steps=steps)
    if path is not None and Path(path).suffix not in (".png", ".svg"):
        raise ConfigurationError("needs a name that ends in .png or .svg", "plot", path=str(path))
    check_installed("plot", "matplotlib")
    figure = _draw(curves, steps)
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


def _draw(curves: Mapping[str, Schedule], steps: int) -> Figure:
    # takes 0.5 s to import, and the object API leaves pyplot's global state alone
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    drawn = sorted({*range(0, steps, -(-steps // MAX_POINTS)), steps})
    for index, (name, schedule) in enumerate(curves.items()):
        axes.plot(
            drawn,
            [schedule.get_lr(step) for step in drawn],
            label=name,
            color=COLOURS[index % len(COLOURS)],
            linestyle=LINES[index // len(COLOURS) % len(LINES)],
            linewidth=2.0,
            clip_on=False,  # draws a rate of 0 in full width
        )
    axes.set_xlabel("update", fontsize=12)
    axes.set_ylabel("learning rate", fontsize=12)
    axes.set_xlim(0, steps)
    axes.set_ylim(bottom=0)
    axes.tick_params(labelsize=11)
    axes.grid(color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if len(curves) > 1:
        figure.legend(loc="outside right upper", fontsize=11, frameon=False, handlelength=3)  # beside the curves
    return figure
