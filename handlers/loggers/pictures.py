"""Media as plain arrays; histograms and matrices are drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pulsetrain.engine import ConfigurationError, MediaLogged
from pulsetrain.engine.argument_checks import check_choice
from pulsetrain.engine.optional import check_installed
from pulsetrain.handlers.plots import figures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["as_array", "histogram_of", "picture_of"]


def as_array(value: object) -> NDArray[np.generic]:
    """An array, or a tensor on any device, as an array."""
    return np.asarray(value.detach().cpu() if isinstance(value, Tensor) else value)


def histogram_of(media: MediaLogged) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The counts, shape (n,), and the edges, shape (n + 1,).

    Raises:
        ConfigurationError: the shapes do not fit.

    >>> counts, edges = histogram_of(MediaLogged(name="grad", kind="histogram", value=([3, 1], [0.0, 0.5, 1.0])))
    >>> counts.shape, edges.shape
    ((2,), (3,))
    """
    counts, edges = (as_array(part).astype(np.float64) for part in media.value)
    if counts.ndim != 1 or edges.shape != (len(counts) + 1,) or not len(counts):
        rule = (
            f"counts have shape {counts.shape} and edges {edges.shape}; "
            "needs one edge more than counts, and at least one count"
        )
        raise ConfigurationError(rule, "MediaLogged", name=media.name, kind="histogram")
    return counts, edges


def picture_of(media: MediaLogged) -> NDArray[np.uint8]:
    """An image, figure, histogram or matrix as pixels: shape (height, width, 3) or (height, width).

    Raises:
        ConfigurationError: the value does not fit its kind, or has to be drawn and matplotlib is not installed.
    """
    if media.kind == "image":
        return _image(media)
    figure_of = {"figure": lambda media: media.value, "histogram": _histogram_figure, "matrix": _matrix_figure}
    check_choice("MediaLogged", "kind", media.kind, ("image", *figure_of))
    check_installed(f"MediaLogged(kind={media.kind!r})", "matplotlib")
    return _drawn(figure_of[media.kind](media))


def _image(media: MediaLogged) -> NDArray[np.uint8]:
    image = as_array(media.value)
    if image.dtype != np.uint8 or image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[2] != 3):
        rule = f"has shape {image.shape} of {image.dtype}; needs uint8, (height, width, 3) or (height, width)"
        raise ConfigurationError(rule, "MediaLogged", name=media.name, kind="image")
    return image.astype(np.uint8, copy=False)


def _drawn(figure: Figure) -> NDArray[np.uint8]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas, before = FigureCanvasAgg(figure), figure.canvas
    try:
        canvas.draw()  # type: ignore[no-untyped-call]
        rgba: NDArray[np.uint8] = np.asarray(canvas.buffer_rgba())  # type: ignore[no-untyped-call]
    finally:
        figure.set_canvas(before)  # the figure's owner may show it in a window
    return np.ascontiguousarray(rgba[..., :3])


def _histogram_figure(media: MediaLogged) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.5), layout="constrained")
    axes = figure.subplots()
    counts, edges = histogram_of(media)
    axes.stairs(counts, edges, fill=True)
    axes.set_ylabel("count")
    axes.set_title(media.name)
    return figure


def _matrix_figure(media: MediaLogged) -> Figure:
    counts = figures.counts_of(media.value) if media.name.endswith("confusion_matrix") else None
    if counts is not None:
        return figures.confusion_matrix(counts, media.name)
    matrix = as_array(media.value)
    if matrix.ndim != 2 or not matrix.size:
        raise ConfigurationError(
            f"has shape {matrix.shape}; needs (rows, columns)", "MediaLogged", name=media.name, kind="matrix"
        )
    return figures.matrix(matrix, media.name)
