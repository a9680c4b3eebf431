"""`pulsetrain replay`: shows what a handler with other settings would have done in recorded runs."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import yaml

from pulsetrain.cli.reports import DAMAGED, OK, USAGE, until_closed
from pulsetrain.configuration.shipped_handlers import HANDLERS, ShippedHandlers
from pulsetrain.configuration.yaml_text import load_yaml, one_line
from pulsetrain.engine import ConfigurationError, MetricNotFoundError, PulsetrainError
from pulsetrain.engine.plain_text import plain
from pulsetrain.engine.recording import EventLog
from pulsetrain.engine.recording.log.non_finite import finite_or_text
from pulsetrain.engine.recording.replay.playback import Replay, Stop
from pulsetrain.reproduce.what_if import ReplayedHandler, check_apart, make_handler, replay_to

__all__ = ["run", "parse_handler"]

COLUMNS = ("run", "handler", "stops at", "best", "iterations saved")


def run(arguments: argparse.Namespace) -> int:
    """Replay each run through each handler, and print the results."""
    variants = [(text, parse_handler(text)) for text in arguments.handlers]
    for text, spec in variants:
        check_apart(spec, f"--handler {text}", partial(_make, text, spec))  # all are checked before the first is played
    logs = [(run, EventLog(run, arguments.rank)) for run in arguments.runs]
    rows = [
        _what_if(run, log, text, _make(text, spec), arguments.engine) for run, log in logs for text, spec in variants
    ]
    with until_closed():
        if arguments.format == "json":
            for row in rows:
                best = row["best"] if not isinstance(row["best"], float) else finite_or_text(row["best"])
                print(json.dumps({**row, "best": best}, allow_nan=False))
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


def _make(text: str, spec: Mapping[str, object]) -> ReplayedHandler:
    name = str(spec["class_path"])
    in_words = {**spec, "class_path": name if "." in name else _in_words(name)}
    return make_handler(in_words, f"--handler {text}", _shipped(), settings=f"--handler {name}")


def _shipped() -> ShippedHandlers:
    """Handlers by the names of their classes in lower case, such as `early_stopping`."""
    return ShippedHandlers({_in_words(name): name for name in HANDLERS})


def _in_words(name: str) -> str:
    """The name of a class in lower case; a name that is in lower case already stays."""
    name = name.replace("NaN", "Nan").replace("MLflow", "Mlflow")
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def _what_if(
    run: os.PathLike[str], log: EventLog, text: str, handler: ReplayedHandler, engine: str | None
) -> dict[str, object]:
    """One row: what the handler would have done in the run."""
    stop: Stop | None = None
    failed: str | None = None
    try:
        # damage is printed after the table, once for each run
        replay = Replay(log, engine=engine, obey_terminate=True, warn_of_damage=False)
        try:
            stop = replay_to(replay, [handler])
        except MetricNotFoundError as error:
            failed = str(error)
    except PulsetrainError as error:
        raise error.with_text(f"{run}: {error}") from error
    total = replay.last_iteration
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
