"""Writes the report of one or more runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pulsetrain.engine.errors import ConfigurationError, RunFolderError
from pulsetrain.engine.optional import load_optional
from pulsetrain.engine.recording import EventLog
from pulsetrain.handlers.run_files.run_folder import replace_file
from pulsetrain.report.facts import read_facts
from pulsetrain.report.figure import figure_of
from pulsetrain.report.page import page_of
from pulsetrain.report.processes import read_processes
from pulsetrain.report.record import RunRecord
from pulsetrain.report.reported_run import PALETTE, ReportedRun
from pulsetrain.report.style import CHART

__all__ = ["Report", "write_report"]

NAME = "report.html"


@dataclass(frozen=True)
class Report:
    """A report that was written."""

    path: Path
    bytes: int
    curves: int  # of all runs together
    damage: tuple[str, ...]  # damaged parts of the logs, with the run's name; the page lists them, too


def write_report(
    runs: Sequence[str | os.PathLike[str]] | str | os.PathLike[str],
    into: str | os.PathLike[str] = NAME,
    *,
    force: bool = False,
) -> Report:
    """Write one HTML page about recorded runs: curves, a timeline, settings and environment. It needs no network.

    Each log is read once, in memory that does not grow with it. Curves of more than 2,000 points are drawn with the
    least and the greatest value of each interval. The run folders are only read, but `into` may be a run's own
    report.html.

    Args:
        runs: run folders, drawn over each other.
        into: the file.
        force: overwrite an existing file.

    Raises:
        RecordingError: a folder holds no log, or one without events.
        RunFolderError: the file exists, or cannot be written.
        ConfigurationError: plotly is not installed, no run is named, or one is named twice.
    """
    given = [runs] if isinstance(runs, str | os.PathLike) else runs
    folders = [Path(run) for run in given]
    names = _names(given)
    logs = [EventLog(run) for run in given]
    path = Path(into)
    _check_target(path, folders, force)
    graphs, io = (load_optional("report", f"plotly.{name}", "report") for name in ("graph_objects", "io"))
    found = []
    for index, (name, log) in enumerate(zip(names, logs, strict=True)):
        record = RunRecord(log)
        color = PALETTE[index % len(PALETTE)]
        found.append(ReportedRun(name, color, record, read_facts(log.run_folder), read_processes(log.run)))
    chart: str = io.to_html(
        graphs.Figure(figure_of(found)), config=CHART, include_plotlyjs=True, include_mathjax=False, full_html=False
    )
    content = page_of(found, chart).encode("utf-8", "backslashreplace")
    try:
        replace_file(path, content)
    except OSError as error:
        raise RunFolderError(
            f"cannot be written ({error.strerror}); choose another file", "report", into=str(path)
        ) from error
    damage = tuple(f"{run.name}: {each}" for run in found for each in run.damage)
    return Report(path, len(content), sum(len(run.record.curves) for run in found), damage)


def _names(runs: Sequence[str | os.PathLike[str]]) -> list[str]:
    """The folders' own names; what messages call the runs if two have the same name."""
    if not runs:
        raise ConfigurationError("names no run; name at least one run folder", "report", runs=[])
    paths = [Path(run).resolve() for run in runs]
    for index, path in enumerate(paths):
        if path in paths[:index]:
            raise ConfigurationError(
                f"{runs[index]} is named twice; name each run once", "report", runs=[*map(str, runs)]
            )
    names = [path.name or str(path) for path in paths]
    own = [name if names.count(name) == 1 else str(run) for name, run in zip(names, runs, strict=True)]
    return [os.fsencode(name).decode("utf-8", "backslashreplace") for name in own]  # whatever the locale is


def _check_target(path: Path, folders: Sequence[Path], force: bool) -> None:
    """Raise if the file cannot be written; called before the logs are read, which may take minutes."""
    inside = [folder for folder in folders if folder.resolve() in path.resolve().parents]
    if path.is_dir():
        rule = f"is a folder; name a file in it, such as {path / NAME}"
    elif not path.parent.is_dir():
        rule = f"{path.parent} is not a folder; create it first, or choose another file"
    elif inside and path.resolve() != inside[0].resolve() / NAME:
        rule = f"is in the run {inside[0]}, which is only read; choose another file, or {inside[0] / NAME}"
    elif path.exists() and not force:
        rule = "exists; choose another file with --into (into=...), or overwrite it with --force (force=True)"
    elif not os.access(path.parent, os.W_OK):
        rule = f"{path.parent} cannot be written; choose another folder or fix its permissions"
    else:
        return
    raise RunFolderError(rule, "report", into=str(path))
