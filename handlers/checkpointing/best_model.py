"""Keeps the weights of the best validation or rollout."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from pulsetrain.engine import LAST, ConfigurationError, Engine, Event, Events, Phase
from pulsetrain.engine.checkpoint.disk import Disk, sync
from pulsetrain.engine.checkpoint.snapshot import Snapshot
from pulsetrain.engine.checkpoint.weights import compare_weights
from pulsetrain.engine.distributed.joining import busy
from pulsetrain.engine.distributed.ranks import ranks
from pulsetrain.engine.logs import get_logger
from pulsetrain.engine.metrics import Mode
from pulsetrain.engine.training_run import model_of, validation_contexts
from pulsetrain.handlers.attachment.attachment import Handler
from pulsetrain.handlers.attachment.engine_queries import handlers_of, reject_replay
from pulsetrain.handlers.metric_values.best_value import (
    check_judged,
    decide_mode,
    is_better,
    judged_name,
    subscribe_judge,
)
from pulsetrain.handlers.run_files.ownership import FolderUse
from pulsetrain.handlers.run_files.run_folder import local_folder, make_folder

__all__ = ["BestModel"]


class BestModel(Handler):
    """Copies the weights to the host after each validation or rollout that was better than all before; NaN never is.

    It keeps the weights that were validated: with EMA, SWA or a schedule-free optimizer, the average.
    For a rollout, these are the model's own weights, with which the policy acted. An improvement costs one wait for the
    device, and two copies are in memory while the weights are copied.

    With `restore`, the model holds the best weights once the run has COMPLETED, even if it ended early. They are
    restored after the last validation and the last checkpoint, so checkpoints hold the weights that training reached.
    If the run continues in this process, it continues with those. A run that fails, or ends without COMPLETED, keeps
    its last weights. An EMA that is still attached validates its own average afterwards; detach it to validate the
    best weights.

    A checkpoint also holds the kept copy, and grows by its size.

    Args:
        metric: its name in VALIDATION_COMPLETED, such as "val/loss" (or "val_loss"), or in ROLLOUT_COMPLETED or
            POLICY_UPDATED, such as "rollout/return": rollouts without it are passed over.
        mode: whether smaller ("min") or larger ("max") is better; by default as the metric or its name says.
        folder: write FOLDER/best_model.pt at each improvement, for `torch.load(..., weights_only=True)`.
        restore: leave the best weights in the model at the end.

    Raises:
        ConfigurationError: not a metric's name, or an unknown mode.

    >>> from pulsetrain.engine.events.payloads import ValidationCompleted
    >>> engine, losses = Engine(lambda engine, batch: engine.model.weight.data.fill_(batch)), iter([0.3, 0.1, 0.2])
    >>> engine.model = nn.Linear(1, 1)
    >>> best = BestModel().attach(engine)
    >>> @engine.on(Events.EPOCH_COMPLETED)
    ... def validate(engine):
    ...     metrics = {"val/loss": next(losses)}
    ...     engine.fire(Events.VALIDATION_COMPLETED, ValidationCompleted(metrics=metrics, seconds=0.0))
    >>> _ = engine.run([1.0], max_epochs=3)
    >>> best.best_iteration, best.best_value
    (2, 0.1)
    """

    folder: Path | None

    def __init__(
        self,
        metric: str = "val/loss",
        mode: Mode | None = None,
        folder: str | os.PathLike[str] | None = None,
        restore: bool = True,
    ) -> None:
        check_judged("BestModel", metric, mode)
        self.metric = metric
        self.mode: Mode | None = mode
        self.folder = None if folder is None else local_folder("BestModel", folder)
        self.restore = restore
        self.best_value: float | None = None
        self.best_iteration: int | None = None
        self._weights: Mapping[str, object] | None = None  # on the host
        self._is_unwritten = False  # whether the last attempt to write them failed
        self._last: Mapping[str, object] | None = None  # that training reached; the model holds the best

    def attach(self, engine: Engine) -> Self:
        """Judge each validation or rollout of the engine, in phase PERSIST.

        Raises:
            RecordingError: the engine is a replay.
            ConfigurationError: it has no torch model; the trainer never validates; or another BestModel restores.
            MetricNotFoundError: the trainer has validation sets, and the metric is named after none of them.
            RunFolderError: the folder cannot be written.
        """
        with self._attachment.to(engine, whole_bus=False) as subscribe:
            reject_replay("BestModel", engine, "weights of its validations")
            if model_of(engine) is None:
                raise ConfigurationError(f"BestModel: {engine.name!r} has no torch model; set engine.model")
            subscribe_judge(subscribe, self._judge, "BestModel", self.metric, engine, Phase.PERSIST)
            decide_mode("BestModel", self, engine)
            if self.restore and any(other.restore for other in handlers_of(engine, Events.COMPLETED, BestModel)):
                rule = "another BestModel restores its weights at the end; pass restore=False to one of the two"
                raise ConfigurationError(rule, "BestModel", restore=True, metric=self.metric)
            if (folder := self.folder) is not None:
                make_folder("BestModel", folder)
                FolderUse("BestModel", subscribe, lambda: folder)
            subscribe(Events.STARTED, self._on_started, phase=Phase.COMPUTE)
            subscribe(Events.CHECKPOINT_LOADED, self._on_loaded, phase=Phase.PERSIST)
            # LAST: checkpoints of the end hold the weights that training reached
            subscribe(Events.COMPLETED, self._on_completed, phase=Phase.PERSIST, order=LAST)
        return self

    def detach(self) -> None:
        """Stop judging; the kept weights stay."""
        self._attachment.cancel()
        self._last = None

    def load_into(self, model: nn.Module) -> None:
        """Load the best weights into a model of the same kind.

        Raises:
            ConfigurationError: they do not fit it; the message lists what is missing, unexpected or misshapen.
            RuntimeError: none have been kept yet.
        """
        if self._weights is None:
            raise RuntimeError("BestModel.load_into(): no weights have been kept yet; validate first")
        problems = compare_weights(model.state_dict(), self._weights)
        if problems:
            raise ConfigurationError(
                f"BestModel.load_into({type(model).__name__}): the kept weights do not fit the model: {problems}; "
                "use a model of the same kind"
            )
        model.load_state_dict(self._weights)

    def state_dict(self) -> dict[str, object]:
        """The best value, its iteration and its weights."""
        return {"best_value": self.best_value, "best_iteration": self.best_iteration, "weights": self._weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the best value, its iteration and its weights; the model is unchanged."""
        self.best_value, self.best_iteration = state["best_value"], state["best_iteration"]
        self._weights = state["weights"]  # never changed in place: an improvement is a new copy

    def _judge(self, engine: Any, event: Event) -> None:
        name = judged_name("BestModel", self.metric, engine, event)
        if name is None:
            return
        value = float(event.payload.metrics[name])
        if not is_better(value, self.best_value, decide_mode("BestModel", self)):
            self._write_again()
            return
        validated = event.type == Events.VALIDATION_COMPLETED.value
        with ExitStack() as stack:
            for context in (validation_contexts(engine) or ()) if validated else ():
                stack.enter_context(context())  # the weights that were validated
            self._weights = _copy_of(_model(engine))
        self.best_value, self.best_iteration = value, engine.state.iteration
        self._write()

    def _on_completed(self, engine: Engine) -> None:
        if self._weights is None:
            if engine.state.iteration > 0:
                get_logger("handlers").warning(
                    "BestModel has kept nothing: no validation or rollout gave a number that could be the best",
                    engine=engine.name,
                    metric=self.metric,
                )
            return
        self._write_again()
        if self.restore:
            self._last = _copy_of(_model(engine))
            self.load_into(_model(engine))

    def _on_started(self, engine: Engine) -> None:
        """A run that continues in this process gets its last weights back, unless the model was changed since."""
        last, self._last = self._last, None
        if last is not None and engine.state.iteration > 0 and _holds(_model(engine), self._weights or {}):
            _model(engine).load_state_dict(last)

    def _on_loaded(self) -> None:
        self._last = None  # the model holds the checkpoint's weights
        self._write()  # the file may be of a validation after the checkpoint

    def _write_again(self) -> None:
        if self._is_unwritten:
            self._write()

    def _write(self) -> None:
        if self.folder is None or self._weights is None or not ranks().is_main:
            return
        path = self.folder / "best_model.pt"

        def write(partial: Path) -> None:
            torch.save(self._weights, partial)
            sync(partial)

        try:
            with busy():
                Disk().replace_by(path, write)
        except (OSError, RuntimeError) as error:  # torch raises a RuntimeError on a full disk
            # costs this file, not the run
            if not self._is_unwritten:
                get_logger("handlers").warning(
                    "best weights not written; they are kept in memory, and written again after the next validation "
                    "and at the end of the run",
                    path=str(path),
                    error=str(error),
                )
            self._is_unwritten = True
        else:
            self._is_unwritten = False


def _model(engine: Engine) -> nn.Module:
    model = model_of(engine)
    assert model is not None, "attach() has checked it"
    return model


def _copy_of(model: nn.Module) -> Mapping[str, object]:
    """The model's state on the host; copies from a device run concurrently, with one wait for all."""
    copy: Mapping[str, object] = Snapshot().copy({"model": model.state_dict()})["model"]
    return copy


def _holds(model: nn.Module, weights: Mapping[str, object]) -> bool:
    mine = model.state_dict()
    return mine.keys() == weights.keys() and all(
        torch.equal(mine[name].to("cpu"), value) for name, value in weights.items() if isinstance(value, Tensor)
    )
