"""Writes one crash bundle, part by part: a part that cannot be read any more is listed as missing."""

from __future__ import annotations

import json
import os
import shutil
import time
import traceback
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from pulsetrain.engine.events.engine import Engine
from pulsetrain.engine.events.names import Event
from pulsetrain.engine.events.payloads import AnomalyDetected
from pulsetrain.engine.step.protocols import describe
from pulsetrain.engine.training_run import is_training_run, model_of, optimizer_of
from pulsetrain.handlers.crash.crash_files import BATCH, CONFIG, CRASHES, FACTS, TRACEBACK
from pulsetrain.handlers.crash.crash_parts import (
    environment_variables,
    frames,
    is_past,
    plain_batch,
    read_batch_again,
    tensor_table,
)
from pulsetrain.handlers.run_files.run_file import write_run_file
from pulsetrain.handlers.run_files.run_folder import replace_file

__all__ = ["BundleWriter", "Failure"]


@dataclass(frozen=True)
class Failure:
    """An exception or an anomaly of a run."""

    engine: Engine
    event: Event
    error: Exception | None  # None for an anomaly
    at: Engine  # that raised the error: `engine`, or one inside its run
    set_name: str | None  # of the validation set that it was validating

    @property
    def anomaly(self) -> AnomalyDetected | None:
        """The anomaly, if it is one."""
        payload = self.event.payload
        return payload if isinstance(payload, AnomalyDetected) else None


