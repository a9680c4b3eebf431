"""Runs as a table: which columns, in which order."""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from pulsetrain.engine.errors import ConfigurationError, nearest
from pulsetrain.engine.plain_text import plain
from pulsetrain.engine.recording.log.non_finite import finite_or_text
from pulsetrain.runs.summary import RunSummary

__all__ = ["FORMATS", "check_columns", "columns_of", "path_of", "sorted_by", "value_of"]

_FIRST = ("run", "status", "progress")
_LAST = ("tags", "from", "updated")
_OWN = (*_FIRST, *_LAST, "reason", "epoch", "iteration", "started", "id", "ranks", "parent")
_MOST = 6  # columns of metrics, and of settings, that are chosen by default
_WIDTH = 60  # characters of a cell


def columns_of(runs: Sequence[RunSummary]) -> list[str]:
    """The columns by default: best metrics, and the settings in which the runs differ."""
    metrics = list(dict.fromkeys(name for run in runs for name in run.best))[:_MOST]
    names = dict.fromkeys(name for run in runs for name in run.settings)
    differ = [name for name in names if _differ([run.settings.get(name) for run in runs])][:_MOST]
    root = Path()
    last = [name for name in _LAST if name == "updated" or any(value_of(run, name, root) for run in runs)]
    return [*_FIRST, *metrics, *differ, *last]


def _differ(values: Sequence[object]) -> bool:
    """Whether there are several; 1 and 1.0 and True are, and NaN is always the same."""
    first = values[0]
    others = (each for each in values if each is not first and (each != first or type(each) is not type(first)))
    return any(repr(each) != repr(first) for each in others)


def value_of(run: RunSummary, column: str, root: Path) -> Any:
    """A value of the run: one of its own, its best or newest value of a metric, or a setting; None if it has none.

    Args:
        run: the run.
        column: "run", "status", ..., the name of a metric, or of a setting.
        root: what the path of the run is relative to.
    """
    match column:
        case "run":
            return path_of(run.folder, root)
        case "status":
            return run.status.value
        case "tags":
            return ", ".join(run.tags)
        case "from":
            return f"{Path(str(run.parent['run'])).name} at {run.parent.get('iteration')}" if run.parent else ""
    if column in _OWN:
        return getattr(run, column)
    for values in (run.best, run.last, run.settings):
        if column in values:
            return values[column]
    return None


def sorted_by(runs: Sequence[RunSummary], column: str, root: Path, *, reverse: bool = False) -> list[RunSummary]:
    """The runs in the order of a column's values; those without a value, or with NaN, are last.

    Raises:
        ConfigurationError: no run has such a column.
    """
    check_columns("sort", [column], runs)
    values = [value_of(run, column, root) for run in runs]
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
    known = dict.fromkeys(_OWN)
    for run in runs:
        for names in (run.best, run.last, run.settings):
            known.update(dict.fromkeys(names))
    for column in columns:
        if column not in known:
            near = ", ".join(_alike(column, known))
            there = f"the closest are {near}" if near else f"besides metrics and settings there are {', '.join(_OWN)}"
            raise ConfigurationError(f"no run has this column; {there}", "pulsetrain runs", **{argument: column})


def _alike(name: str, known: Collection[str]) -> list[str]:
    """The three names that are most alike, or have this name as a part."""
    within = [each for each in known if name and name.lower() in each.lower()]
    return list(dict.fromkeys([*nearest(name, known, 3), *within]))[:3]


def as_table(runs: Sequence[RunSummary], columns: Sequence[str], root: Path) -> Iterator[str]:
    """Aligned columns under a header."""
    rows = [[*map(plain, columns)], *([_cell(run, name, root) for name in columns] for run in runs)]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    line = "  ".join(f"{{:<{width}}}" for width in widths)
    for row in rows:
        yield line.format(*row).rstrip()


def as_json(runs: Sequence[RunSummary], columns: Sequence[str], root: Path) -> Iterator[str]:
    """One JSON object per line."""
    for run in runs:
        yield json.dumps({name: _finite(value_of(run, name, root)) for name in columns}, default=str)


def as_csv(runs: Sequence[RunSummary], columns: Sequence[str], root: Path) -> Iterator[str]:
    """A header, and one row per run. A text that a spreadsheet would compute begins with an apostrophe."""
    for row in (list(columns), *([value_of(run, name, root) for name in columns] for run in runs)):
        line = io.StringIO()
        csv.writer(line, lineterminator="").writerow([_harmless(value) for value in row])
        yield line.getvalue()


FORMATS: dict[str, Callable[[Sequence[RunSummary], Sequence[str], Path], Iterator[str]]] = {
    "table": as_table,
    "json": as_json,
    "csv": as_csv,
}


def path_of(folder: Path, root: Path) -> str:
    """The run's path below the root.

    >>> [path_of(Path(folder), Path("runs")) for folder in ("runs/a/b", "runs", "/runs/a")]
    ['a/b', 'runs', '/runs/a']
    """
    path, above = str(folder), str(root)
    if path == above:
        return folder.name
    if above == ".":
        return path
    above = above if above.endswith("/") else f"{above}/"
    return path.removeprefix(above)  # of texts: relative_to takes 20 times as long


def _cell(run: RunSummary, column: str, root: Path) -> str:
    value = value_of(run, column, root)
    if column == "progress":
        return _progress(run)
    if column in ("updated", "started"):
        return "" if value is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(value))
    if column == "reason":
        return plain(value)  # whole, as it says what to do
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else _shown(str(value))


def _progress(run: RunSummary) -> str:
    share = "" if run.progress is None else f" ({run.progress:.0%})"
    if run.total_epochs:
        return f"epoch {run.epoch}/{run.total_epochs}{share}"
    return f"{run.iteration:,}{f'/{run.total_iterations:,}' if run.total_iterations else ''}{share}"


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
