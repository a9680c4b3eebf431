"""Keeps what a failure needs to be understood: the batch, the last events, the traceback, the state of the weights."""

from __future__ import annotations

import json
import os
import shutil
import time
import traceback
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch

from pulsetrain.engine.errors import ConfigurationError, PulsetrainError, RecordingError, unknown_name
from pulsetrain.engine.events.bus import EventBus
from pulsetrain.engine.events.engine import Engine
from pulsetrain.engine.events.names import Event, Events
from pulsetrain.engine.events.subscription import Phase
from pulsetrain.engine.logs import get_logger
from pulsetrain.engine.recording.replay.engine import ReplayedEngine
from pulsetrain.engine.step.protocols import describe
from pulsetrain.handlers.attachment.attachment import Attachment
from pulsetrain.handlers.crash.crash_files import BATCH, CONFIG, CRASHES, EVENTS, FACTS, NOTE, TRACEBACK, read_bundle
from pulsetrain.handlers.crash.crash_parts import (
    Heard,
    batch_again,
    environment_variables,
    frames,
    is_past,
    plain_batch,
    recorded_tail,
    tensor_table,
    write_events,
)
from pulsetrain.handlers.metric_values.step_values import scalars
from pulsetrain.handlers.recorder.event_recorder import FREQUENT, EventRecorder
from pulsetrain.handlers.run_files.run_file import write_run_file
from pulsetrain.handlers.run_files.run_folder import make_folder, replace_file

__all__ = ["CrashBundle", "read_bundle"]

HEARD = (Events.EXCEPTION_RAISED, Events.ANOMALY_DETECTED)
_NOT_KEPT = (*FREQUENT, Events.METRICS_LOGGED, Events.MEDIA_LOGGED)  # nobody is to read or draw for a bundle alone
_ITERATED = Events.ITERATION_COMPLETED.value


