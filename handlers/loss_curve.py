"""Draws the losses of a run."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from engine.bus import EventBus
from engine.cadence import Every
from engine.events import Event, Events
from engine.loop import Engine
from engine.subscription import OnError
from handlers.attachment import Attachment
from handlers.readings import reading_events, step_metrics
from handlers.run_folder import make_folder, replace_file

__all__ = ["LossCurve"]

# Okabe and Ito 2008: told apart with any kind of colour vision
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MAX_POINTS = 4096  # of one curve: more would not show, and memory stays flat


class LossCurve:
    """Writes FOLDER/plots/loss.png after each validation and at the end of the run.

    It draws "train/loss" from METRICS_LOGGED and every loss from VALIDATION_COMPLETED ("val/loss") over the iterations.
    Of a curve with too many points every second one is dropped.

    Args:
        folder: the run folder.
        every: read `state.output` at this cadence in place of METRICS_LOGGED; each reading waits for the device.
        clock: seconds, for `Every(seconds=...)`.
        on_error: "warn" goes on when the picture cannot be written, "raise" ends the run.
    """

    def __init__(
        self,
        folder: str | Path,
        every: Every | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_error: OnError = "warn",
    ) -> None:
        if every is not None and not isinstance(every, Every):
            raise TypeError(f"LossCurve(every={every!r}): needs an Every, such as Every(iterations=50)")
        self.path = Path(folder) / "plots" / "loss.png"
        self.every = every
        self._clock = clock
        self._on_error = on_error
        self._curves: dict[str, list[tuple[int, float]]] = {}
        self._attachment = Attachment("LossCurve")

    def attach(self, engine_or_bus: Engine | EventBus) -> Self:
        """Follow the losses of one engine, or of all of a bus.

        Raises:
            RunFolderError: the folder cannot be written.
        """
        with self._attachment.to(engine_or_bus) as hear:
            make_folder("LossCurve", self.path.parent)
            if self.every is None:
                hear(Events.METRICS_LOGGED, self._on_metrics, on_error=self._on_error)
            else:
                hear(reading_events(self.every, self._clock), self._on_reading, on_error=self._on_error)
            hear(Events.VALIDATION_COMPLETED, self._on_validation, on_error=self._on_error)
            hear(Events.COMPLETED, self._on_end, on_error=self._on_error)
            hear(Events.TERMINATE, self._on_terminated, on_error=self._on_error)
        return self

    def detach(self) -> None:
        self._attachment.cancel()

    def draw(self) -> Path | None:
        """Draw what there is; returns where, or None where there is nothing yet."""
        if not self._curves:
            return None
        replace_file(self.path, _picture(self._curves))
        return self.path

    def state_dict(self) -> dict[str, Any]:
        return {"curves": {name: [list(point) for point in points] for name, points in self._curves.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._curves = {
            name: [(int(iteration), float(value)) for iteration, value in points]
            for name, points in state["curves"].items()
        }

    def _add(self, name: str, iteration: int, value: float) -> None:
        points = self._curves.setdefault(name, [])
        if points and points[-1][0] == iteration:
            points.pop()  # two readings at one iteration: the later one counts
        points.append((iteration, value))
        if len(points) > MAX_POINTS:
            del points[1::2]

    def _on_metrics(self, engine: Engine, event: Event) -> None:
        if "train/loss" in event.payload.metrics:
            self._add("train/loss", engine.state.iteration, event.payload.metrics["train/loss"])

    def _on_reading(self, engine: Engine) -> None:
        loss = step_metrics(engine).get("train/loss")
        if loss is not None:
            self._add("train/loss", engine.state.iteration, loss)

    def _on_validation(self, engine: Engine, event: Event) -> None:
        for name, value in event.payload.metrics.items():
            if name.endswith("loss"):
                self._add(name, engine.state.iteration, value)
        self.draw()

    def _on_end(self, engine: Engine) -> None:
        self.draw()

    def _on_terminated(self, engine: Engine) -> None:
        if engine.should_terminate == "skip_completed":  # else COMPLETED comes, perhaps with a last validation
            self.draw()


def _picture(curves: Mapping[str, list[tuple[int, float]]]) -> bytes:
    # takes 0.5 s to import, and the object API leaves pyplot's global state alone
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for index, (name, points) in enumerate(
        sorted(curves.items(), key=lambda curve: (curve[0] != "train/loss", curve[0]))
    ):
        trained = name.startswith("train/")
        axes.plot(
            [iteration for iteration, _ in points],
            [value for _, value in points],
            label=name,
            color=COLOURS[index % len(COLOURS)],
            linewidth=1.2 if trained else 2.0,
            marker="o" if not trained or len(points) == 1 else None,
            markersize=5,
        )
    axes.set_xlabel("iteration", fontsize=12)
    axes.set_ylabel("loss", fontsize=12)
    axes.tick_params(labelsize=11)
    axes.grid(color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=11, frameon=False)
    buffer = io.BytesIO()
    canvas.print_figure(buffer, dpi=150, format="png")
    return buffer.getvalue()
