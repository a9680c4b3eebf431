"""Writes metrics, hyperparameters and media to Trackio."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pulsetrain.engine import Every, OnError
from pulsetrain.engine.optional import load_optional
from pulsetrain.handlers.loggers.base import Plain
from pulsetrain.handlers.loggers.service import Deliver, End, Entry, Media, Metrics, ServiceLogger, check_text

__all__ = ["TrackioLogger"]


class TrackioLogger(ServiceLogger):
    """Logs to a run of Trackio by iteration: on this machine, in TRACKIO_DIR, or to a server.

    Figures and matrices become images. A run that resumes from a checkpoint continues the same run of Trackio, which
    keeps the values logged after the checkpoint in addition to those that are logged again. If a server is down or
    slow, see `ServiceLogger`. Trackio prints to stdout where it writes.

    Args:
        project: its name.
        run_name: the start of the run's name; its key follows, since Trackio identifies a run by its name.
        server_url: of a Trackio server, with its token; by default TRACKIO_SERVER_URL, if set.
        every, hyperparameters, room, flush_seconds, clock, on_error: see `ServiceLogger`.

    Raises:
        ConfigurationError: trackio is not installed, or an argument cannot be used.

    >>> logger = TrackioLogger("first", run_name="wide", every=Every(iterations=50), hyperparameters={"width": 64})
    >>> logger.project, logger.run_name  # it connects when a run starts
    ('first', 'wide')
    """

    def __init__(
        self,
        project: str,
        run_name: str = "run",
        server_url: str | None = None,
        every: Every | None = None,
        *,
        hyperparameters: Mapping[str, object] | None = None,
        room: int = 64 * 2**20,
        flush_seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        on_error: OnError = "warn",
    ) -> None:
        super().__init__(every, hyperparameters, room, flush_seconds, clock, on_error)
        for name, value in (("project", project), ("run_name", run_name)):
            check_text("TrackioLogger", name, value, "a name")
        self.project = project
        self.run_name = run_name
        self._address = server_url  # not under the argument's name, which a checkpoint saves: it has a token
        self._trackio = load_optional("TrackioLogger", "trackio", "trackio")

    def connect(self, key: str, values: Mapping[str, Plain]) -> Deliver:
        run = self._trackio.init(
            project=self.project,
            name=f"{self.run_name}-{key[:8]}",
            server_url=self._address,
            config={name.lstrip("_"): value for name, value in values.items()},  # Trackio reserves the _
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        return functools.partial(self._deliver, run)

    def _deliver(self, run: Any, entries: Sequence[Entry]) -> int:
        first = entries[0]
        if isinstance(first, Metrics):
            run.log({**first.values, "epoch": first.epoch}, step=first.iteration)
        elif isinstance(first, Media):
            run.log({first.name: self._of(first)}, step=first.iteration)
        elif isinstance(first, End):
            run.finish()
        return 1

    def _of(self, media: Media) -> object:
        if media.kind == "text":
            return self._trackio.Markdown(media.value)
        if media.kind == "histogram":
            return self._trackio.Histogram(np_histogram=media.value)
        picture = media.value
        if picture.ndim == 2:
            picture = picture[..., None].repeat(3, axis=2)
        return self._trackio.Image(picture)
