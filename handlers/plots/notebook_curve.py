"""Draws the losses of a run below the cell of a notebook while it trains."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from math import inf
from typing import Self

from pulsetrain.engine import LAST, Engine, Event, Events, OnError
from pulsetrain.engine.notebook import CellOutput
from pulsetrain.handlers.attachment.attachment import Handler
from pulsetrain.handlers.attachment.engine_queries import is_run_end
from pulsetrain.handlers.metric_values.step_values import METRIC_EVENTS
from pulsetrain.handlers.plots import figures
from pulsetrain.handlers.plots.curves import RunCurves

__all__ = ["NotebookCurve"]

SHARE = 0.05  # of the run's time that may be spent on drawing: somebody looks at the figure
_FIRST = 1.0  # seconds of a run before the first figure, for which matplotlib is imported
_WIDTH = 560  # pixels


class NotebookCurve(Handler):
    """Shows the losses of METRICS_LOGGED and of validations; drawing takes at most a twentieth of the run's time.

    At the end of the run the figure is drawn once more.

    Args:
        clock: seconds.
        on_error: "warn" continues when the figure cannot be drawn, "raise" ends the run.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, on_error: OnError = "warn") -> None:
        self._clock = clock
        self._on_error = on_error
        self._curves, self._output, self._next = RunCurves(), CellOutput(), inf

    def attach(self, engine: Engine) -> Self:
        """Draw the engine's runs, each below the cell that starts it."""
        with self._attachment.to(engine, whole_bus=False) as subscribe:
            subscribe(Events.STARTED, self._on_started, on_error=self._on_error)
            subscribe(Events.METRICS_LOGGED, self._on_metrics, on_error=self._on_error)
            for event in METRIC_EVENTS:
                subscribe(event, self._on_round, on_error=self._on_error)
            ends = Events.COMPLETED | Events.TERMINATE
            subscribe(ends, self._on_end, order=LAST, on_error=self._on_error)
            subscribe(Events.EXCEPTION_RAISED, self._on_end, on_error="warn")
        return self

    def _on_started(self, engine: Engine) -> None:
        if engine.state.iteration == 0:
            self._curves = RunCurves()
        self._output, self._next = CellOutput(), self._clock() + _FIRST

    def _on_metrics(self, engine: Engine, event: Event) -> None:
        self._curves.add(engine.state.iteration, event.payload.metrics)
        self._draw_if_due()

    def _on_round(self, engine: Engine, event: Event) -> None:
        self._curves.add_round(engine.state.iteration, event.payload.metrics)
        self._draw_if_due()

    def _on_end(self, engine: Engine, event: Event) -> None:
        if is_run_end(engine, event):
            self._draw()
            self._next = inf

    def _draw_if_due(self) -> None:
        if self._clock() >= self._next:
            self._draw()

    def _draw(self) -> None:
        start = self._clock()
        figure = self._curves.figure("loss") if "loss" in self._curves.changed else None
        if figure is None:
            return
        self._curves.changed.discard("loss")
        picture = base64.b64encode(figures.render(figure, "png")).decode()
        self._output.show({"image/png": picture, "text/plain": "the losses of the run"}, {"width": _WIDTH})
        now = self._clock()
        self._next = now + (now - start) / SHARE
