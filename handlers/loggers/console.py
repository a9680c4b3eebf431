"""Writes metrics to the terminal, one line each."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, TextIO

from pulsetrain.engine.argument_checks import check_choice
from pulsetrain.engine.events.cadence import Every
from pulsetrain.engine.events.engine import Engine
from pulsetrain.engine.events.names import Event, Events
from pulsetrain.engine.events.payloads import PolicyUpdated, RolloutCompleted, ValidationCompleted
from pulsetrain.engine.events.subscription import OnError
from pulsetrain.engine.logs import load_structlog
from pulsetrain.engine.optimizers import describe_optimizer
from pulsetrain.engine.recording.log.non_finite import finite_or_text
from pulsetrain.engine.training_run import is_training_run
from pulsetrain.handlers.attachment.engine_queries import is_run_end
from pulsetrain.handlers.loggers.base import MetricLogger

if TYPE_CHECKING:
    from structlog.typing import EventDict, WrappedLogger

__all__ = ["ConsoleLogger"]

_SHOWN_ONE_BY_ONE = 8  # values of one family; of more, a "key_value" line shows the number and the range


class ConsoleLogger(MetricLogger):
    """Writes a line for each METRICS_LOGGED, validation, rollout and POLICY_UPDATED, and for a run's start and end.

    The first line of a trainer's run names the optimizer, with its rate, momentum and weight decay, and the seed.
    On a bus, each line names its engine. Lines do not break a tqdm bar on the same stream. structlog renders the lines;
    its global configuration is neither read nor changed.

    Args:
        every: read `state.output` at this cadence instead of METRICS_LOGGED; each reading waits for the device.
        format: "key_value" with floats to 4 significant digits, or "json" with exact ones (NaN and infinities as the
            strings "NaN", "Infinity", "-Infinity").
        stream: by default stderr at the time of attaching.
        clock: seconds, for `Every(seconds=...)`.
        on_error: "raise" ends the run when a line cannot be written, "warn" continues.

    >>> import io, json
    >>> engine, stream = Engine(lambda engine, batch: 1 / batch), io.StringIO()
    >>> logger = ConsoleLogger(Every(iterations=2), format="json", stream=stream).attach(engine)
    >>> state = engine.run([1, 2])
    >>> [json.loads(line)["event"] for line in stream.getvalue().splitlines()]
    ['run started', 'metrics', 'run completed']
    """

    def __init__(
        self,
        every: Every | None = None,
        format: Literal["key_value", "json"] = "key_value",
        stream: TextIO | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_error: OnError = "raise",
    ) -> None:
        super().__init__(every, clock=clock, on_error=on_error)
        check_choice("ConsoleLogger", "format", format, ("key_value", "json"))
        self.format = format
        self._given_stream = stream
        self._stream: TextIO = sys.stderr
        self._logger: Any = None

    def prepare(self) -> None:
        self._stream = self._given_stream if self._given_stream is not None else sys.stderr
        self._logger = _make_logger(self._stream, self.format)

    def log_metrics(self, engine: Engine, metrics: Mapping[str, float]) -> None:
        values = metrics if self.format == "json" else _folded(metrics)
        self._write(engine, "metrics", {**_place(engine), **values})

    def log_validation(self, engine: Engine, validation: ValidationCompleted) -> None:
        self._write(engine, "validation", {**_place(engine), **validation.metrics, "seconds": validation.seconds})

    def log_rollout(self, engine: Engine, rollout: RolloutCompleted | PolicyUpdated) -> None:
        if isinstance(rollout, RolloutCompleted):
            self._write(engine, "rollout", {**_place(engine), **rollout.metrics, "seconds": rollout.seconds})
        else:
            self._write(engine, "policy", {**_place(engine), **rollout.metrics})

    def _subscribe(self) -> None:
        self._subscribe_to_metrics()
        # of each engine of a bus, while other loggers follow one run
        self._observe(Events.STARTED, self._on_started)
        self._observe(Events.COMPLETED | Events.TERMINATE, self._on_completed)
        self._observe(Events.EXCEPTION_RAISED, self._on_exception)

    def _write(self, engine: Engine, message: str, values: Mapping[str, object]) -> None:
        if self._attachment.follows_whole_bus:
            values = {"engine": engine.name, **values}
        if self.format == "json":
            values = {name: finite_or_text(each) if isinstance(each, float) else each for name, each in values.items()}
        with _beside_bars(self._stream):
            self._logger.info(message, values=values)

    def _on_started(self, engine: Engine, event: Event) -> None:
        state = engine.state
        bounds = {"max_epochs": state.max_epochs, "max_iters": state.max_iters, "epoch_length": state.epoch_length}
        resumed = {"iteration": state.iteration} if state.iteration else {}
        made_with: dict[str, object] = {}
        if is_training_run(engine):
            made_with = {"optimizer": describe_optimizer(engine.optimizer), "seed": engine.seed}
        self._last_read = None
        known = {name: bound for name, bound in bounds.items() if bound is not None}
        self._write(engine, "run started", {**resumed, **known, **made_with})

    def _on_completed(self, engine: Engine, event: Event) -> None:
        if not is_run_end(engine, event):
            return
        reason = engine.state.stop_reason
        if reason is None:
            self._write(engine, "run completed", _place(engine))
        else:
            self._write(engine, "run stopped", {**_place(engine), "reason": reason})

    def _on_exception(self, engine: Engine, event: Event) -> None:
        error = event.payload.error
        self._write(engine, "run failed", {**_place(engine), "error": f"{type(error).__name__}: {error}"})


def _beside_bars(stream: TextIO) -> AbstractContextManager[object]:
    """Clears the progress bars of tqdm on this stream, and draws them again afterwards; none if nobody imported it."""
    tqdm = sys.modules.get("tqdm")
    beside: AbstractContextManager[object] = (
        nullcontext() if tqdm is None else tqdm.tqdm.external_write_mode(file=stream)
    )
    return beside


def _folded(metrics: Mapping[str, float]) -> dict[str, float | str]:
    """Shows a large family of metrics, such as the norms of all layers, as its size, smallest and largest value.

    Those of training, which are different quantities, are shown one by one.
    """
    family = {name: name.partition("/")[0] for name in metrics if "/" in name and not name.startswith("train/")}
    sizes = Counter(family.values())
    folded: dict[str, float | str] = {}
    for name, value in metrics.items():
        if name not in family or sizes[family[name]] <= _SHOWN_ONE_BY_ONE:
            folded[name] = value
        elif f"{family[name]}/*" not in folded:
            values = [metrics[each] for each, of in family.items() if of == family[name]]
            folded[f"{family[name]}/*"] = f"{len(values)} values, {min(values):.4g} to {max(values):.4g}"
    return folded


def _place(engine: Engine) -> dict[str, int]:
    return {"epoch": engine.state.epoch, "iteration": engine.state.iteration}


def _make_logger(stream: TextIO, format: str) -> Any:
    structlog = load_structlog()
    is_json = format == "json"
    stamp = structlog.processors.TimeStamper(fmt="iso" if is_json else "%H:%M:%S", utc=is_json)
    render = structlog.processors.JSONRenderer(default=str) if is_json else _render_line
    return structlog.wrap_logger(
        structlog.WriteLogger(stream),
        processors=[stamp, _spread, render],
        wrapper_class=structlog.BoundLogger,
        context_class=dict,
        cache_logger_on_first_use=False,
    )


def _spread(_: WrappedLogger, __: str, entry: EventDict) -> EventDict:
    """Make each value an entry. They are passed as one, since a metric may be named as a parameter of structlog."""
    for name, value in entry.pop("values").items():
        entry[f"{name}_" if name in entry else name] = value
    return entry


def _render_line(_: WrappedLogger, __: str, entry: EventDict) -> str:
    message, timestamp = entry.pop("event"), entry.pop("timestamp")
    return f"{timestamp} {message:<13} " + " ".join(f"{name}={_short(value)}" for name, value in entry.items())


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return repr(text) if not text or any(c.isspace() or c == "=" for c in text) else text
