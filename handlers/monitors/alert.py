"""Sends alerts about a run: to a command, to a web address, or both."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import threading
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Self
from urllib.parse import urlsplit

from pulsetrain.engine.argument_checks import check_positive
from pulsetrain.engine.errors import ArgumentTypeError, ConfigurationError, refused
from pulsetrain.engine.events.engine import Engine
from pulsetrain.engine.events.names import Event, EventEnum, Events
from pulsetrain.engine.events.payloads import payload_fields
from pulsetrain.engine.events.subscription import LAST, Phase
from pulsetrain.engine.logs import get_logger
from pulsetrain.engine.recording.replay.engine import ReplayedEngine
from pulsetrain.engine.training_run import is_training_run
from pulsetrain.handlers.attachment.attachment import AnyEvent, Handler
from pulsetrain.handlers.attachment.engine_queries import is_run_end

__all__ = ["Alert"]

_AT_MOST = 100  # waiting alerts: a run in which every step is an anomaly must not fill the memory
_EVENTS = (Events.ANOMALY_DETECTED, Events.EXCEPTION_RAISED, Events.TERMINATE, Events.COMPLETED)


class Alert(Handler):
    """Runs a command, posts to a web address, or both, when one of the events fires.

    An alert is JSON: {"event": "terminate", "engine": "trainer", "epoch": 3, "iteration": 1200, "time": seconds since
    1970, "payload": {"reason": ...}}. The command reads it from its standard input, and has PULSETRAIN_EVENT,
    PULSETRAIN_ENGINE, PULSETRAIN_EPOCH and PULSETRAIN_ITERATION in its environment; no shell is involved. The address
    receives it as the body of a POST.

    A separate thread sends the alerts one after the other. Only the end of the run waits for them, for at most
    `timeout` seconds in all. An alert is lost if it fails or if 100 others are waiting; the first loss is logged. A
    replay sends no alerts, unless `in_replay` is set. A run that returns to a checkpoint has not terminated.

    Args:
        command: the program and its arguments, such as ["notify-send", "training"].
        webhook: an address that begins with https:// or http://; messages show only its host.
        events: the events that send an alert.
        timeout: seconds that one command or one request may take, and that the end of the run waits.
        in_replay: also send alerts in a replay.

    Raises:
        ConfigurationError: neither command nor webhook is given, the command is a string, the address has another
            scheme, there are no events, or the timeout is not positive.
        TypeError: an item of `events` is not an event.

    >>> import sys
    >>> engine = Engine(lambda engine, batch: None)
    >>> alert = Alert([sys.executable, "-c", "import json, sys; json.load(sys.stdin)"]).attach(engine)
    >>> state = engine.run([1])  # waits at its end until the command is done
    """

    webhook: str | None

    def __init__(
        self,
        command: Sequence[str] | None = None,
        webhook: str | None = None,
        events: Iterable[AnyEvent] = _EVENTS,
        timeout: float = 10.0,
        *,
        in_replay: bool = False,
    ) -> None:
        self.command, self.webhook = command, webhook
        if command is None and webhook is None:
            rule = "needs a command or a webhook, such as command=['notify-send']"
            raise refused(self, rule, "command", "webhook")
        if isinstance(command, str) or (
            command is not None and not (command and all(isinstance(each, str) for each in command))
        ):
            raise refused(self, "needs a list of texts, the program and its arguments; no shell splits it", "command")
        self._site = _site_of(webhook)
        if webhook is not None and self._site is None:
            shown = f"{webhook[:8]}..." if isinstance(webhook, str) else webhook
            raise ConfigurationError("needs an address that begins with https:// or http://", "Alert", webhook=shown)
        if isinstance(events, (str, EventEnum)):
            raise ArgumentTypeError("needs several, such as (Events.COMPLETED,)", "Alert", events=events)
        check_positive("Alert", "timeout", timeout)
        self.command = None if command is None else list(command)
        self.events: tuple[AnyEvent, ...] = tuple(events)
        if not self.events:
            raise refused(self, "needs at least one event", "events")
        self.timeout = timeout
        self.in_replay = in_replay
        self._waiting: deque[dict[str, object]] = deque()
        self._working = False  # whether the thread runs
        self._changed = threading.Condition()  # guards both
        self._warned = False

    def attach(self, engine: Engine) -> Self:
        """Subscribe to the events in phase OBSERVE; at the run's end, wait after all other handlers."""
        with self._attachment.to(engine, whole_bus=False) as subscribe:
            for event in self.events:
                subscribe(event, self._on_event, on_error="warn")
            for event in (Events.COMPLETED, Events.TERMINATE, Events.EXCEPTION_RAISED):
                subscribe(event, self._on_end, phase=Phase.PERSIST, on_error="warn", order=LAST)
        return self

    def detach(self) -> None:
        """Unsubscribe; wait for alerts not sent yet, for at most `timeout` seconds."""
        super().detach()
        self._wait()

    def _on_event(self, engine: Engine, event: Event) -> None:
        if isinstance(engine, ReplayedEngine) and not self.in_replay:
            return
        if event.type == Events.TERMINATE.value and is_training_run(engine) and engine.is_rewinding:
            return
        payload = payload_fields(event.payload) if hasattr(event.payload, "__dataclass_fields__") else event.payload
        message = {
            "event": event.type,
            "engine": event.engine,
            "epoch": event.epoch,
            "iteration": event.iteration,
            "time": event.time_ns / 1e9,
            "payload": _plain(payload),
        }
        with self._changed:
            full = len(self._waiting) == _AT_MOST
            if not full:
                self._waiting.append(message)
            if not self._working:
                threading.Thread(target=self._work, name="alert", daemon=True).start()
                self._working = True
        if full:
            self._warn("dropped", f"{_AT_MOST} alerts are already waiting")

    def _on_end(self, engine: Engine, event: Event) -> None:
        if is_run_end(engine, event):
            self._wait()

    def _wait(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._working, self.timeout)

    def _work(self) -> None:
        """Send alerts until none waits; runs in the thread."""
        while True:
            with self._changed:
                if not self._waiting:
                    self._working = False
                    self._changed.notify_all()
                    return
                message = self._waiting.popleft()
            for send in (self._run, self._post):
                try:
                    send(message)
                except Exception as error:  # the next alerts are still sent
                    self._warn("failed", f"{type(error).__name__}: {error}")

    def _run(self, message: Mapping[str, object]) -> None:
        command = self.command
        if command is None:
            return
        names = ("event", "engine", "epoch", "iteration")
        environment = {**os.environ, **{f"PULSETRAIN_{name.upper()}": str(message[name]) for name in names}}
        with subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # so that the processes it starts end with it
        ) as process:
            try:
                _, printed = process.communicate(json.dumps(message).encode(), timeout=self.timeout)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                raise TimeoutError(f"{command[0]} took more than {self.timeout:g} s") from None
        if process.returncode:
            text = printed.decode(errors="replace").strip()
            raise RuntimeError(f"{command[0]} ended with {process.returncode}: {text[-500:]}")

    def _post(self, message: Mapping[str, object]) -> None:
        webhook = self.webhook
        if webhook is None:
            return
        body, headers = json.dumps(message).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(webhook, body, headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=self.timeout):
                pass
        except urllib.error.HTTPError as error:
            error.close()
            raise RuntimeError(f"{self._site} answered {error.code} {error.reason}") from None
        except Exception as error:  # an error other than OSError may quote the address
            why = error if isinstance(error, OSError) else type(error).__name__
            raise RuntimeError(f"{self._site} could not be reached: {why}") from None

    def _warn(self, what: str, why: str) -> None:
        if not self._warned:
            self._warned = True
            get_logger("handlers").warning(
                f"an alert {what}; the run continues, and further failures are not reported", error=why
            )


def _plain(value: object) -> object:
    """The value as plain JSON; tensors are not copied from their device."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {value}"
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, os.PathLike) else f"<{type(value).__name__}>"


def _site_of(webhook: object) -> str | None:
    """The address without the parts that may be secret: with the whole of it anyone may post; None if it is not one."""
    try:
        parts = urlsplit(webhook) if isinstance(webhook, str) else None
    except ValueError:  # an incomplete IPv6 address
        return None
    if parts is None or parts.scheme not in ("https", "http") or not parts.hostname:
        return None
    return f"{parts.scheme}://{parts.hostname}"
