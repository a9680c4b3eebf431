"""The sweeps below the folder, for the page: what `pulsetrain sweep FOLDER --status` prints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pulsetrain.engine.errors import PulsetrainError
from pulsetrain.handlers.run_files.redaction import redacted
from pulsetrain.runs.listing import path_of
from pulsetrain.runs.summary import RunSummary, Status
from pulsetrain.sweep.results import read_results

__all__ = ["sweeps_of"]


def sweeps_of(folders: Iterable[Path], runs: Mapping[str, RunSummary], root: Path) -> list[dict[str, Any]]:
    """Each sweep with its trials, the best first; one that cannot be read with the reason.

    Args:
        folders: of the sweeps.
        runs: the listed runs by their ids.
        root: what the paths of sweeps are relative to.
    """
    by_folder = {run.folder.resolve(): name for name, run in runs.items()}
    statuses = {name: run.status for name, run in runs.items()}
    return [_sweep(folder, by_folder, statuses, root) for folder in sorted(folders)]


def _sweep(folder: Path, by_folder: Mapping[Path, str], statuses: Mapping[str, Status], root: Path) -> dict[str, Any]:
    described: dict[str, Any] = {"id": path_of(folder.resolve(), root.resolve())}
    try:
        results = read_results(folder)
    except (PulsetrainError, OSError, ValueError) as error:
        return {**described, "error": redacted(str(error))}
    best = results.best
    trials = [
        {
            "number": each.number, "state": each.state_with(statuses.get(run or "")), "run": run,
            "params": redacted(dict(each.params)), "values": dict(each.values), "error": redacted(each.error),
            "iterations": each.iterations,
        }
        for each in results.ordered
        for run in [by_folder.get(each.folder.resolve())]
    ]  # fmt: skip
    return {
        **described, "metrics": list(results.directions), "directions": dict(results.directions), "trials": trials,
        "best": None if best is None else best.number,
    }  # fmt: skip