class BundleWriter:
    """Writes the bundle of one failure.

    Args:
        run_folder: the bundle is a folder in its folder for crashes.
        failure: the bundle's subject.
        write_events: called with the bundle's folder and its facts; writes the last events.
    """

    def __init__(
        self, run_folder: Path, failure: Failure, write_events: Callable[[Path, dict[str, object]], None]
    ) -> None:
        self._run_folder, self._failure, self._write_events = run_folder, failure, write_events
        self._crashes = run_folder / CRASHES
        self._into = self._crashes / f".{uuid.uuid4().hex}.tmp"
        self._rows: list[int] | None = None
        self._facts = self._first_facts()

    def write(self) -> Path:
        """Write the bundle; returns its folder, which has its name only once it is complete.

        Raises:
            OSError: the folder cannot be written.
        """
        self._into.mkdir(parents=True)
        try:
            missing: dict[str, str] = {}
            for name, write_part in self._parts():
                try:
                    write_part()
                except Exception as failed:
                    missing[name] = f"{type(failed).__name__}: {failed}".splitlines()[0]
            self._facts["missing"] = missing
            replace_file(self._into / FACTS, json.dumps(self._facts, indent=2).encode())
            return _rename(self._into, self._crashes / f"iteration-{self._failure.engine.state.iteration:09d}")
        except BaseException:
            shutil.rmtree(self._into, ignore_errors=True)
            raise

    def _first_facts(self) -> dict[str, object]:
        failure, error, anomaly = self._failure, self._failure.error, self._failure.anomaly
        what = f"{type(error).__name__}: {error}" if error else ""
        if anomaly is not None:
            what = f"anomaly {anomaly.kind} ({anomaly.value})"
        facts: dict[str, object] = {
            "format": 1, "what": what, "event": failure.event.type, "engine": failure.at.name, "set": failure.set_name,
            "seq": failure.event.seq, "epoch": failure.at.state.epoch, "iteration": failure.at.state.iteration,
            "trained": failure.engine.state.iteration, "at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }  # fmt: skip
        if anomaly is not None and anomaly.at_iteration is not None:
            facts["at_iteration"] = anomaly.at_iteration
        return facts

    def _parts(self) -> Iterator[tuple[str, Callable[[], object]]]:
        """The parts, each to be tried separately; those that read the device come last."""
        failure, engine = self._failure, self._failure.engine
        if failure.error is not None:
            yield "traceback", partial(self._write_traceback, failure.error)
        yield "environment variables", lambda: self._facts.update(variables=environment_variables())
        yield "rows", self._find_rows
        yield "config", self._copy_config
        yield "run", lambda: write_run_file(self._into, engine)
        past = failure.anomaly is not None and is_past(engine, failure.anomaly)
        if past or getattr(failure.at.state, "batch", None) is not None:
            yield "batch", partial(self._write_batch, past)
        yield "events", lambda: self._write_events(self._into, self._facts)
        tables = {"weights": _weights, "gradients": _gradients, "optimizer": _optimizer_state}
        for name, tensors in tables.items():
            yield name, partial(self._put_table, name, tensors)

    def _write_traceback(self, error: Exception) -> None:
        (self._into / TRACEBACK).write_text("".join(traceback.format_exception(error)), encoding="utf-8")
        self._facts["frames"] = frames(error)

    def _find_rows(self) -> None:
        self._facts["rows"] = self._rows = _rows(self._failure)

    def _copy_config(self) -> None:
        if (self._run_folder / CONFIG).exists():
            shutil.copyfile(self._run_folder / CONFIG, self._into / CONFIG)

    def _write_batch(self, past: bool) -> None:
        failure = self._failure
        iteration = failure.anomaly.at_iteration if failure.anomaly is not None else None
        batch = read_batch_again(failure.engine, self._rows, iteration) if past else failure.at.state.batch
        self._facts["batch"] = describe(batch, ranges=True)
        torch.save(plain_batch(batch), self._into / BATCH)
        self._facts["fetched_again"] = past

    def _put_table(self, name: str, tensors: Callable[[Engine], Iterable[tuple[str, object]]]) -> None:
        self._facts[name] = tensor_table(tensors(self._failure.engine))


def _rename(unnamed: Path, path: Path) -> Path:
    """Give the folder its name, or with a number after it where the name is taken: another process may fail there."""
    number, target = 2, path
    while True:
        try:
            os.rename(unnamed, target)
            return target
        except OSError:
            if not target.exists():
                raise
        number, target = number + 1, path.with_name(f"{path.name}-{number}")


def _rows(failure: Failure) -> list[int] | None:
    """The dataset's indices: those that an anomaly names, else those of the batch, or of the one being fetched."""
    engine = failure.engine
    named = failure.anomaly.batch_indices if failure.anomaly is not None else None
    if named is not None or not is_training_run(engine) or failure.at is not engine:
        return list(named) if named else None
    fetching = engine.state.batch is None
    if fetching and (failure.error is None or not _in_loader(failure.error)):
        return None
    rows = engine.data.rows(engine.state.iteration + fetching)
    return None if rows is None else [int(row) for row in rows]


def _in_loader(error: BaseException) -> bool:
    """Whether the loader raised it when it was asked for a batch, and not a handler that ran between two batches."""
    names = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
    if "_epoch" not in names:
        return False
    inside = names[len(names) - names[::-1].index("_epoch") :]
    return inside[:1] not in (["fire"], ["_signal"])


def _named_parameters(engine: Engine) -> Iterable[tuple[str, Tensor]]:
    model = model_of(engine)
    return () if model is None else model.named_parameters()


def _weights(engine: Engine) -> Iterator[tuple[str, Tensor]]:
    yield from _named_parameters(engine)
    model = model_of(engine)
    yield from () if model is None else model.named_buffers()


def _gradients(engine: Engine) -> Iterator[tuple[str, Tensor]]:
    for name, weight in _named_parameters(engine):
        if weight.grad is not None:
            yield name, weight.grad


def _optimizer_state(engine: Engine) -> Iterator[tuple[str, object]]:
    optimizer = optimizer_of(engine)
    states = {} if optimizer is None else optimizer.state
    for name, weight in _named_parameters(engine):
        for key, value in states.get(weight, {}).items():
            yield f"{name}/{key}", value
