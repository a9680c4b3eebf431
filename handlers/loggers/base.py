"""What every logger of metrics has in common: what it hears, when a run begins and ends, and what it was set to."""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar, Literal, Self

from pulsetrain.engine.errors import ConfigurationError, RunFolderError, unknown_name
from pulsetrain.engine.events.bus import EventBus
from pulsetrain.engine.events.cadence import Every
from pulsetrain.engine.events.engine import Engine
from pulsetrain.engine.events.names import Event, Events
from pulsetrain.engine.events.payloads import MediaLogged, PolicyUpdated, RolloutCompleted, ValidationCompleted
from pulsetrain.engine.events.subscription import LAST, OnError
from pulsetrain.handlers.attachment.attachment import Attachment
from pulsetrain.handlers.attachment.cadence import check_every, reading_events
from pulsetrain.handlers.attachment.engine_queries import is_run_end
from pulsetrain.handlers.metric_values.step_values import step_metrics

__all__ = ["MetricLogger", "Plain", "Status", "hyperparameters_of"]

Plain = str | int | float | bool | None
Status = Literal["finished", "interrupted", "failed"]


class MetricLogger:
    """Hears what is measured in a run, and hands it to whatever a subclass writes it to.

        class Spoken(MetricLogger):
            def log_metrics(self, engine, metrics):
                for name, value in metrics.items():
                    say(f"{name} is {value:.2f}")

        Trainer(..., handlers=[Spoken()])

    A subclass overrides `log_metrics`, and of the other methods without an underscore those that it has a use for.
    They are called on the training thread. Several loggers of one engine do not know of each other.

    Args:
        every: read `state.output` at this cadence in place of METRICS_LOGGED; each reading waits for the device.
        hyperparameters: further ones beside the fields of `engine.config`, by name.
        clock: seconds, for `Every(seconds=...)`.
        on_error: "warn" says once that it fails, and goes on; "raise" ends the run.
    """

    event: Event  # the one being handled; its `time_ns` is when that was measured
    _attached: ClassVar[weakref.WeakSet[MetricLogger]] = weakref.WeakSet()

    def __init__(
        self,
        every: Every | None = None,
        *,
        hyperparameters: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_error: OnError = "warn",
    ) -> None:
        self._place = type(self).__name__
        if every is not None:
            check_every(self._place, every)
        if hyperparameters is not None and not isinstance(hyperparameters, Mapping):
            raise ConfigurationError(
                f"{self._place}(hyperparameters={hyperparameters!r}): needs a mapping, such as {{'width': 64}}"
            )
        if on_error not in ("raise", "warn"):
            raise unknown_name(self._place, "on_error", on_error, ("raise", "warn"))
        self.every = every
        self.hyperparameters = hyperparameters
        self.on_error: OnError = on_error
        self._clock = clock
        self._last_read: tuple[str, int] | None = None
        self._running: str | None = None  # the engine whose run this is; on a bus, others run within it
        self._open = False
        self._attachment = Attachment(self._place)

    def attach(self, engine_or_bus: Engine | EventBus) -> Self:
        """Follow one engine, or all of a bus.

        Raises:
            RunFolderError: another logger of this bus writes there, or, with on_error="raise", its place cannot be
                written: else that is said, and the run goes on without it.
        """
        with self._attachment.to(engine_or_bus, needed=self.on_error == "raise") as subscribe:
            self._refuse_company()
            self.prepare()
            self._last_read = self._running = None
            self._subscribe(functools.partial(subscribe, on_error=self.on_error))
            MetricLogger._attached.add(self)
        return self

    def detach(self) -> None:
        self._attachment.cancel()
        MetricLogger._attached.discard(self)
        self._end("finished")

    # What a sink overrides.

    @property
    def destination(self) -> Any:
        """What it alone may write to, such as a file's path; None where any number may write."""
        return None

    def prepare(self) -> None:
        """It is being attached: raise here what is wrong with the place that it writes to."""

    def open(self, engine: Engine) -> None:
        """A run begins or goes on, or something was measured outside of one."""

    def log_hyperparameters(self, values: Mapping[str, Plain]) -> None:
        """Behind `open`: the run's settings by their full names, such as "optimizer_options.momentum"; perhaps none."""

    def log_metrics(self, engine: Engine, metrics: Mapping[str, float]) -> None:
        """METRICS_LOGGED, or a reading by `every`; numbers on the host."""
        raise NotImplementedError(
            f"{self._place}.log_metrics(engine, metrics): a logger has to say what becomes of them"
        )

    def log_validation(self, engine: Engine, validation: ValidationCompleted) -> None:
        """VALIDATION_COMPLETED; by default its metrics are logged as any."""
        self.log_metrics(engine, validation.metrics)

    def log_rollout(self, engine: Engine, rollout: RolloutCompleted | PolicyUpdated) -> None:
        """ROLLOUT_COMPLETED, and POLICY_UPDATED behind it; by default their metrics are logged as any."""
        self.log_metrics(engine, rollout.metrics)

    def log_media(self, engine: Engine, media: MediaLogged) -> None:
        """MEDIA_LOGGED; a logger that does not override this keeps nobody busy drawing pictures."""

    def close(self, status: Status) -> None:
        """The run has ended, and nothing of it comes any more; `open` may follow."""

    def begin_again(self) -> None:
        """A run begins anew that was killed before its first checkpoint: what it has logged comes again."""

    # What they share.

    def full_name(self, engine: Engine, name: str) -> str:
        """The metric's name; on a bus, where several engines may use it, behind the engine's."""
        return f"{engine.name}/{name}" if self._attachment.follows_whole_bus else name

    def _refuse_company(self) -> None:
        destination, bus = self.destination, self._attachment.bus
        for other in MetricLogger._attached if destination is not None else ():
            if other.destination == destination and other._attachment.bus is bus:
                raise RunFolderError(
                    f"{self._place}.attach(): another {other._place} of this bus writes {destination} already; give "
                    "each a folder of its own, or detach() the other one"
                )

    def _subscribe(self, subscribe: Callable[..., None]) -> None:
        self._subscribe_to_metrics(subscribe)
        subscribe(Events.STARTED, self._on_started)
        if type(self).log_media is not MetricLogger.log_media:
            subscribe(Events.MEDIA_LOGGED, self._on_media)
        # behind those that measure once more when the run ends
        for event in (Events.COMPLETED, Events.TERMINATE, Events.INTERRUPT, Events.EXCEPTION_RAISED):
            subscribe(event, self._on_end, order=LAST)

    def _subscribe_to_metrics(self, subscribe: Callable[..., None]) -> None:
        if self.every is None:
            subscribe(Events.METRICS_LOGGED, self._on_metrics)
        else:
            subscribe(reading_events(self.every, self._clock), self._on_reading)
        subscribe(Events.VALIDATION_COMPLETED, self._on_validation)
        subscribe(Events.ROLLOUT_COMPLETED | Events.POLICY_UPDATED, self._on_rollout)

    def _on_started(self, engine: Engine, event: Event) -> None:
        self._last_read = None
        if self._running is None:
            self._running = engine.name
            self._begin(engine, event)

    def _on_metrics(self, engine: Engine, event: Event) -> None:
        self._begin(engine, event)
        self.log_metrics(engine, event.payload.metrics)

    def _on_reading(self, engine: Engine, event: Event) -> None:
        reading = (engine.name, engine.state.iteration)
        if self._last_read == reading:
            return
        self._last_read = reading
        metrics = step_metrics(engine)
        if metrics:
            self._begin(engine, event)
            self.log_metrics(engine, metrics)

    def _on_validation(self, engine: Engine, event: Event) -> None:
        self._begin(engine, event)
        self.log_validation(engine, event.payload)

    def _on_rollout(self, engine: Engine, event: Event) -> None:
        self._begin(engine, event)
        self.log_rollout(engine, event.payload)

    def _on_media(self, engine: Engine, event: Event) -> None:
        self._begin(engine, event)
        self.log_media(engine, event.payload)

    def _on_end(self, engine: Engine, event: Event) -> None:
        if engine.name != self._running:
            return
        if not is_run_end(engine, event):
            return
        self.event = event
        ends: dict[str, Status] = {
            Events.EXCEPTION_RAISED.value: "failed",
            Events.INTERRUPT.value: "interrupted",
        }
        self._end(ends.get(event.type, "finished"))

    def _begin(self, engine: Engine, event: Event) -> None:
        self.event = event
        if self._open:
            return
        self.open(engine)
        self._open = True
        self.log_hyperparameters(hyperparameters_of(engine, self.hyperparameters))

    def _end(self, status: Status) -> None:
        was_open, self._open, self._running = self._open, False, None
        if was_open:
            self.close(status)


def hyperparameters_of(engine: Any, given: Mapping[str, Any] | None = None) -> dict[str, Plain]:
    """The fields of `engine.config`, where that is a dataclass, and those given: plain, mappings taken apart."""
    config = getattr(engine, "config", None)
    values: dict[str, Any] = {}
    if is_dataclass(config) and not isinstance(config, type):
        values = {field.name: getattr(config, field.name) for field in fields(config)}
    return dict(_flat({**values, **(given or {})}, ""))


def _flat(values: Mapping[str, Any], prefix: str) -> list[tuple[str, Plain]]:
    found: list[tuple[str, Plain]] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", value if isinstance(value, str | int | float | None) else str(value)))
    return found
