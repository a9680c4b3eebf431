"""One trial of a sweep: its configuration, its process, and what its run has recorded."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from multiprocessing import connection, parent_process
from pathlib import Path
from typing import Any

from pulsetrain.configuration.messages import as_yaml, unknown
from pulsetrain.configuration.parse import read_config
from pulsetrain.configuration.resolve import resolve
from pulsetrain.configuration.resumable import check_resumable
from pulsetrain.configuration.yaml_text import yaml_word
from pulsetrain.engine.errors import ConfigurationError, RecordingError
from pulsetrain.engine.file_lock import lock
from pulsetrain.engine.metrics import canonical
from pulsetrain.engine.recording import EventLog
from pulsetrain.engine.recording.log.files import NamedPath
from pulsetrain.engine.recording.log.run_file import read_run_file
from pulsetrain.engine.recording.replay.playback import Stop
from pulsetrain.handlers.metric_values.step_values import METRIC_EVENTS
from pulsetrain.runs.archive import unpacked
from pulsetrain.runs.command_end import error_in
from pulsetrain.sweep.spec import Range, Spec

__all__ = [
    "Job",
    "Outcome",
    "check_metrics",
    "check_settings",
    "error_of",
    "handlers_of",
    "name_of",
    "outcome_of",
    "replayed_run",
    "run_job",
    "settings_of",
    "trial_folder",
]

HANDLER = "pulsetrain.sweep.reporting.SweepTrial"
_HANDLERS = "handlers."


@dataclass(frozen=True)
class Job:
    """What the process of a trial does."""

    folder: Path  # the run folder
    fork: tuple[str, ...]  # the words of `pulsetrain fork`, for a member of a population
    train: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """What a run has recorded."""

    values: tuple[float, ...]  # of each metric
    reason: str  # why it was ended early; else ""
    iteration: int  # the last one


def trial_folder(spec: Spec, number: int) -> Path:
    """The run folder of a trial."""
    return Path(spec.folder) / "trials" / f"{number:04d}"


def settings_of(
    spec: Spec, params: Mapping[str, Any], number: int | None = None, until: int | None = None
) -> dict[str, str]:
    """The settings of a trial as YAML texts by their dotted names.

    A name such as handlers.EarlyStopping.patience sets an argument of a handler that the configuration lists.

    Args:
        spec: the sweep.
        params: the values.
        number: of the trial, where the handler that reports to the sweep is added.
        until: the iteration at which the trial ends.

    Raises:
        ConfigurationError: the configuration lists no such handler, or several.
    """
    base = spec.base or {}
    settings = {name: yaml_word(value) for name, value in params.items() if not name.startswith(_HANDLERS)}
    if (base.get("training") or {}).get("seed") is None:
        # the best of a replayed sweep trains as the first of its runs did
        seed = read_run_file(Path(replayed_run(spec.replay[0]))).get("seed", spec.seed) if spec.replay else spec.seed
        settings.setdefault("training.seed", str(seed))
    handlers = handlers_of(spec, params)
    if number is not None and (spec.pruner != "none" or until is not None):
        arguments = {"sweep": str(Path(spec.folder).resolve()), "trial": number, "until": until}
        handlers.append({"class_path": HANDLER, "init_args": arguments})
    if handlers != list(base.get("handlers") or ()):
        settings["handlers"] = yaml_word(handlers)
    return settings


def replayed_run(name: str) -> os.PathLike[str]:
    """The folder of a run to be replayed, which `str` calls by its name in the sweep; an archive is unpacked, once.

    Raises:
        RunFolderError: it is a file, and not an archive, or a damaged one.
    """
    path = Path(name)
    return NamedPath(_unpacked(path.resolve()), name) if path.is_file() else path


_unpacked = cache(unpacked)


def handlers_of(spec: Spec, params: Mapping[str, Any]) -> list[Any]:
    """The handlers of the configuration, with the values that are arguments of theirs.

    Raises:
        ConfigurationError: the configuration lists no such handler, or several.
    """
    handlers: list[Any] = deepcopy(list((spec.base or {}).get("handlers") or ()))
    for name, value in params.items():
        if name.startswith(_HANDLERS):
            _set_argument(handlers, name, value)
    return handlers


def _set_argument(handlers: list[Any], name: str, value: object) -> None:
    wanted, _, argument = name.removeprefix(_HANDLERS).partition(".")
    names = [name_of(each) for each in handlers]
    if not argument or wanted not in names:
        raise unknown(f"space.{name}", "handler of the configuration", wanted, names)
    if names.count(wanted) > 1:
        raise ConfigurationError(
            f"space.{name}: the configuration lists {names.count(wanted)} handlers {wanted}, which this name does not "
            "tell apart; list one of them, or make one a subclass with another name"
        )
    index = names.index(wanted)
    if isinstance(handlers[index], str):
        handlers[index] = {"class_path": handlers[index]}
    handlers[index].setdefault("init_args", {})[argument] = value


def name_of(handler: Any) -> str:
    """The name of a handler's class, of its entry in a configuration."""
    path = handler.get("class_path") if isinstance(handler, dict) else handler
    return str(path).rpartition(".")[2]


