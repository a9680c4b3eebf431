"""Draws losses, metrics, learning rates, gradient norms, throughput and confusion matrices of a run."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from pulsetrain.engine import LAST, ConfigurationError, Engine, Event, EventBus, Events, Every, OnError, Phase
from pulsetrain.engine.argument_checks import check_choice
from pulsetrain.engine.logs import get_logger
from pulsetrain.engine.optional import check_installed
from pulsetrain.handlers.attachment.attachment import Handler
from pulsetrain.handlers.attachment.cadence import check_every, reading_events
from pulsetrain.handlers.attachment.engine_queries import is_run_end
from pulsetrain.handlers.metric_values.step_values import METRIC_EVENTS, learning_rates, on_host, step_metrics
from pulsetrain.handlers.plots import figures
from pulsetrain.handlers.plots.curves import RunCurves
from pulsetrain.handlers.plots.painter import Drawing, DrawingProcess, Figures, InThisProcess, Painter
from pulsetrain.handlers.run_files.ownership import FolderUse
from pulsetrain.handlers.run_files.run_folder import local_folder, make_folder, writing

__all__ = ["Plots"]

_SHARE = 0.01  # of the run's time that may be spent on drawing before its end


class Plots(Handler):
    """Writes figures to FOLDER/plots/ at validations, rollouts and the end of the run, if their data has changed.

    loss: training and validation. metrics: a panel for each other metric of validations and rollouts. learning_rate: a
    line for each parameter group. grad_norm: before clipping, and the largest of the layers' norms that METRICS_LOGGED
    reports as "grad_norm/LAYER". throughput: since the process started. SET_confusion_matrix: the latest from
    MEDIA_LOGGED. The first round is always drawn, later ones only while drawing takes at most 1% of the time.
    Long curves are thinned, but keep every spike.

    A separate process draws, which takes 100 MB until the run ends; training waits for the figures only at the end of
    the run and in `detach`. An error in drawing is reported at the next event. If no process can be started, the
    training process draws.

    On a bus, each engine has its own folder, FOLDER/plots/ENGINE/.

    Args:
        folder: the run folder.
        every: read the training loss and the rates from the engine at this cadence instead of METRICS_LOGGED; each
            reading waits for the device.
        formats: "png", "svg" or both.
        clock: seconds, for `Every(seconds=...)` and the time that drawing takes, for which a second thread reads it.
        on_error: "warn" continues when a figure cannot be written, "raise" ends the run.

    Raises:
        ConfigurationError: no format or an unknown one is given, or matplotlib is not installed.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     engine = Engine(lambda engine, batch: 1 / batch)
    ...     plots = Plots(folder, Every(iterations=1), formats=["svg"]).attach(engine)
    ...     state = engine.run([1, 2, 3])
    ...     [path.name for path in (Path(folder) / "plots").iterdir()]
    ['loss.svg']
    """

    def __init__(
        self,
        folder: str | Path,
        every: Every | None = None,
        formats: Sequence[str] = figures.FORMATS,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_error: OnError = "warn",
    ) -> None:
        check_every("Plots", every, or_none=True)
        if isinstance(formats, str) or not isinstance(formats, Sequence) or not formats:
            raise ConfigurationError("needs a list of formats, such as ['png', 'svg']", "Plots", formats=formats)
        for each in formats:
            check_choice("Plots", "formats", each, figures.FORMATS)
        check_installed("Plots", "matplotlib")
        self.folder: Path = local_folder("Plots", folder)
        self.every = every
        self.formats: tuple[str, ...] = tuple(formats)
        self._clock = clock
        self._on_error = on_error
        self._runs: dict[str, RunCurves] = {}  # by engine; "" if attached to one engine
        self._next = -math.inf  # when figures may be drawn again before the end
        self._warned = False  # of a matrix that cannot be drawn
        self._pictures = self.folder / "plots"
        self._painter: Painter = DrawingProcess()
        self._drawing = Drawing(())  # the last one
        self._started = -math.inf  # when it was started
        self._is_prepared = False  # the painter, for the first one

    def attach(self, engine_or_bus: Engine | EventBus) -> Self:
        """Follow one engine, or each of a bus.

        Raises:
            RunFolderError: the folder cannot be written, and on_error="raise". With on_error="warn" a warning is
                logged, and the run continues without this handler.
        """
        with self._attachment.to(engine_or_bus, needed=self._on_error == "raise") as subscribe:
            make_folder("Plots", self._pictures)
            FolderUse("Plots", subscribe, lambda: self.folder)
            self._next = -math.inf
            self._is_prepared = False
            if self.every is not None:
                subscribe(reading_events(self.every, self._clock), self._on_reading, on_error=self._on_error)
            subscribe(Events.METRICS_LOGGED, self._on_metrics, on_error=self._on_error)
            subscribe(Events.MEDIA_LOGGED, self._on_media, on_error=self._on_error)
            for event in METRIC_EVENTS:
                subscribe(event, self._on_round, on_error=self._on_error)
            ends = Events.COMPLETED | Events.TERMINATE
            # begins before other handlers work at the end, and is waited for after the other loggers
            subscribe(ends, self._on_end_begins, phase=Phase.COMPUTE, on_error=self._on_error)
            subscribe(ends, self._on_end, phase=Phase.OBSERVE, order=LAST, on_error=self._on_error)
            subscribe(Events.EXCEPTION_RAISED, self._on_end, on_error="warn")
        return self

    def detach(self) -> None:
        """Stop following; figures that are being drawn are finished."""
        super().detach()
        self._painter.close()

    def draw(self) -> list[Path]:
        """Draw each figure whose data has changed since it was last drawn; returns the files written."""
        self._settle()
        self._start([*self._runs])
        return self._settle()

    def state_dict(self) -> dict[str, Any]:
        """The curves except those of throughput, which a resumed run does not repeat."""
        return {name: run.state_dict() for name, run in self._runs.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the saved curves."""
        before, self._runs = self._runs, {}
        for name, saved in state.items():
            self._runs[name] = before.get(name, RunCurves())
            self._runs[name].load_state_dict(saved)

    def _start(self, engines: Sequence[str], *, awaited: bool = True) -> None:
        """Begin to draw the changed figures of these engines; nothing may be drawn at the moment."""
        parts = []
        for engine in engines:
            run = self._runs.get(engine)
            if run is None or not run.changed:
                continue
            folder = self._pictures / _file_name(engine) if engine else self._pictures
            files = {name: folder / _file_name(name) for name in sorted(run.changed)}
            parts.append(Figures(engine, run.snapshot(run.changed), files, self.formats))
            run.changed.clear()
        if parts:
            self._drawing, self._started = Drawing(parts, awaited), self._clock()
            self._painter.start(self._drawing, self._clock)

    def _settle(self) -> list[Path]:
        """Wait for what is being drawn; returns the files written, and raises the first error.

        A figure that could not be written is drawn again the next time.
        """
        result = self._painter.result()
        if result is None:
            return []
        self._next = self._started + result.seconds / _SHARE
        failed = self._drawing.names if result.lost else result.failed
        for engine, name in failed:
            self._runs.setdefault(engine, RunCurves()).changed.add(name)
        if result.lost:
            self._painter.close()
            self._painter = InThisProcess()
            get_logger("handlers").warning("Plots: the training process draws from now on", reason=result.lost)
        for (_, name), error in result.failed.items():
            if isinstance(error, str):
                raise RuntimeError(f"Plots: the figure {name!r} could not be drawn:\n{error}")
            with writing("Plots", self._pictures):
                raise error
        return result.written

    def _run_of(self, engine: Engine) -> RunCurves:
        return self._runs.setdefault(self._key(engine), RunCurves())

    def _key(self, engine: Engine) -> str:
        return engine.name if self._attachment.follows_whole_bus else ""

    def _on_metrics(self, engine: Engine, event: Event) -> None:
        if not self._is_prepared:
            self._is_prepared = True
            self._painter.prepare()
        metrics = event.payload.metrics
        if self.every is not None:
            metrics = {name: value for name, value in metrics.items() if not _is_read(name)}
        elif "learning_rate" in metrics:
            metrics = {**metrics, **_group_rates(engine)}
        self._run_of(engine).add(engine.state.iteration, metrics)

    def _on_reading(self, engine: Engine) -> None:
        found = {name: value for name, value in step_metrics(engine).items() if _is_read(name)}
        self._run_of(engine).add(engine.state.iteration, {**found, **_group_rates(engine)})

    def _on_round(self, engine: Engine, event: Event) -> None:
        run = self._run_of(engine)
        run.add_round(engine.state.iteration, event.payload.metrics)
        if not self._painter.is_busy():
            self._settle()
            if self._clock() >= self._next:
                self._start([self._key(engine)], awaited=False)
            if not self._painter.is_busy():  # drawn by this process
                self._settle()

    def _on_media(self, engine: Engine, event: Event) -> None:
        media = event.payload
        if media.kind != "matrix" or not media.name.endswith("confusion_matrix"):
            return
        matrix = figures.counts_of(media.value)
        if matrix is not None:
            self._run_of(engine).put(media.name, engine.state.iteration, matrix)
        elif not self._warned:  # for example in a replay: a log has only an array's shape
            self._warned = True
            get_logger("handlers").warning(
                "Plots: a confusion matrix is not drawn, since it is not a square matrix of counts",
                name=media.name,
                given=type(media.value).__name__,
            )

    def _on_end_begins(self, engine: Engine, event: Event) -> None:
        if is_run_end(engine, event) and not self._painter.is_busy():
            self._settle()
            self._start([self._key(engine)])

    def _on_end(self, engine: Engine, event: Event) -> None:
        if not is_run_end(engine, event):
            return
        try:
            self._settle()  # one that failed is tried again
        finally:
            self._start([self._key(engine)])
            try:
                self._settle()
            finally:
                if not any(each.is_running for each in engine.bus.engines if each is not engine):
                    self._painter.close()


def _is_read(name: str) -> bool:
    return name.startswith("train/") or name.partition("/")[0] == "learning_rate"


def _group_rates(engine: Engine) -> dict[str, float]:
    """The rate of each group, if there are several."""
    rates = learning_rates(engine)
    return on_host({f"learning_rate/{index}": rate for index, rate in enumerate(rates)}) if len(rates) > 1 else {}


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.-]+", "_", name).strip(".") or "_"
