"""Writes metrics, hyperparameters and media to Weights & Biases."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pulsetrain.engine import ConfigurationError, Every, OnError
from pulsetrain.engine.errors import unknown_name
from pulsetrain.engine.logs import get_logger
from pulsetrain.engine.optional import load_optional
from pulsetrain.handlers.loggers.base import Plain
from pulsetrain.handlers.loggers.service import Deliver, End, Entry, Media, Metrics, ServiceLogger, check_text
from pulsetrain.handlers.run_files.run_folder import local_folder, make_folder

__all__ = ["WandbLogger"]


class WandbLogger(ServiceLogger):
    """Logs to a run of Weights & Biases, online or into FOLDER/wandb: all values by "iteration".

    Texts become HTML, figures and matrices become images. A run that resumes from a checkpoint continues the same run,
    which keeps the values logged after the checkpoint in addition to those that are logged again. A process of wandb
    uploads the values, and keeps those that it cannot upload in FOLDER/wandb for `wandb sync`. If a service is down or
    slow, see `ServiceLogger`.

    Args:
        project: its name.
        folder: the run folder.
        mode: "online", or "offline" for no network access; by default WANDB_MODE, otherwise "online".
        run_name: by default the run folder's name.
        every, hyperparameters, room, flush_seconds, clock, on_error: see `ServiceLogger`.

    Raises:
        ConfigurationError: wandb is not installed, or an argument cannot be used.

    >>> logger = WandbLogger("first", "runs/first", mode="offline", every=Every(iterations=50))
    >>> logger.project, str(logger.folder)  # it connects when a run starts
    ('first', 'runs/first')
    """

    def __init__(
        self,
        project: str,
        folder: str | Path,
        mode: Literal["online", "offline"] | None = None,
        run_name: str | None = None,
        every: Every | None = None,
        *,
        hyperparameters: Mapping[str, object] | None = None,
        room: int = 64 * 2**20,
        flush_seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        on_error: OnError = "warn",
    ) -> None:
        super().__init__(every, hyperparameters, room, flush_seconds, clock, on_error)
        check_text("WandbLogger", "project", project, "the project's name")
        if mode not in (None, "online", "offline"):
            raise unknown_name("WandbLogger", "mode", mode, ("online", "offline"))
        self.project = project
        self.folder: Path = local_folder("WandbLogger", folder)
        self.mode = mode
        self.run_name = run_name
        self._wandb = load_optional("WandbLogger", "wandb", "wandb")
        self._log = get_logger("handlers")  # created here, as in `Sender`

    def prepare(self) -> None:
        make_folder("WandbLogger", self.folder)

    def is_refusal(self, error: Exception) -> bool:
        return super().is_refusal(error) or isinstance(error, self._wandb.errors.UsageError)

    def connect(self, key: str, values: Mapping[str, Plain]) -> Deliver:
        settings = self._wandb.Settings(
            silent=True, console="off", disable_git=True, init_timeout=30.0, login_timeout=1.0
        )
        run = self._wandb.init(
            project=self.project,
            dir=str(self.folder),
            mode=self.mode,
            name=self.run_name or self.folder.resolve().name,
            id=key,
            resume="allow",
            config=dict(values),
            settings=settings,
            reinit="create_new",  # so that another run of this process is not ended
        )
        if run.disabled:  # there is no key, and none was entered on the terminal
            raise ConfigurationError(
                "WandbLogger: no key of Weights & Biases was found; call `wandb login` once, or pass mode='offline'"
            )
        self._log.info("logging to Weights & Biases", url=None if run.offline else run.url, folder=run.dir)
        run.define_metric("iteration", hidden=True)
        run.define_metric("*", step_metric="iteration")
        return functools.partial(self._deliver, run)

    def _deliver(self, run: Any, entries: Sequence[Entry]) -> int:
        first = entries[0]
        if isinstance(first, Metrics):
            counters = {"iteration": first.iteration, "epoch": first.epoch, "time": first.time_ns / 1e9}
            run.log({**first.values, **counters})
        elif isinstance(first, Media):
            run.log({first.name: self._of(first), "iteration": first.iteration})
        elif isinstance(first, End):
            run.finish(exit_code=1 if first.status == "failed" else 0)
        return 1

    def _of(self, media: Media) -> object:
        if media.kind == "text":
            text = media.value.replace("&", "&amp;").replace("<", "&lt;")
            return self._wandb.Html(f"<pre>{text}</pre>")
        if media.kind == "histogram":
            return self._wandb.Histogram(np_histogram=media.value)
        return self._wandb.Image(media.value)
