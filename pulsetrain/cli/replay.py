"""`pulsetrain replay`: shows what a handler with other settings would have done in recorded runs."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import yaml

from pulsetrain.cli.reports import DAMAGED, OK, USAGE, until_closed
from pulsetrain.configuration.claim import holds_run
from pulsetrain.configuration.instantiate import instantiate
from pulsetrain.configuration.shipped_handlers import HANDLERS, ShippedHandlers
from pulsetrain.configuration.yaml_text import load_yaml, one_line
from pulsetrain.engine import ConfigurationError, Events, MetricNotFoundError, PulsetrainError
from pulsetrain.engine.metrics import canonical
from pulsetrain.engine.plain_text import plain
from pulsetrain.engine.recording import EventLog
from pulsetrain.engine.recording.replay.playback import Replay, Stop
from pulsetrain.handlers import LossSpikeGuard
from pulsetrain.handlers.metric_values.step_values import METRIC_EVENTS

__all__ = ["run", "parse_handler"]

COLUMNS = ("run", "handler", "stops at", "best", "iterations saved")


def run(arguments: argparse.Namespace) -> int:
    """Replay each run through each handler, and print the results."""
    variants = [(text, parse_handler(text)) for text in arguments.handlers]
    for text, spec in variants:
        _keep_apart(text, spec)  # all are checked before the first is played
    logs = [(run, EventLog(run, arguments.rank)) for run in arguments.runs]
    rows = [
        _what_if(run, log, text, _make(text, spec), arguments.engine) for run, log in logs for text, spec in variants
    ]
    with until_closed():
        if arguments.format == "json":
            print("\n".join(json.dumps(row) for row in rows))
        else:
            print(plain(_table(rows), keep="\n"))
    failed = [f"{row['run']}: {row['error']}" for row in rows if row["error"] is not None]
    damaged = [f"{run}: damaged: {damage}" for run, log in logs for damage in log.damage]
    for line in (*(f"error: {each}" for each in failed), *damaged):
        print(f"pulsetrain: {plain(line)}", file=sys.stderr)
    return USAGE if failed else DAMAGED if damaged else OK


def parse_handler(text: str) -> dict[str, Any]:
    """A class path with its arguments, whose values are YAML. A comma inside of a value does not end it.

    Raises:
        ConfigurationError: an argument has no value, or its value is not YAML.

    >>> parse_handler("early_stopping:patience=3,metric=val/loss")
    {'class_path': 'early_stopping', 'init_args': {'patience': 3, 'metric': 'val/loss'}}
    """
    name, _, rest = text.partition(":")
    given: dict[str, object] = {}
    begun = wrong = ""
    for part in rest.split(",") if rest else ():
        begun = f"{begun},{part}" if begun else part
        key, equals, value = begun.partition("=")
        if not equals or not key.strip():
            raise ConfigurationError(
                f"--handler {text}: {part!r} is not ARGUMENT=VALUE, such as patience=3 in early_stopping:patience=3"
            )
        try:
            given[key.strip()], begun = load_yaml(value), ""
        except yaml.YAMLError as error:  # such as "[1" of [1, 2]
            wrong = one_line(error)
        except RecursionError as error:
            raise ConfigurationError(f"--handler {name}: the value of {key.strip()!r} nests too deep") from error
    if begun:
        raise ConfigurationError(f"--handler {text}: {begun!r} has no value in YAML: {wrong}")
    return {"class_path": name, "init_args": given}


class Handler(Protocol):
    """What can be attached to a replayed run."""

    def attach(self, engine: Replay) -> object: ...


def _make(text: str, spec: Mapping[str, object]) -> Handler:
    name = str(spec["class_path"])
    in_words = {**spec, "class_path": name if "." in name else _in_words(name)}
    handler: Handler = instantiate(in_words, f"--handler {text}", _shipped(), settings=f"--handler {name}")
    if not callable(getattr(handler, "attach", None)):
        raise ConfigurationError(f"--handler {text}: {type(handler).__name__} is not a handler: it has no attach()")
    return handler


def _shipped() -> ShippedHandlers:
    """Handlers by the names of their classes in lower case, such as `early_stopping`."""
    return ShippedHandlers({_in_words(name): name for name in HANDLERS})


def _in_words(name: str) -> str:
    """The name of a class in lower case; a name that is in lower case already stays."""
    name = name.replace("NaN", "Nan").replace("MLflow", "Mlflow")
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def _what_if(
    run: os.PathLike[str], log: EventLog, text: str, handler: Handler, engine: str | None
) -> dict[str, object]:
    """One row: what the handler would have done in the run."""
    failed: str | None = None
    try:
        # damage is printed after the table, once for each run
        replay = Replay(log, engine=engine, obey_terminate=True, warn_of_damage=False)
        try:
            _check_metric(log, replay, handler)
            handler.attach(replay)
            replay.run()
        except MetricNotFoundError as error:
            failed = str(error)
        finally:
            getattr(handler, "detach", lambda: None)()
    except PulsetrainError as error:
        raise error.with_text(f"{run}: {error}") from error
    total = replay.last_iteration
    stop: Stop | None = replay.stops[0] if replay.stops and failed is None else None
    return {
        "run": str(run),
        "handler": text,
        "stopped": stop is not None,
        **{name: getattr(stop, name, None) for name in ("epoch", "iteration", "reason")},
        "best": getattr(handler, "best_value", None) if failed is None else None,
        "iterations": total,
        "saved": total - stop.iteration if stop is not None else 0,
        "error": failed,
    }


def _check_metric(log: EventLog, replay: Replay, handler: object) -> None:
    metric = getattr(handler, "metric", None)
    if not isinstance(metric, str) or isinstance(handler, LossSpikeGuard):  # whose metric is a loss of the step
        return
    name, known, has_rollouts = type(handler).__name__, dict[str, object](), False
    for event in log.read(engine=replay.name, event={event.value for event in METRIC_EVENTS}):
        metrics = event.payload.get("metrics") if type(event.payload) is dict else None
        known |= metrics if type(metrics) is dict else {}
        has_rollouts = has_rollouts or event.event != Events.VALIDATION_COMPLETED.value
        if not has_rollouts or _flat(metric) in map(_flat, known):
            return  # the handler itself reports a metric that a validation lacks
    if known:  # one rollout may lack a metric, but not all of them
        canonical(metric, known, place=name)
    raise MetricNotFoundError(
        f"this metric does not exist: no validation of {replay.name!r} is in the log", name, metric=metric
    )


def _flat(name: str) -> str:
    return name.replace("/", "_")


def _keep_apart(text: str, spec: Mapping[str, Any]) -> None:
    """Reject a handler that would write into a run: recorded runs are only read."""
    given = _paths(spec["init_args"].get)
    _refuse_runs(text, given)
    handler = _make(text, spec)  # it may make its folder
    own = _paths(lambda name: getattr(handler, name, None))
    _refuse_runs(text, [path for path in own if not any(path.is_relative_to(folder) for folder in given)])


def _paths(value_of: Callable[[str], object]) -> list[Path]:
    found = [value_of(name) for name in ("folder", "path")]
    return [Path(each).resolve() for each in found if isinstance(each, Path | str) and "://" not in str(each)]


def _refuse_runs(text: str, paths: Sequence[Path]) -> None:
    for folder in (folder for path in paths for folder in (path, *path.parents)):
        if holds_run(folder):
            raise ConfigurationError(f"--handler {text}: would write into the run {folder}; choose another folder")


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines: list[tuple[str, ...]] = [COLUMNS]
    for row in rows:
        stops, saved = f"nowhere in {row['iterations']:,} iterations", "-"
        if row["error"] is not None:
            stops = "unknown: the run has no such metric"
        elif row["stopped"]:
            stops = f"epoch {row['epoch']}, iteration {row['iteration']:,} of {row['iterations']:,}"
            share = row["saved"] / row["iterations"] if row["iterations"] else 0.0
            saved = f"{row['saved']:,} ({share:.0%})"
        best = row["best"]
        lines.append((row["run"], row["handler"], stops, "-" if best is None else f"{best:.6g}", saved))
    widths = [max(len(line[column]) for line in lines) for column in range(len(COLUMNS))]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
