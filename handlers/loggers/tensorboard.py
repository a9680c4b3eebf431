"""Writes metrics and media for TensorBoard."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pulsetrain.engine import Engine, Events, Every, MediaLogged, OnError
from pulsetrain.engine.optional import load_optional
from pulsetrain.handlers.loggers.base import MetricLogger, Plain, Status
from pulsetrain.handlers.loggers.pictures import histogram_of, picture_of
from pulsetrain.handlers.run_files.ownership import FolderUse
from pulsetrain.handlers.run_files.run_folder import local_folder, make_folder

__all__ = ["TensorBoardLogger"]


class TensorBoardLogger(MetricLogger):
    """Writes FOLDER/tensorboard: scalars, texts, images and histograms by iteration, and the hyperparameters.

    Figures and matrices become images. Values reach the disk within `flush_seconds`, and when the run ends. A run
    that resumes from a checkpoint, or returns to one, hides the values written for later iterations.

    Args:
        folder: the run folder.
        every: read `state.output` at this cadence instead of METRICS_LOGGED; each reading waits for the device.
        hyperparameters: further ones in addition to the fields of `engine.config`, by name.
        flush_seconds: time between two writes to the disk.
        clock: seconds, for `Every(seconds=...)`.
        on_error: "warn" logs one warning when writing fails, and the run continues; "raise" ends the run.

    Raises:
        ConfigurationError: tensorboard is not installed.

    >>> logger = TensorBoardLogger("runs/first", Every(iterations=50), hyperparameters={"width": 64})
    >>> str(logger.path)
    'runs/first/tensorboard'
    """

    def __init__(
        self,
        folder: str | Path,
        every: Every | None = None,
        *,
        hyperparameters: Mapping[str, object] | None = None,
        flush_seconds: int = 30,
        clock: Callable[[], float] = time.monotonic,
        on_error: OnError = "warn",
    ) -> None:
        super().__init__(every, hyperparameters=hyperparameters, clock=clock, on_error=on_error)
        self.folder: Path = local_folder("TensorBoardLogger", folder)
        self.path: Path = self.folder / "tensorboard"
        self.flush_seconds = flush_seconds
        self._module = load_optional(self._place, "torch.utils.tensorboard", "tensorboard")
        self._writer: Any = None

    @property
    def destination(self) -> Path:
        return self.path.resolve()

    def prepare(self) -> None:
        make_folder(self._place, self.folder)
        FolderUse(self._place, self._attachment, lambda: self.folder)

    def open(self, engine: Engine) -> None:
        iteration = engine.state.iteration
        self._writer = self._module.SummaryWriter(
            str(self.path), purge_step=iteration + 1 if iteration else 0, flush_secs=self.flush_seconds
        )

    def _subscribe(self) -> None:
        super()._subscribe()
        self._observe(Events.CHECKPOINT_LOADED, self._on_loaded)

    def _on_loaded(self, engine: Engine) -> None:
        if self._writer is not None:  # the run returns to the checkpoint; only a new file hides what it discards
            self._writer.close()
            self.open(engine)

    def close(self, status: Status) -> None:
        self._writer.close()
        self._writer = None

    def log_hyperparameters(self, values: Mapping[str, Plain]) -> None:
        shown = {name: "None" if value is None else value for name, value in values.items()}
        if shown:
            self._writer.add_hparams(shown, {}, run_name=".")

    def log_metrics(self, engine: Engine, metrics: Mapping[str, float]) -> None:
        step, seconds = engine.state.iteration, self.event.time_ns / 1e9
        for name, value in metrics.items():
            self._writer.add_scalar(self.full_name(engine, name), value, step, walltime=seconds)
        self._writer.add_scalar(self.full_name(engine, "epoch"), engine.state.epoch, step, walltime=seconds)

    def log_media(self, engine: Engine, media: MediaLogged) -> None:
        step = {"global_step": engine.state.iteration, "walltime": self.event.time_ns / 1e9}
        name = self.full_name(engine, media.name)
        if media.kind == "text":
            self._writer.add_text(name, media.value, **step)
        elif media.kind == "histogram":
            counts, edges = histogram_of(media)
            centres = (edges[:-1] + edges[1:]) / 2
            self._writer.add_histogram_raw(
                name,
                min=edges[0],
                max=edges[-1],
                num=counts.sum(),
                sum=(counts * centres).sum(),
                sum_squares=(counts * centres**2).sum(),
                bucket_limits=edges,  # the right end of each
                bucket_counts=np.concatenate([[0.0], counts]),
                **step,
            )
        else:
            picture = picture_of(media)
            self._writer.add_image(name, picture, dataformats="HWC" if picture.ndim == 3 else "HW", **step)
