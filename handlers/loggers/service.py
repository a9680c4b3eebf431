"""The base of loggers to services: measurements become entries, which a thread sends."""

from __future__ import annotations

import functools
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from pulsetrain.engine import ConfigurationError, Engine, Events, Every, HandlerFailed, MediaLogged, OnError
from pulsetrain.engine.argument_checks import check_number, check_whole_number
from pulsetrain.handlers.loggers.base import MetricLogger, Plain, Status
from pulsetrain.handlers.loggers.pictures import histogram_of, picture_of
from pulsetrain.handlers.loggers.sending import Sender

__all__ = ["Begin", "Deliver", "End", "Entry", "Media", "Metrics", "ServiceLogger", "check_text"]


@dataclass(frozen=True, slots=True)
class Begin:
    """The run starts or resumes."""


@dataclass(frozen=True, slots=True)
class Metrics:
    """Numbers measured at one time, by full name."""

    values: dict[str, float]
    iteration: int
    epoch: int
    time_ns: int


@dataclass(frozen=True, slots=True)
class Media:
    """A text, a histogram's (counts, edges), or a picture as uint8, (height, width, 3) or (height, width)."""

    name: str
    kind: str  # "text", "histogram" or "picture"
    value: Any
    iteration: int
    time_ns: int


@dataclass(frozen=True, slots=True)
class End:
    """The run's end."""

    status: Status
    time_ns: int


Entry: TypeAlias = Begin | Metrics | Media | End
Deliver: TypeAlias = Callable[[Sequence[Entry]], int]  # sends the first entries, at least one; returns how many


class ServiceLogger(MetricLogger):
    """Logs to a service: the training thread makes entries, and another thread sends them.

    A subclass defines `connect`. Training never waits for a service that is down or slow: entries wait, up to `room`;
    beyond that, the oldest are lost. An outage is reported by one warning and one HANDLER_FAILED when it starts, and by
    a warning when it ends. The end of a run waits at most `flush_seconds`.

    Args:
        every: read `state.output` at this cadence instead of METRICS_LOGGED; each reading waits for the device.
        hyperparameters: further ones in addition to the fields of `engine.config`, by name.
        room: bytes that may wait for the service.
        flush_seconds: how long the end of a run waits for unsent entries.
        clock: seconds, for `Every(seconds=...)`.
        on_error: what to do about errors on the training thread: "warn" continues, "raise" ends the run.
    """

    takes_histograms: ClassVar[bool] = True  # if not, they are drawn

    def __init__(
        self,
        every: Every | None,
        hyperparameters: Mapping[str, object] | None,
        room: int,
        flush_seconds: float,
        clock: Callable[[], float],
        on_error: OnError,
    ) -> None:
        super().__init__(every, hyperparameters=hyperparameters, clock=clock, on_error=on_error)
        check_whole_number(self._place, "room", room)
        check_number(self._place, "flush_seconds", flush_seconds)
        self.room = room
        self.flush_seconds = flush_seconds
        self._key: str | None = None  # of the run; made here, so that the service need not be reached for it
        self._ended = False  # whether that run has ended
        self._sender: Sender[Entry] | None = None
        self._engine: weakref.ref[Engine] | None = None
        self._closing = False
        self._failures: list[Exception] = []  # that occurred while the training thread waits for the sender

    def connect(self, key: str, values: Mapping[str, Plain]) -> Deliver:
        """Start the service's run of this key with its hyperparameters, or resume it; called in the thread.

        Returns:
            A function that sends the first of the entries it is given, at least one, and returns how many.
        """
        raise NotImplementedError

    def is_refusal(self, error: Exception) -> bool:
        """Whether an error means that the service rejects an entry for good."""
        return isinstance(error, TypeError | ValueError)

    def report_refusal(self, error: Exception) -> None:
        """The service rejects something that is not an entry, such as a hyperparameter; called in the thread."""
        sender = self._sender
        if sender is not None:
            sender.report_refusal(error)

    def state_dict(self) -> dict[str, str | None]:
        """The run's key, by which a resumed run continues the same run of the service."""
        return {"key": self._key}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the service's run with the saved key."""
        self._key, self._ended = state["key"], False

    def open(self, engine: Engine) -> None:
        begins = self._running is not None and engine.state.iteration == 0
        if self._key is None or (self._ended and begins):
            self._key = uuid.uuid4().hex
        self._ended = self._closing = False
        self._engine = weakref.ref(engine)

    def log_hyperparameters(self, values: Mapping[str, Plain]) -> None:
        assert self._key is not None
        self._failures = []
        connect = functools.cache(functools.partial(self.connect, self._key, values))  # again after a failed attempt
        self._sender = Sender(
            self._place,
            lambda entries: connect()(entries),
            is_refusal=self.is_refusal,
            report=self._report,
            room=self.room,
            flush_seconds=self.flush_seconds,
        )
        if self._running is not None:  # otherwise a number was measured outside of a run
            self._put(Begin(), 100)  # now, so that the service shows the run before its first numbers

    def log_metrics(self, engine: Engine, metrics: Mapping[str, float]) -> None:
        values = {self.full_name(engine, name): float(value) for name, value in metrics.items()}
        entry = Metrics(values, engine.state.iteration, engine.state.epoch, self.event.time_ns)
        self._put(entry, 100 * (1 + len(values)))

    def log_media(self, engine: Engine, media: MediaLogged) -> None:
        # drawn now: the handler that fired it may change it as soon as this returns
        kind, value = self._converted(media)
        size = len(value) if kind == "text" else value.nbytes if kind == "picture" else value[0].nbytes * 2
        name = self.full_name(engine, media.name)
        self._put(Media(name, kind, value, engine.state.iteration, self.event.time_ns), 200 + size)

    def close(self, status: Status) -> None:
        sender = self._sender
        self._ended = self._closing = True
        if sender is None:
            return
        sender.put(End(status, self.event.time_ns), 100)
        discarded = sender.finish(self.flush_seconds)
        self._sender = None
        if discarded and not sender.reported:
            self._failures.append(TimeoutError(f"{self._place}: {discarded} entries were not sent in time"))
        engine = self._engine() if self._engine is not None else None
        for error in self._failures:
            if engine is not None:
                engine.fire(Events.HANDLER_FAILED, self._failed(error))

    def _converted(self, media: MediaLogged) -> tuple[str, Any]:
        if media.kind == "text":
            return "text", str(media.value)
        if media.kind == "histogram" and self.takes_histograms:
            return "histogram", histogram_of(media)
        return "picture", picture_of(media).copy()

    def _put(self, entry: Entry, size: int) -> None:
        assert self._sender is not None
        self._sender.put(entry, size)

    def _report(self, error: Exception) -> None:
        """Called in the thread. An event posted after the run's end would be delivered in the next run."""
        engine = self._engine() if self._engine is not None else None
        if self._closing or engine is None:
            self._failures.append(error)
        else:
            engine.post(Events.HANDLER_FAILED, self._failed(error))

    def _failed(self, error: Exception) -> HandlerFailed:
        return HandlerFailed(
            handler=f"pulsetrain.handlers.{self._place}", event=Events.METRICS_LOGGED.value, error=error
        )


def check_text(place: str, argument: str, value: object, needed: str) -> None:
    """Reject anything but a text that is not empty.

    Args:
        place: the logger's class name, for the message.
        argument: its argument's name.
        value: what was passed.
        needed: such as "a name".

    Raises:
        ConfigurationError: not such a text.
    """
    if not isinstance(value, str) or not value:
        raise ConfigurationError(f"needs {needed}", place, **{argument: value})
