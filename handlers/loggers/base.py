"""The base of loggers of metrics: what they subscribe to, when a run starts and ends, its hyperparameters."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping
from typing import ClassVar, Literal, Self

from pulsetrain.engine.argument_checks import check_choice
from pulsetrain.engine.errors import RunFolderError, refused
from pulsetrain.engine.events.bus import EventBus
from pulsetrain.engine.events.cadence import Every
from pulsetrain.engine.events.engine import Engine
from pulsetrain.engine.events.names import Event, Events
from pulsetrain.engine.events.payloads import MediaLogged, PolicyUpdated, RolloutCompleted, ValidationCompleted
from pulsetrain.engine.events.subscription import LAST, OnError, Order
from pulsetrain.handlers.attachment.attachment import AnyEvent, Handler
from pulsetrain.handlers.attachment.cadence import check_every, reading_events
from pulsetrain.handlers.attachment.engine_queries import is_run_end, outermost, settings_of
from pulsetrain.handlers.metric_values.step_values import step_metrics

__all__ = ["MetricLogger", "Plain", "Status", "hyperparameters_of"]

Plain = str | int | float | bool | None
Status = Literal["finished", "interrupted", "failed"]


class MetricLogger(Handler):
    """Receives the values that are measured in a run. A subclass writes them somewhere.

    A subclass overrides `log_metrics`, and any of the other methods without an underscore. They are called on the
    training thread. Several loggers of one engine are independent of each other.

    Args:
        every: read `state.output` at this cadence instead of METRICS_LOGGED; each reading waits for the device.
        hyperparameters: further ones in addition to the fields of `engine.config`, by name.
        clock: seconds, for `Every(seconds=...)`.
        on_error: "warn" logs one warning when writing fails, and the run continues; "raise" ends the run.

    >>> class Printer(MetricLogger):
    ...     def log_metrics(self, engine, metrics):
    ...         print(engine.state.iteration, metrics)
    >>> engine = Engine(lambda engine, batch: 1 / batch)
    >>> logger = Printer(Every(iterations=2)).attach(engine)
    >>> state = engine.run([1, 2, 3, 4])
    2 {'train/loss': 0.5}
    4 {'train/loss': 0.25}
    """

    event: Event  # being handled; its `time_ns` is the time of the measurement
    _attached: ClassVar[weakref.WeakSet[MetricLogger]] = weakref.WeakSet()

    def __init__(
        self,
        every: Every | None = None,
        *,
        hyperparameters: Mapping[str, object] | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_error: OnError = "warn",
    ) -> None:
        self._place = type(self).__name__
        check_every(self._place, every, or_none=True)
        self.hyperparameters = hyperparameters
        if hyperparameters is not None and not isinstance(hyperparameters, Mapping):
            raise refused(self, "needs a mapping, such as {'width': 64}", "hyperparameters")
        check_choice(self._place, "on_error", on_error, ("raise", "warn"))
        self.every = every
        self.on_error: OnError = on_error
        self._clock = clock
        self._last_read: tuple[str, int] | None = None
        self._running: str | None = None  # the engine whose run is logged; on a bus, other engines run within it
        self._open = False

    def attach(self, engine_or_bus: Engine | EventBus) -> Self:
        """Follow one engine, or all of a bus.

        Raises:
            RunFolderError: another logger of this bus writes to the same destination; or the destination cannot be
                written and on_error="raise". With on_error="warn" a warning is logged, and the run continues without
                this logger.
        """
        with self._attachment.to(engine_or_bus, needed=self.on_error == "raise"):
            self._reject_shared_destination()
            self.prepare()
            self._last_read = self._running = None
            self._subscribe()
            MetricLogger._attached.add(self)
        return self

    def detach(self) -> None:
        super().detach()
        MetricLogger._attached.discard(self)
        self._end("finished")

    # For subclasses to override.

    @property
    def destination(self) -> object:
        """What only one logger may write to, such as a file's path; None if several may write."""
        return None

    def prepare(self) -> None:
        """Called by `attach`; raises if the destination cannot be used."""

    def open(self, engine: Engine) -> None:
        """A run starts or resumes, or a value was measured outside a run."""

    def log_hyperparameters(self, values: Mapping[str, Plain]) -> None:
        """Called after `open`: the settings by full name, such as "optimizer_options.momentum"; may be empty."""

    def log_metrics(self, engine: Engine, metrics: Mapping[str, float]) -> None:
        """METRICS_LOGGED, or a reading at the cadence `every`; numbers on the host."""
        raise NotImplementedError(
            f"{self._place}.log_metrics(engine, metrics): a subclass of MetricLogger must define this method"
        )

    def log_validation(self, engine: Engine, validation: ValidationCompleted) -> None:
        """VALIDATION_COMPLETED; by default its metrics go to `log_metrics`."""
        self.log_metrics(engine, validation.metrics)

    def log_rollout(self, engine: Engine, rollout: RolloutCompleted | PolicyUpdated) -> None:
        """ROLLOUT_COMPLETED, and POLICY_UPDATED after it; by default their metrics go to `log_metrics`."""
        self.log_metrics(engine, rollout.metrics)

    def log_media(self, engine: Engine, media: MediaLogged) -> None:
        """MEDIA_LOGGED; a logger that does not override this does not subscribe, so that no pictures are drawn."""

    def close(self, status: Status) -> None:
        """The run has ended; `open` may follow for another one."""

    def begin_again(self) -> None:
        """A run that was killed before its first checkpoint starts again: discard what was logged."""

    # For subclasses to use.

    def full_name(self, engine: Engine, name: str) -> str:
        """The metric's name; on a bus, where several engines may report it, "ENGINE/NAME"."""
        return f"{engine.name}/{name}" if self._attachment.follows_whole_bus else name

    @property
    def bus(self) -> EventBus | None:
        """The bus attached to, or None."""
        return self._attachment.bus

    def _reject_shared_destination(self) -> None:
        destination = self.destination
        for other in MetricLogger._attached if destination is not None else ():
            if other.destination == destination and other.bus is self.bus:
                raise RunFolderError(
                    f"{self._place}.attach(): another {type(other).__name__} of this bus writes {destination} already; "
                    "give each its own folder, or detach() the other one"
                )

    def _observe(self, event: AnyEvent, handler: Callable[..., object], order: Order | None = None) -> None:
        self._attachment.subscribe(event, handler, on_error=self.on_error, order=order)

    def _subscribe(self) -> None:
        self._subscribe_to_metrics()
        self._observe(Events.STARTED, self._on_started)
        if type(self).log_media is not MetricLogger.log_media:
            self._observe(Events.MEDIA_LOGGED, self._on_logged)
        # after the handlers that measure once more when the run ends
        ends = Events.COMPLETED | Events.TERMINATE | Events.INTERRUPT | Events.EXCEPTION_RAISED
        self._observe(ends, self._on_end, order=LAST)

    def _subscribe_to_metrics(self) -> None:
        if self.every is None:
            self._observe(Events.METRICS_LOGGED, self._on_logged)
        else:
            self._observe(reading_events(self.every, self._clock), self._on_reading)
        self._observe(Events.VALIDATION_COMPLETED | Events.ROLLOUT_COMPLETED | Events.POLICY_UPDATED, self._on_logged)

    def _on_started(self, engine: Engine, event: Event) -> None:
        self._last_read = None
        if self._running is None:
            self._follow(engine)
            self._begin(engine, event)

    def _on_reading(self, engine: Engine, event: Event) -> None:
        reading = (engine.name, engine.state.iteration)
        if self._last_read == reading:
            return
        self._last_read = reading
        metrics = step_metrics(engine)
        if metrics:
            self._begin(engine, event)
            self.log_metrics(engine, metrics)

    def _on_logged(self, engine: Engine, event: Event) -> None:
        self._begin(engine, event)
        if event.type == Events.METRICS_LOGGED.value:
            self.log_metrics(engine, event.payload.metrics)
        elif event.type == Events.VALIDATION_COMPLETED.value:
            self.log_validation(engine, event.payload)
        elif event.type == Events.MEDIA_LOGGED.value:
            self.log_media(engine, event.payload)
        else:
            self.log_rollout(engine, event.payload)

    def _on_end(self, engine: Engine, event: Event) -> None:
        if engine.name != self._running or not is_run_end(engine, event):
            return
        self.event = event
        ends: dict[str, Status] = {Events.EXCEPTION_RAISED.value: "failed", Events.INTERRUPT.value: "interrupted"}
        self._end(ends.get(event.type, "finished"))

    def _follow(self, engine: Engine) -> None:
        self._running = (outermost(engine) if self._attachment.follows_whole_bus else engine).name

    def _begin(self, engine: Engine, event: Event) -> None:
        self.event = event
        if self._running is None and engine.is_running:  # an interrupted run continues, without STARTED
            self._follow(engine)
        if self._open:
            return
        self.open(engine)
        self._open = True
        self.log_hyperparameters(hyperparameters_of(engine, self.hyperparameters))

    def _end(self, status: Status) -> None:
        was_open, self._open, self._running = self._open, False, None
        if was_open:
            self.close(status)


def hyperparameters_of(engine: Engine, given: Mapping[str, object] | None = None) -> dict[str, Plain]:
    """The fields of `engine.config`, if that is a dataclass, and those given: plain values, nested mappings flattened.

    >>> hyperparameters_of(Engine(lambda engine, batch: None), {"width": 64, "options": {"momentum": 0.9}})
    {'width': 64, 'options.momentum': 0.9}
    """
    return dict(_flat({**(settings_of(engine) or {}), **(given or {})}, ""))


def _flat(values: Mapping[str, object], prefix: str) -> list[tuple[str, Plain]]:
    found: list[tuple[str, Plain]] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", value if isinstance(value, str | int | float | None) else str(value)))
    return found
