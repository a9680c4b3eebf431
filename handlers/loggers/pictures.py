"""Media as plain arrays: what a figure shows, and figures of what is none."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pulsetrain.engine.errors import ConfigurationError, unknown_name
from pulsetrain.engine.events.payloads import MediaLogged
from pulsetrain.handlers.plots import figures

__all__ = ["as_array", "histogram_of", "picture_of"]


def as_array(value: Any) -> NDArray[Any]:
    """An array, or a tensor from wherever it is, as an array."""
    return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)


def histogram_of(media: MediaLogged) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Counts, shape (n,), and edges, shape (n + 1,).

    Raises:
        ConfigurationError: the numbers do not fit.
    """
    counts, edges = (as_array(part).astype(np.float64) for part in media.value)
    if counts.ndim != 1 or edges.shape != (len(counts) + 1,) or not len(counts):
        raise ConfigurationError(
            f"MediaLogged(name={media.name!r}, kind='histogram'): counts have shape {counts.shape} and edges "
            f"{edges.shape}; needs one edge more than counts, and a count at least"
        )
    return counts, edges


def picture_of(media: MediaLogged) -> NDArray[np.uint8]:
    """What an image, figure, histogram or matrix looks like: shape (height, width, 3) or (height, width).

    Raises:
        ConfigurationError: it cannot be shown.
    """
    if media.kind == "image":
        return _image(media)
    if media.kind == "figure":
        return _drawn(media.value)
    if media.kind == "histogram":
        return _drawn(_histogram_figure(media))
    if media.kind == "matrix":
        return _drawn(_matrix_figure(media))
    raise unknown_name("MediaLogged", "kind", media.kind, ("image", "figure", "histogram", "matrix"))


def _image(media: MediaLogged) -> NDArray[np.uint8]:
    image = as_array(media.value)
    if image.dtype != np.uint8 or image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[2] != 3):
        raise ConfigurationError(
            f"MediaLogged(name={media.name!r}, kind='image'): has shape {image.shape} of {image.dtype}; needs uint8, "
            "(height, width, 3) or (height, width)"
        )
    return image


def _drawn(figure: Any) -> NDArray[np.uint8]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas, before = FigureCanvasAgg(figure), figure.canvas
    try:
        canvas.draw()  # type: ignore[no-untyped-call]
        rgba: NDArray[np.uint8] = np.asarray(canvas.buffer_rgba())  # type: ignore[no-untyped-call]
    finally:
        figure.set_canvas(before)  # whose it is may show it in a window
    return np.ascontiguousarray(rgba[..., :3])


def _histogram_figure(media: MediaLogged) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.5), layout="constrained")
    axes = figure.subplots()
    counts, edges = histogram_of(media)
    axes.stairs(counts, edges, fill=True)
    axes.set_ylabel("count")
    axes.set_title(media.name)
    return figure


def _matrix_figure(media: MediaLogged) -> Any:
    counts = figures.counts_of(media.value) if media.name.endswith("confusion_matrix") else None
    if counts is not None:
        return figures.confusion_matrix(counts, media.name)
    matrix = as_array(media.value)
    if matrix.ndim != 2 or not matrix.size:
        raise ConfigurationError(
            f"MediaLogged(name={media.name!r}, kind='matrix'): has shape {matrix.shape}; needs (rows, columns)"
        )
    return figures.matrix(matrix, media.name)
