"""Shows the progress of a run on one line."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from math import inf
from typing import Any, Self, TextIO

from pulsetrain.engine import ConfigurationError, Engine, Event, Events, OnError, State
from pulsetrain.engine.events.filters import EventFilter
from pulsetrain.engine.notebook import notebook_shell
from pulsetrain.engine.optional import check_installed, load_optional
from pulsetrain.handlers.attachment.attachment import Handler
from pulsetrain.handlers.attachment.engine_queries import attribute, is_run_end
from pulsetrain.handlers.loggers.notebook_bar import NotebookBar
from pulsetrain.handlers.metric_values.step_values import METRIC_EVENTS

__all__ = ["ProgressBar"]

_OF_ROLLOUTS = ("loss", "return", "reward")  # the metrics of rollouts whose names end so
_REFRESH = 0.1  # seconds between two drawings of the bar
_LABELS = {"learning_rate": ("lr", ".3g"), "tokens_per_second": ("tokens/s", ",.0f")}
_NOT_SHOWN = frozenset({"grad_norm", "skipped_updates", "samples_per_second"})
_MOST = 8  # values on a line
_APART = 64  # iterations between two looks at the clock, at most: the next ones may be slow


class _Looks(EventFilter):
    """The iterations after which the clock is read; those in between cost nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.restart(0, 0.0)

    def __call__(self, engine: object, value: int) -> bool:
        return value >= self.at

    def next_due(self, value: int) -> int:
        return max(value + 1, self.at)

    def restart(self, iteration: int, now: float) -> None:
        """Look again after the next iteration."""
        self.at, self.step = iteration + 1, 1
        self.last = now

    def plan(self, iteration: int, now: float) -> None:
        """Choose the next look: after about a tenth of the time between two drawings, as the last iterations took."""
        taken, self.last = now - self.last, now
        fitting = self.step * _REFRESH / 10 / taken if taken > 0 else inf
        self.step = max(1, int(min(2 * self.step, fitting, _APART)))
        self.at = iteration + self.step