def check_settings(spec: Spec, *, imports: bool = True) -> None:
    """Try the values of each setting against the configuration; no model is made and no data is read.

    Args:
        spec: the sweep.
        imports: whether this machine has the code that the configuration names; else its settings are not tried.

    Raises:
        ConfigurationError: the configuration does not know a setting or takes no such value, the trials would write
            into one folder or could not resume, or the run records no events, from which the results are read.
    """
    base = spec.base or {}
    if "EventRecorder" not in [name_of(each) for each in base.get("handlers") or ()]:
        raise ConfigurationError(
            f"{spec.config}: handlers: a sweep reads results from the event log; add EventRecorder"
        )
    if not spec.replay:
        _check_folders(spec)
    for name, value in _tried(spec) if imports else ():
        try:
            resolve(Path(spec.config), settings_of(spec, {name: value}))
        except ConfigurationError as error:
            text = str(error).removeprefix(f"space.{name}: ")
            raise error.with_text(f"space.{name}: {text}") from error
    if not spec.replay:
        added = [{name: value} for name, value in _tried(spec) if name == "training.save_every_n_epochs"]
        for params in added or [{}]:
            path = Path(spec.config)
            check_resumable(read_config(path, settings_of(spec, params)), path, imports=imports)


def _tried(spec: Spec) -> Iterator[tuple[str, Any]]:
    """Each setting with each of its values, of a range with both ends."""
    for name, values in spec.space.items():
        for value in (values.low, values.high) if isinstance(values, Range) else values:
            yield name, value


def _check_folders(spec: Spec) -> None:
    """Refuse a folder that the trials would share: each would resume the checkpoints of the one before."""
    base = spec.base or {}
    given = {f"{spec.config}: training.run_dir": (base.get("training") or {}).get("run_dir")}
    for index, each in enumerate(base.get("handlers") or ()):
        arguments = each.get("init_args") if isinstance(each, dict) else None
        if isinstance(arguments, dict):
            given[f"{spec.config}: handlers[{index}].init_args.folder"] = arguments.get("folder")
    for name, values in spec.space.items():
        if name == "training.run_dir" or (name.startswith(_HANDLERS) and name.endswith(".folder")):
            given[f"space.{name}"] = values
    for location, value in given.items():
        if value is not None:
            raise ConfigurationError(
                f"{location}={as_yaml(value)}: the trials of a sweep would share this folder and its checkpoints; "
                "leave it out, and each trial writes into its own run folder"
            )