class CrashBundle:
    """Writes FOLDER/crash/iteration-NUMBER when the run raises: `read_bundle` or `pulsetrain debug` opens it.

    In it are the traceback with what is known of the local variables, the batch that it happened with (loadable with
    weights_only), its rows of the dataset, the last events as a log, norms and NaN counts of weights, gradients and the
    optimizer's state, versions and settings. Of the environment's variables it holds a few by name, of texts among
    local variables none.

    It never raises, and changes nothing of the exception but that a note names the bundle. What cannot be read any
    more, such as tensors on a device that has failed, is listed in the bundle as missing. PulsetrainErrors, which say
    what is to be mended, leave none; nor do Ctrl-C and exits.

    With an EventRecorder among the trainer's handlers the events are its log's last ones; else they are kept here,
    without those that each iteration fires beside ITERATION_COMPLETED, METRICS_LOGGED and MEDIA_LOGGED.

    Args:
        folder: the run folder.
        events: how many of the last ones.
        faults: what is written for: "exception_raised", "anomaly_detected", or the events themselves.
        at_most: bundles that a process writes; anomalies may come at each step.

    Raises:
        ConfigurationError: a number below 1, or another event.
    """

    def __init__(
        self,
        folder: str | Path,
        events: int = 1000,
        faults: Sequence[str | Events] = ("exception_raised",),
        *,
        at_most: int = 10,
    ) -> None:
        for name, number in (("events", events), ("at_most", at_most)):
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise ConfigurationError(f"CrashBundle({name}={number!r}): needs a whole number of at least 1")
        if isinstance(faults, str) or not faults:
            raise ConfigurationError(
                f"CrashBundle(faults={faults!r}): needs a list of events, such as ['exception_raised']"
            )
        known = {event.value: event for event in HEARD}
        for each in faults:
            if each not in known and each not in HEARD:
                raise unknown_name("CrashBundle", "faults", each, known)
        self.folder = Path(folder)
        self.events, self.faults, self.at_most = events, tuple(faults), at_most
        self.bundles: list[Path] = []  # written by this process
        self._heard: deque[Heard] = deque(maxlen=events)
        self._recorder: EventRecorder | None = None
        self._inner: tuple[Engine, str | None, int] | None = None  # that has raised inside the run: set, error's id
        self._engine: weakref.ref[Engine] | None = None
        self._attachment = Attachment("CrashBundle")

    def attach(self, engine: Engine) -> Self:
        """Wait for the engine, or one inside its run such as the evaluator, to fail.

        Where the folder cannot be written, that is said, and the run goes on without it.

        Raises:
            RecordingError: it is a replay, where there is no process to look into.
        """
        bus: Any = engine if isinstance(engine, EventBus) else getattr(engine, "bus", engine)
        with self._attachment.to(bus, whole_bus=bus is not engine, needed=False) as subscribe:
            if isinstance(engine, ReplayedEngine):
                raise RecordingError(
                    f"CrashBundle.attach({engine.name!r}): an event log does not hold the batch and the weights of the "
                    "process that failed; attach it to the trainer itself"
                )
            make_folder("CrashBundle", self.folder)
            self._engine = weakref.ref(engine)
            recorders = [each for each in getattr(engine, "handlers", ()) if isinstance(each, EventRecorder)]
            self._recorder = recorders[0] if recorders else None
            if self._recorder is None:
                for event in Events:
                    if event not in _NOT_KEPT:
                        subscribe(event, self._keep, on_error="warn")
            wanted = [event for event in HEARD if event in self.faults or event.value in self.faults]
            for event in wanted:
                subscribe(event, self._on_fault, phase=Phase.PERSIST, on_error="warn")
        return self

    def detach(self) -> None:
        self._attachment.cancel()
        self._heard.clear()
        self._engine = self._recorder = self._inner = None

    def _keep(self, engine: Engine, event: Event) -> None:
        self._heard.append((event, scalars(engine.state.output) if event.type == _ITERATED else None))

    def _on_fault(self, engine: Engine, event: Event) -> None:
        error = getattr(event.payload, "error", None)
        if error is not None:
            outer = self._engine() if self._engine is not None else None
            if engine is not outer and outer is not None and outer.is_running:  # which raises it, too
                self._inner = engine, getattr(engine, "set_name", None), id(error)
                return
            if not isinstance(error, Exception) or isinstance(error, PulsetrainError):
                return
        if len(self.bundles) >= self.at_most:
            return
        inner, self._inner = self._inner, None
        at, set_name = inner[:2] if inner is not None and inner[2] == id(error) else (engine, None)
        try:
            path = self._write(engine, event, error, at, set_name)
        except Exception as failed:
            get_logger("handlers").warning(
                "the crash bundle could not be written",
                folder=str(self.folder),
                error=f"{type(failed).__name__}: {failed}",
            )
            return
        self.bundles.append(path)
        if error is not None:
            error.add_note(f"{NOTE}{path}")

    def _write(self, engine: Engine, event: Event, error: Exception | None, at: Engine, set_name: str | None) -> Path:
        crashes = self.folder / CRASHES
        crashes.mkdir(parents=True, exist_ok=True)
        unnamed = crashes / f".{uuid.uuid4().hex}.tmp"
        unnamed.mkdir()
        try:
            payload = event.payload
            what = f"{type(error).__name__}: {error}" if error else f"anomaly {payload.kind} ({payload.value})"
            facts: dict[str, Any] = {
                "format": 1, "what": what, "event": event.type, "engine": at.name, "set": set_name, "seq": event.seq,
                "epoch": at.state.epoch, "iteration": at.state.iteration,
                "trained": engine.state.iteration, "at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            }  # fmt: skip
            if getattr(payload, "at_iteration", None) is not None:
                facts["at_iteration"] = payload.at_iteration
            missing: dict[str, str] = {}
            for name, part in self._parts(unnamed, facts, engine, event, at).items():
                try:
                    part()
                except Exception as failed:
                    missing[name] = f"{type(failed).__name__}: {failed}".splitlines()[0]
            facts["missing"] = missing
            replace_file(unnamed / FACTS, json.dumps(facts, indent=2).encode())
            return _put(unnamed, crashes / f"iteration-{engine.state.iteration:09d}")
        except BaseException:
            shutil.rmtree(unnamed, ignore_errors=True)
            raise

    def _parts(
        self, into: Path, facts: dict[str, Any], engine: Engine, event: Event, at: Engine
    ) -> dict[str, Callable[[], object]]:
        """What the bundle is made of, each to be tried by itself; the device is asked last."""
        error: Any = getattr(event.payload, "error", None)
        batch = getattr(at.state, "batch", None)
        past = error is None and is_past(engine, event.payload)

        def write_traceback() -> None:
            (into / TRACEBACK).write_text("".join(traceback.format_exception(error)), encoding="utf-8")
            facts["frames"] = frames(error)

        def write_batch() -> None:
            found = batch_again(engine, facts.get("rows"), event.payload.at_iteration) if past else batch
            facts["batch"] = describe(found, ranges=True)
            torch.save(plain_batch(found), into / BATCH)
            facts["fetched_again"] = past

        def write_config() -> None:
            if (self.folder / CONFIG).exists():
                shutil.copyfile(self.folder / CONFIG, into / CONFIG)

        parts: dict[str, Callable[[], object]] = {
            "environment variables": lambda: facts.update(variables=environment_variables()),
            "rows": lambda: facts.update(rows=_rows(engine, event, at)),
            "config": write_config,
            "run": lambda: write_run_file(into, engine),
        }
        if error is not None:
            parts = {"traceback": write_traceback, **parts}
        if batch is not None or past:
            parts["batch"] = write_batch
        parts["events"] = lambda: self._write_events(into, engine, facts)
        for name, tensors in (("weights", _weights), ("gradients", _gradients), ("optimizer", _optimizer_state)):
            parts[name] = partial(_put_table, facts, name, tensors, engine)
        return parts

    def _write_events(self, into: Path, engine: Engine, facts: dict[str, Any]) -> None:
        if self._recorder is None:
            write_events(into / EVENTS, self._heard)
            return
        self._recorder.flush()
        tail = recorded_tail(self._recorder.folder, engine.bus.sequence.last, self.events)
        told = [each.seq for each in tail if each.event == facts["event"] and each.engine == engine.name]
        facts["seq"] = told[-1] if told else facts["seq"]  # a log that goes on numbers its events anew
        write_events(into / EVENTS, tail)


def _put_table(facts: dict[str, Any], name: str, tensors: Callable[[Any], Any], engine: Engine) -> None:
    facts[name] = tensor_table(tensors(engine))


def _put(unnamed: Path, path: Path) -> Path:
    """Under its name, or where that is taken with a number behind it: another process may fail there, too."""
    number, target = 2, path
    while True:
        try:
            os.rename(unnamed, target)
            return target
        except OSError:
            if not target.exists():
                raise
        number, target = number + 1, path.with_name(f"{path.name}-{number}")


def _rows(engine: Any, event: Event, at: Engine) -> list[int] | None:
    """Of the dataset: those that an anomaly names, else those of the batch, or of the one that was being fetched."""
    named = getattr(event.payload, "batch_indices", None)
    position = getattr(engine, "position", None)
    if named is not None or position is None or at is not engine:
        return list(named) if named else None
    fetching = engine.state.batch is None
    if fetching and not _in_loader(event.payload.error):
        return None
    rows = position.rows(engine.state.iteration + fetching)
    return None if rows is None else [int(row) for row in rows]


def _in_loader(error: BaseException) -> bool:
    """Whether it was raised by asking the loader for a batch, and not by a handler that ran between two."""
    names = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
    if "_epoch" not in names:
        return False
    inside = names[len(names) - names[::-1].index("_epoch") :]
    return inside[:1] not in (["fire"], ["_signal"])


def _weights(engine: Any) -> Iterator[tuple[str, Any]]:
    yield from _named_parameters(engine)
    model = getattr(engine, "model", None)
    yield from model.named_buffers() if isinstance(model, torch.nn.Module) else ()


def _gradients(engine: Any) -> Iterator[tuple[str, Any]]:
    return ((name, weight.grad) for name, weight in _named_parameters(engine) if weight.grad is not None)


def _optimizer_state(engine: Any) -> Iterator[tuple[str, Any]]:
    states = getattr(getattr(engine, "optimizer", None), "state", {})
    for name, weight in _named_parameters(engine):
        for key, value in states.get(weight, {}).items():
            yield f"{name}/{key}", value


def _named_parameters(engine: Any) -> Iterator[tuple[str, Any]]:
    model = getattr(engine, "model", None)
    return iter(model.named_parameters()) if isinstance(model, torch.nn.Module) else iter(())