class ProgressBar(Handler):
    """A tqdm bar over the iterations of a run, with its metrics.

    These are the loss and the metrics of training, values of `Trainer.log`, the learning rate, tokens/s, the metrics of
    validations, and the losses, returns and rewards of rollouts: at most eight. Monitors' values have a "/" in their
    names, and are left out. In a notebook, the bar is below the cell. Otherwise,
    if the stream is not a terminal, a plain line is written every `interval` seconds, so that log files have no
    carriage returns.

    Args:
        stream: by default stderr at the start of the run.
        interval: seconds between two plain lines.
        clock: seconds, for the interval and for how often the bar is drawn: ten times a second at most.
        on_error: "raise" ends the run when the stream cannot be written, "warn" continues.

    Raises:
        ConfigurationError: the interval is not positive, or tqdm is not installed.

    >>> engine = Engine(lambda engine, batch: batch)
    >>> bar = ProgressBar(stream=sys.stdout).attach(engine)
    >>> state = engine.run([1, 2], max_epochs=2)
    epoch 2/2, iteration 4/4 (100%)
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        interval: float = 10.0,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_error: OnError = "raise",
    ) -> None:
        if not interval > 0:
            raise ConfigurationError("needs a positive number of seconds", "ProgressBar", interval=interval)
        check_installed("ProgressBar", "tqdm")
        self.interval = interval
        self._given_stream = stream
        self._stream: TextIO = sys.stderr
        self._clock = clock
        self._on_error = on_error
        self._bar: Any = None  # a NotebookBar, or a bar of tqdm, which has no types
        self._state: State | None = None  # of the run that is shown
        self._due = inf  # when the bar is drawn, or the next plain line is written
        self._looks = _Looks()
        self._figures: dict[str, str] = {}
        self._logged: dict[str, float] = {}  # the last values of METRICS_LOGGED: formatted where they are shown

    def attach(self, engine: Engine) -> Self:
        """Show the engine's runs."""
        with self._attachment.to(engine, whole_bus=False) as subscribe:
            subscribe(Events.STARTED, self._on_started, on_error=self._on_error)
            subscribe(Events.EPOCH_STARTED, self._on_epoch, on_error=self._on_error)
            looks = Events.ITERATION_COMPLETED(event_filter=self._looks)
            subscribe(looks, self._on_iteration, on_error=self._on_error)
            subscribe(Events.METRICS_LOGGED, self._on_metrics, on_error=self._on_error)
            for event in METRIC_EVENTS:
                subscribe(event, self._on_round, on_error=self._on_error)
            ends = Events.TERMINATE | Events.COMPLETED | Events.EXCEPTION_RAISED
            subscribe(ends, self._on_end, on_error=self._on_error)
        return self

    def detach(self) -> None:
        self._close()
        super().detach()

    def _on_started(self, engine: Engine) -> None:
        self._close()
        self._figures, self._logged = {}, {}
        stream = self._given_stream if self._given_stream is not None else sys.stderr
        if stream is None:  # closed by the caller, as with 2>&-
            return
        self._state, self._stream = engine.state, stream
        if self._given_stream is None and notebook_shell() is not None:
            self._bar = NotebookBar(_total_iterations(engine), engine.state.iteration, self._clock)
            self._due = self._clock()
        elif self._stream.isatty():
            self._bar = _make_bar(
                total=_total_iterations(engine),
                initial=engine.state.iteration,
                file=self._stream,
                dynamic_ncols=True,
                miniters=0,
                mininterval=0,  # it is drawn whenever it is updated
                unit="it",
                smoothing=0.05,
            )
            self._due = self._clock()
        else:
            self._due = self._clock() + self.interval
        self._looks.restart(engine.state.iteration, self._clock())

    def _on_epoch(self, engine: Engine) -> None:
        if self._bar is not None:
            self._bar.total = _total_iterations(engine)  # an epoch's length may be known only after the first
            self._bar.set_description_str(_epoch(engine), refresh=False)

    def _on_iteration(self, engine: Engine) -> None:
        now = self._clock()
        self._looks.plan(engine.state.iteration, now)
        if now < self._due:
            return
        self._show_figures()
        if self._bar is not None:
            self._due = now + _REFRESH
            self._bar.update(engine.state.iteration - self._bar.n)
        else:
            self._due = now + self.interval
            self._write_line(engine)

    def _on_metrics(self, engine: Engine, event: Event) -> None:
        self._logged.update(event.payload.metrics)
        self._on_iteration(engine)  # where iterations have become slower than planned

    def _on_round(self, engine: Engine, event: Event) -> None:
        for name, value in event.payload.metrics.items():
            if event.type == Events.VALIDATION_COMPLETED.value or name.endswith(_OF_ROLLOUTS):
                self._figures[name] = format(value, ".4g")

    def _on_end(self, engine: Engine, event: Event) -> None:
        if not is_run_end(engine, event):
            return
        self._show_figures()
        if self._bar is not None:
            self._bar.total = self._bar.total or engine.state.iteration
        elif self._state is not None:
            self._write_line(engine)
        self._close()

    def _show_figures(self) -> None:
        for name, value in self._logged.items():
            short = name.removeprefix("train/")
            if "/" not in short and short not in _NOT_SHOWN:
                label, form = _LABELS.get(short, (short, ".4g"))
                self._figures[label] = format(value, form)
        if self._bar is not None:
            self._bar.set_postfix_str(", ".join(f"{k}={v}" for k, v in self._shown()), refresh=False)

    def _shown(self) -> list[tuple[str, str]]:
        figures = [*self._figures.items()]
        if len(figures) > _MOST:  # losses stay
            figures.sort(key=lambda figure: not figure[0].endswith("loss"))
        return figures[:_MOST]

    def _write_line(self, engine: Engine) -> None:
        iteration, total = engine.state.iteration, _total_iterations(engine)
        done = f"{iteration}/{total} ({iteration / total:.0%})" if total else str(iteration)
        figures = "".join(f", {name} {value}" for name, value in self._shown())
        self._stream.write(f"{_epoch(engine)}, iteration {done}{figures}\n")
        self._stream.flush()

    def _close(self) -> None:
        if self._bar is not None and self._state is not None:
            self._bar.update(self._state.iteration - self._bar.n)
            self._bar.close()
        self._bar = self._state = None
        self._due = inf


def _make_bar(**options: object) -> Any:
    tqdm = load_optional("ProgressBar", "tqdm").tqdm
    # no thread that wakes sleeping bars: this one checks the time at each update
    return type("_Bar", (tqdm,), {"monitor_interval": 0})(**options)


def _epoch(engine: Engine) -> str:
    known = engine.state.max_epochs is not None
    return f"epoch {engine.state.epoch}/{engine.state.max_epochs}" if known else f"epoch {engine.state.epoch}"


def _total_iterations(engine: Engine) -> int | None:
    """How many iterations the run will take, None if unknown."""
    state = engine.state
    total = attribute(engine, "total_iterations", int)  # of a trainer, whose length may be given in updates or tokens
    if total is None:
        total = state.max_iters
    if total is None and state.max_epochs is not None and state.epoch_length is not None:
        total = state.max_epochs * state.epoch_length
    return total