def run_job(job: Job, main: Callable[[Sequence[str]], int]) -> None:
    """Fork and train, in a process of its own; leaves it with the status of the command.

    What the command prints goes into the file beside the run folder. If the process that has started this one ends,
    the run stops at its next safe point, with a checkpoint.

    Args:
        job: what to do.
        main: the command line.
    """
    job.folder.parent.mkdir(parents=True, exist_ok=True)
    output = os.open(job.folder.with_suffix(".txt"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(output, stream)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(stream), "w", buffering=1) for stream in (1, 2))
    owner = os.open(job.folder.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    lock(owner, wait=True)  # until an earlier process of this trial, whose sweep was killed, has ended
    status = 0
    if job.fork and "parent" not in read_run_file(job.folder):
        shutil.rmtree(job.folder, ignore_errors=True)  # what a killed process has left of the fork
        status = main(list(job.fork))
    if status == 0:
        status = main(list(job.train))
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(status)


def _stop_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)


def outcome_of(spec: Spec, folder: os.PathLike[str], stop: Stop | None = None, *, upto: int | None = None) -> Outcome:
    """Read what a run has recorded.

    Args:
        spec: the sweep.
        folder: of the run.
        stop: where a replayed handler would have ended the run; by default it is read to its end.
        upto: the last iteration that is read, where no handler would have ended it before.

    Raises:
        MetricNotFoundError: no validation has reported the metric; the message lists those that it had.
        RecordingError: there is no log.
    """
    found: dict[str, list[float]] = {name: [] for name in spec.metric}
    seen: dict[str, object] = {}
    upto = upto if stop is None else stop.iteration
    reason, iteration = "", upto or 0
    names = {"terminate", "completed", *(each.value for each in METRIC_EVENTS)}
    for event in EventLog(folder).read(event=names, iteration=(None, upto)):
        if stop is not None and stop.event not in names and event.seq > stop.seq:
            break  # a run that ends in an iteration is not validated after it; other sets are, after a validation
        iteration = max(iteration, event.iteration)
        payload = event.payload if isinstance(event.payload, dict) else {}
        reason = str(payload.get("reason") or reason) if event.event == "terminate" else reason
        metrics = payload.get("metrics")
        if not isinstance(metrics, dict):
            continue
        seen |= metrics
        for name, values in found.items():
            key = _key_of(name, metrics)
            if key is not None:
                values.append(float(metrics[key]))  # the texts NaN and Infinity, too
    for name, values in found.items():
        if not values:
            canonical(name, seen, place="metric")
    chosen = [_chosen(values, mode, spec.value) for values, mode in zip(found.values(), spec.mode, strict=True)]
    return Outcome(tuple(chosen), reason, iteration)


def check_metrics(spec: Spec, folder: Path) -> bool:
    """Whether a run that still trains has reported every metric; False while that is not known.

    A run lacks a metric if it has validated twice and reported others of the same set, such as "val", each time.

    Raises:
        MetricNotFoundError: it lacks one; the message lists those that it has.
    """
    found: list[Mapping[str, object]] = []
    with suppress(RecordingError):  # not begun yet
        for event in EventLog(folder).read(event={each.value for each in METRIC_EVENTS}):
            if isinstance(event.payload, dict) and isinstance(event.payload.get("metrics"), dict):
                found.append(event.payload["metrics"])
    missing = [name for name in spec.metric if all(_key_of(name, metrics) is None for metrics in found)]
    for name in missing:
        beside = [each for each in found if any(_set_of(key) == _set_of(name) for key in each)]
        if len(beside) > 1:
            canonical(name, {key: value for metrics in found for key, value in metrics.items()}, place="metric")
    return not missing


def _key_of(name: str, metrics: Mapping[str, object]) -> str | None:
    return next((each for each in metrics if each.replace("/", "_") == name.replace("/", "_")), None)


def _set_of(name: str) -> str:
    return name.replace("_", "/").partition("/")[0]


def _chosen(values: Sequence[float], mode: str, which: str) -> float:
    if which == "last":
        return values[-1]
    numbers = [each for each in values if each == each]  # without NaN
    if not numbers:
        return values[-1]
    return min(numbers) if mode == "min" else max(numbers)


def error_of(folder: Path) -> str:
    """The error that the command of a trial has printed last; else what is there instead."""
    try:
        return error_in(folder.with_suffix(".txt").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return error_in("")
