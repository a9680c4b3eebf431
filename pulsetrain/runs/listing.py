"""Runs as a table: which columns, in which order."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

from pulsetrain.engine.errors import ConfigurationError, nearest
from pulsetrain.engine.plain_text import plain
from pulsetrain.engine.recording.log.non_finite import finite_or_text
from pulsetrain.familiar_names import familiar_setting
from pulsetrain.runs.summary import RunSummary, names_of_settings

__all__ = ["FORMATS", "check_columns", "columns_of", "path_of", "reader_of", "sorted_by"]

_FIRST = ("run", "status", "progress")
_LAST = ("tags", "from", "updated")
_OWN = (*_FIRST, *_LAST, "reason", "epoch", "iteration", "started", "id", "ranks", "parent")
_MOST = 6  # columns of metrics, and of settings, that are chosen by default
_WIDTH = 60  # characters of a cell


def columns_of(runs: Sequence[RunSummary]) -> list[str]:
    """The columns by default: best metrics, and the settings in which the runs differ."""
    metrics = list(dict.fromkeys(name for run in runs for name in run.best))[:_MOST]
    names = dict.fromkeys(chain.from_iterable(run.settings for run in runs))
    differ = [name for name in names if _differ(_values(name, runs))][:_MOST]
    root = Path()
    last = [name for name in _LAST if name == "updated" or any(map(reader_of(name, root), runs))]
    return [*_FIRST, *metrics, *differ, *last]


def _values(name: str, runs: Sequence[RunSummary]) -> list[Any]:
    """The values of a setting; most runs give it, and a call for each of these would take twice as long."""
    return [run.settings[name] if name in run.settings else run.setting(name) for run in runs]


def _differ(values: Sequence[object]) -> bool:
    """Whether there are several; 1 and 1.0 and True are, and NaN is always the same."""
    first = values[0]
    others = (each for each in values if each is not first and (each != first or type(each) is not type(first)))
    return any(repr(each) != repr(first) for each in others)


def reader_of(column: str, root: Path) -> Callable[[RunSummary], Any]:
    """What reads a column's value of a run: one of its own, its best or newest value of a metric, or a setting.

    The value is None for a run that has none.

    Args:
        column: "run", "status", ..., the name of a metric, or of a setting.
        root: what the path of a run is relative to.
    """
    match column:
        case "run":
            below = _below(root)
            return lambda run: below(run.path)
        case "status":
            return lambda run: run.status.value
        case "tags":
            return lambda run: ", ".join(run.tags)
        case "from":
            return _origin
    if column in _OWN:
        return attrgetter(column)

    def read(run: RunSummary) -> Any:
        for values in (run.best, run.last):
            if column in values:
                return values[column]
        return run.setting(column)

    return read


def _origin(run: RunSummary) -> str:
    return f"{Path(str(run.parent['run'])).name} at {run.parent.get('iteration')}" if run.parent else ""


def sorted_by(runs: Sequence[RunSummary], column: str, root: Path, *, reverse: bool = False) -> list[RunSummary]:
    """The runs in the order of a column's values; those without a value, or with NaN, are last.

    Raises:
        ConfigurationError: no run has such a column.
    """
    check_columns("sort", [column], runs)
    values = list(map(reader_of(column, root), runs))
    have = [(_key(value), run) for value, run in zip(values, runs, strict=True) if _has_order(value)]
    lack = [run for value, run in zip(values, runs, strict=True) if not _has_order(value)]
    have.sort(key=itemgetter(0), reverse=reverse)
    return [*(run for _, run in have), *lack]


def _has_order(value: object) -> bool:
    """Whether it is a value, and not NaN, whose place among others would be arbitrary."""
    return value is not None and value == value


def _key(value: object) -> tuple[str, Any]:
    """Orders numbers before texts."""
    return ("", float(value)) if isinstance(value, int | float) else (type(value).__name__, str(value))


def check_columns(argument: str, columns: Sequence[str], runs: Sequence[RunSummary]) -> None:
    """Refuse a column that no run has.

    Args:
        argument: that names the columns, for the message.
        columns: their names.
        runs: whose metrics and settings may be named.

    Raises:
        ConfigurationError: there is one; the message names the nearest.
    """
    if all(column in _OWN for column in columns):
        return
    known: dict[str, object] = dict.fromkeys(_OWN)
    for values in chain.from_iterable((run.best, run.last) for run in runs):
        known.update(values)
    known.update(names_of_settings(runs))
    for column in columns:
        if column not in known:
            near = ", ".join(_alike(column, known))
            there = f"the closest are {near}" if near else f"besides metrics and settings there are {', '.join(_OWN)}"
            raise ConfigurationError(f"no run has this column; {there}", "pulsetrain runs", **{argument: column})


def _alike(name: str, known: Collection[str]) -> list[str]:
    """Three names: what another framework calls so, and those that are most alike or have this name as a part."""
    within = [each for each in known if name and name.lower() in each.lower()]
    meant = familiar_setting(name)
    familiar = [meant] if meant is not None and meant in known else []
    return list(dict.fromkeys([*familiar, *nearest(name, known, 3), *within]))[:3]


def as_table(runs: Sequence[RunSummary], columns: Sequence[str], root: Path) -> Iterator[str]:
    """Aligned columns under a header."""
    cells = [[plain(name), *map(_cell_of(name, root), runs)] for name in columns]
    line = "  ".join(f"{{:<{max(map(len, each))}}}" for each in cells)
    for row in zip(*cells, strict=True):
        yield line.format(*row).rstrip()


def as_json(runs: Sequence[RunSummary], columns: Sequence[str], root: Path) -> Iterator[str]:
    """One JSON object per line."""
    import json

    readers = {name: reader_of(name, root) for name in columns}
    for run in runs:
        yield json.dumps({name: _finite(read(run)) for name, read in readers.items()}, default=str)


def as_csv(runs: Sequence[RunSummary], columns: Sequence[str], root: Path) -> Iterator[str]:
    """A header, and one row per run. A text that a spreadsheet would compute begins with an apostrophe."""
    import csv

    readers = [reader_of(name, root) for name in columns]
    for row in (list(columns), *([read(run) for read in readers] for run in runs)):
        line = io.StringIO()
        csv.writer(line, lineterminator="").writerow([_harmless(value) for value in row])
        yield line.getvalue()


FORMATS: dict[str, Callable[[Sequence[RunSummary], Sequence[str], Path], Iterator[str]]] = {
    "table": as_table,
    "json": as_json,
    "csv": as_csv,
}


def path_of(folder: str | Path, root: Path) -> str:
    """The run's path below the root.

    >>> [path_of(Path(folder), Path("runs")) for folder in ("runs/a/b", "runs", "/runs/a")]
    ['a/b', 'runs', '/runs/a']
    """
    return _below(root)(str(folder))


def _below(root: Path) -> Callable[[str], str]:
    """What makes the path below the root of a path."""
    above = str(root)
    start = "" if above == "." else above if above.endswith("/") else f"{above}/"
    # of texts: relative_to takes 20 times as long
    return lambda path: path.removeprefix(start) if path != above else os.path.basename(path)


def _cell_of(column: str, root: Path) -> Callable[[RunSummary], str]:
    """What makes the text of a column's cell."""
    read = reader_of(column, root)
    match column:
        case "progress":
            return _progress
        case "updated" | "started":
            return lambda run: _time(read(run))
        case "reason":
            return lambda run: plain(read(run))  # whole, as it says what to do
    return lambda run: _text(read(run))


def _time(seconds: float | None) -> str:
    return "" if seconds is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _text(value: object) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else _shown(str(value))


def _progress(run: RunSummary) -> str:
    reached = run.reached
    share = "" if (progress := reached.share) is None else f" ({progress:.0%})"
    if reached.total_epochs:
        return f"epoch {reached.epoch}/{reached.total_epochs}{share}"
    of_all = f"/{reached.total_iterations:,}" if reached.total_iterations else ""
    return f"{reached.iteration:,}{of_all}{share}"


def _shown(text: str) -> str:
    """A text in one cell, without characters that would move the cursor."""
    shown = plain(text)
    return shown if len(shown) <= _WIDTH else f"{shown[: _WIDTH - 3]}..."


def _harmless(value: object) -> object:
    if not isinstance(value, str):
        return value
    return plain(f"'{value}" if value[:1] in ("=", "+", "-", "@", "\t", "\r") else value)


def _finite(value: object) -> object:
    """JSON has no other numbers."""
    return finite_or_text(value) if isinstance(value, float) else value
