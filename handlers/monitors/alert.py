"""Tells somebody when something happens to the run: by a command, or by a web address."""

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
from typing import Any, Self
from urllib.parse import urlsplit

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.events.engine import Engine
from pulsetrain.engine.events.names import Event, EventEnum, Events
from pulsetrain.engine.events.payloads import payload_fields
from pulsetrain.engine.events.subscription import LAST, Phase
from pulsetrain.engine.logs import get_logger
from pulsetrain.engine.recording.replay.engine import ReplayedEngine
from pulsetrain.handlers.attachment.attachment import Attachment
from pulsetrain.handlers.attachment.engine_queries import is_run_end

__all__ = ["Alert"]

_AT_MOST = 100  # alerts that wait: a run whose every step is an anomaly must not fill the memory with them
_EVENTS = (Events.ANOMALY_DETECTED, Events.EXCEPTION_RAISED, Events.TERMINATE, Events.COMPLETED)


class Alert:
    """Runs a command, posts to a web address, or both, for each of some events.

    What they get is JSON: {"event": "terminate", "engine": "trainer", "epoch": 3, "iteration": 1200, "time": seconds
    since 1970, "payload": {"reason": ...}}. The command has it on its standard input, and finds PULSETRAIN_EVENT,
    PULSETRAIN_ENGINE, PULSETRAIN_EPOCH and PULSETRAIN_ITERATION in its environment; it is run as it stands, by no
    shell. The address gets it as the body of a POST.

    A thread of its own does so, one alert after the other: the run waits for none, but at its end, for at most
    `timeout` seconds in all. An alert that fails, or finds 100 others waiting, costs itself; the first is told. In a
    replay nobody is alerted, unless asked for. A run that goes back to a checkpoint has not terminated.

    Args:
        command: the program and its arguments, such as ["notify-send", "training"].
        webhook: an address that begins with https:// or http://; messages leave out all behind the host's name.
        events: what to tell of.
        timeout: seconds that one command or one request may take, and that the end of the run waits.
        in_replay: alert in a replay, too.

    Raises:
        ConfigurationError: neither is given, a command as one string, another kind of address, no events, or a timeout
            that is not positive.
        TypeError: what is no event.
    """

    def __init__(
        self,
        command: Sequence[str] | None = None,
        webhook: str | None = None,
        events: Iterable[Any] = _EVENTS,
        timeout: float = 10.0,
        *,
        in_replay: bool = False,
    ) -> None:
        if command is None and webhook is None:
            raise ConfigurationError("Alert(): needs a command or a webhook, such as Alert(command=['notify-send'])")
        if isinstance(command, str) or (command is not None and not (command and all(map(_is_text, command)))):
            raise ConfigurationError(
                f"Alert(command={command!r}): needs a list of texts, the program and its arguments, as no shell runs it"
            )
        if webhook is not None and not _is_address(webhook):
            raise ConfigurationError(
                f"Alert(webhook={_shown(webhook)}): needs an address that begins with https:// or http://"
            )
        if isinstance(events, (str, EventEnum)):
            raise TypeError(f"Alert(events={events!r}): needs several, as (Events.COMPLETED,)")
        if not isinstance(timeout, (int, float)) or isinstance(timeout, bool) or not 0.0 < timeout < math.inf:
            raise ConfigurationError(f"Alert(timeout={timeout!r}): needs a positive number of seconds")
        self.command = None if command is None else list(command)
        self.webhook = webhook
        self.events = tuple(events)
        if not self.events:
            raise ConfigurationError("Alert(events=()): needs one event at least")
        self.timeout = timeout
        self.in_replay = in_replay
        self._waiting: deque[dict[str, Any]] = deque()
        self._working = False  # there is a thread
        self._changed = threading.Condition()  # of the two
        self._said = False
        self._attachment = Attachment("Alert")

    def attach(self, engine: Engine) -> Self:
        """Hear the events in phase OBSERVE; at the run's end, wait last of all."""
        with self._attachment.to(engine, whole_bus=False) as subscribe:
            for event in self.events:
                subscribe(event, self._on_event, on_error="warn")
            for event in (Events.COMPLETED, Events.TERMINATE, Events.EXCEPTION_RAISED):
                subscribe(event, self._on_end, phase=Phase.PERSIST, on_error="warn", order=LAST)
        return self

    def detach(self) -> None:
        """Alert no more; what waits is told, for which it waits at most `timeout` seconds."""
        self._attachment.cancel()
        self._wait()

    def _on_event(self, engine: Engine, event: Event) -> None:
        if isinstance(engine, ReplayedEngine) and not self.in_replay:
            return
        if event.type == Events.TERMINATE.value and getattr(engine, "rewinding", None) is not None:
            return
        message = _message(event)
        with self._changed:
            full = len(self._waiting) == _AT_MOST
            if not full:
                self._waiting.append(message)
            if not self._working:
                threading.Thread(target=self._work, name="alert", daemon=True).start()
                self._working = True
        if full:
            self._tell("dropped", f"{_AT_MOST} alerts are waiting already")

    def _on_end(self, engine: Any, event: Event) -> None:
        if is_run_end(engine, event):
            self._wait()

    def _wait(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._working, self.timeout)

    def _work(self) -> None:
        """The thread: until nothing waits."""
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
                except Exception as error:  # whatever it was, the others have their chance
                    self._tell("failed", f"{type(error).__name__}: {error}")

    def _run(self, message: Mapping[str, Any]) -> None:
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
            start_new_session=True,  # so that what it has started ends with it
        ) as process:
            try:
                _, said = process.communicate(json.dumps(message).encode(), timeout=self.timeout)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                raise TimeoutError(f"{command[0]} took more than {self.timeout:g} s") from None
        if process.returncode:
            text = said.decode(errors="replace").strip()
            raise RuntimeError(f"{command[0]} ended with {process.returncode}: {text[-500:]}")

    def _post(self, message: Mapping[str, Any]) -> None:
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
            raise RuntimeError(f"{_shown(webhook)} answered {error.code} {error.reason}") from None
        except Exception as error:  # others than OSError may quote the address
            why = error if isinstance(error, OSError) else type(error).__name__
            raise RuntimeError(f"{_shown(webhook)} could not be reached: {why}") from None

    def _tell(self, what: str, why: str) -> None:
        if not self._said:
            self._said = True
            get_logger("handlers").warning(
                f"an alert {what}; the run goes on, and further ones are not told of", error=why
            )


def _message(event: Event) -> dict[str, Any]:
    payload = event.payload
    if hasattr(payload, "__dataclass_fields__"):
        payload = payload_fields(payload)
    return {
        "event": event.type,
        "engine": event.engine,
        "epoch": event.epoch,
        "iteration": event.iteration,
        "time": event.time_ns / 1e9,
        "payload": _plain(payload),
    }


def _plain(value: Any) -> Any:
    """What JSON knows; nothing is brought from a device for it."""
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


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_address(value: object) -> bool:
    try:
        parts = urlsplit(value) if isinstance(value, str) else None
    except ValueError:  # half an address of IPv6
        return False
    return parts is not None and parts.scheme in ("https", "http") and bool(parts.hostname)


def _shown(webhook: object) -> str:
    """The address without what may be a secret: whoever has the whole of it may post."""
    if not isinstance(webhook, str):
        return repr(webhook)
    if not _is_address(webhook):
        return f"{webhook[:8]}..."
    parts = urlsplit(webhook)
    return f"{parts.scheme}://{parts.hostname}"
